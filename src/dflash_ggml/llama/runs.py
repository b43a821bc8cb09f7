"""One run of a generation, as every call of `Llama` makes it: its sampler, the state cache, `scores`."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..session.events import Event, Usage
from ..session.hooks import Hooks
from ..session.openai_parts import usage_line
from ..session.requests import ChatRequest, CompletionRequest
from ..session.session import run_chat, run_completion
from .embedding import LlamaEmbeddings
from .left_out import settled
from .requests import sampling_params


class LlamaRuns(LlamaEmbeddings):
    """The part of `Llama` that runs a request."""

    def _events(self, request: ChatRequest | CompletionRequest, hooks: Hooks) -> Iterator[Event]:
        """Run a generation; where it is alone, with the state cache before and after it, and `scores` of it with logits_all."""
        prepared = self.session.prepare(request)
        run = run_chat if isinstance(request, ChatRequest) else run_completion
        if self.session.runs_beside:
            for event in run(self.session, prepared, hooks=hooks):
                if isinstance(event, Usage):
                    self._tell(event)
                yield event
            return
        hooks = replace(hooks, logits_processor=(*self._row_keeper(), *hooks.logits_processor))
        self._consult_cache(prepared.ids)
        for event in run(self.session, prepared, hooks=hooks):
            if isinstance(event, Usage):  # the generation is over, and the turn still ours
                self._tell(event)
                self._follow_engine()
                if self.cache is not None:
                    self.cache[self._input_ids.tolist()] = self._saved_state()
            yield event

    def _tell(self, usage: Usage) -> None:
        if self.verbose:
            print(usage_line(usage), file=sys.stderr)

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
        seed = seed if seed is not None else random.Random(self._seed).randint(0, 2**32)
        if self.session.group is None:  # the calls of a list have their seeds drawn before
            self.set_seed(seed)
        options = settled(options, self._recommended)
        return sampling_params(
            seed=seed, last_n_tokens_size=self.last_n_tokens_size, n_vocab=self._n_vocab, **options
        )
