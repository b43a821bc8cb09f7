"""One run of a generation, as every call of `Llama` makes it: its sampler, the state cache, `scores`."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ..errors import ConfigError
from ..session.binding import unbound
from ..session.events import Event, Usage
from ..session.generation import Generation
from ..session.hooks import Hooks
from ..session.openai_parts import usage_line
from ..session.requests import ChatRequest, CompletionRequest
from ..session.scheduler import Scheduler
from ..session.session import generation_of
from ..session.slots import CachedSlot
from .embedding import LlamaEmbeddings
from .left_out import settled
from .lenient import whole
from .requests import sampling_params


class Batch:
    """Generations of one call, which run while any of them is waited for; behind the `with` block all have ended."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._generations = scheduler, list[Generation]()

    def add(self, generation: Generation) -> Iterator[Event]:
        """Begin a generation; its events."""
        generation.runs_ahead = True
        self._scheduler.submit(generation)
        self._generations.append(generation)
        return self._scheduler.events(generation)

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *exc: object) -> None:
        for generation in self._generations:
            self._scheduler.abandon(generation)


def _warn_of_unbound(request: ChatRequest | CompletionRequest) -> None:
    """Say what of a request's schemas binds nothing."""
    with suppress(ConfigError):  # what is wrong is raised where the request is prepared
        for label, what in unbound(request):
            warnings.warn(f"{label}: {what} (not enforced)", stacklevel=5)


class LlamaRuns(LlamaEmbeddings):
    """The part of `Llama` that runs a request."""

    def _events(
        self, request: ChatRequest | CompletionRequest, hooks: Hooks, batch: Batch | None = None
    ) -> Iterator[Event]:
        """The events of a generation: of a batch, which begins at once, or alone, with the context and the state cache."""
        _warn_of_unbound(request)
        if batch is None:
            return self._reported(self._alone(request, hooks))
        prepared = self.session.prepare(request)
        return self._reported(batch.add(generation_of(self.session, prepared, hooks)))

    def _alone(self, request: ChatRequest | CompletionRequest, hooks: Hooks) -> Iterator[Event]:
        """Run a generation with the state cache before and after it, and `scores` of it with logits_all."""
        prepared = self.session.prepare(request)
        keepers = (*self._row_keeper(), *hooks.logits_processor)
        hooks = replace(hooks, logits_processor=keepers, on_end=self._keep_context)
        self._consult_cache(prepared.ids)
        yield from self.session.scheduler.run(generation_of(self.session, prepared, hooks))

    def _keep_context(self, slot: CachedSlot) -> None:
        """After a generation the context is what its slot holds."""
        self._follow(slot.tokens)
        if self.cache is not None:
            self.cache[self._input_ids.tolist()] = self._saved_state(slot)

    def _reported(self, events: Iterator[Event]) -> Iterator[Event]:
        """The same events; with `verbose` the statistics are printed."""
        for event in events:
            if self.verbose and isinstance(event, Usage):
                print(usage_line(event), file=sys.stderr)
            yield event

    def _row_keeper(self) -> list[Any]:
        """With logits_all, a processor that changes nothing and fills `scores` for what is generated."""
        if not self._logits_all:
            return []

        def keep(ids: Any, scores: Any) -> Any:
            self.scores[len(ids) - 1] = scores
            return scores

        return [keep]

    def _sampling(self, seed: int | None, **options: Any) -> Any:
        """Sampler options with the call's seed, or the next of the constructor seed's chain."""
        seed = random.Random(self._seed).randint(0, 2**32) if seed is None else whole("seed", seed)
        self.set_seed(seed)
        options = settled(options, self._recommended)
        return sampling_params(
            seed=seed, last_n_tokens_size=self.last_n_tokens_size, n_vocab=self._n_vocab, **options
        )
