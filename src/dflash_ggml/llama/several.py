"""Several answers of one call, decoded as a batch and put into bodies."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from ..errors import ConfigError
from .lenient import warn
from .merged import merged
from .options import LLAMA_DEFAULT_SEED
from .runs import Batch, LlamaRuns

Call = Callable[[], dict[str, Any]]


def all_of(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """What all calls give, in their order. The first error is raised once all have ended."""
    bodies, errors = list[dict[str, Any]](), list[Exception]()
    for call in calls:
        try:
            bodies.append(call())
        except Exception as error:  # noqa: BLE001 - raised below
            errors.append(error)
    if errors:
        raise errors[0]
    return bodies


def is_one(prompt: Any) -> bool:
    """Whether a prompt is one text, or the ids of one, and not a list of several."""
    if isinstance(prompt, (str, bytes)) or not isinstance(prompt, Iterable):
        return True  # what is no prompt at all is no list of them either
    return not any(isinstance(part, (str, list, tuple)) for part in prompt)


class LlamaSeveral(LlamaRuns):
    """The part of `Llama` that answers lists."""

    create_completion: Any
    create_chat_completion: Any
    _completion: Any
    _handler_in_use: Any

    _told: frozenset[str] = frozenset()  # what was warned of

    def create_completions(
        self, prompts: Sequence[str | Sequence[int]], *, n: int = 1, seed: int | None = None, **options: Any
    ) -> list[dict[str, Any]]:
        """Continue several texts as a batch: a dict each, of n choices, in their order. options: of create_completion.

        Raises as create_completion, for the first of them that cannot be, once all others have ended.
        """
        options = self._all_options(self.create_completion, ("prompt", "seed", "n", "stream"), options)
        bodies = self._completions(prompts, seed, n, options)
        return [merged(bodies[i : i + n], n) for i in range(0, len(bodies), n)]

    def create_chat_completions(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        *,
        n: int = 1,
        seed: int | None = None,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """Answer several conversations as a batch, as create_completions continues texts."""
        if "stream" in options:
            raise TypeError("create_chat_completions() got an unexpected keyword argument 'stream'")
        each = [(messages, own) for messages in conversations for own in self._drawn(seed, n)]
        # a handler that does more than make a prompt answers one conversation after the other
        defers = getattr(self._handler_in_use(), "only_prompts", False)
        calls: list[Any] = []
        with self._batch(len(each)) as batch:
            for messages, own in each:
                call = partial(self.create_chat_completion, messages=messages, seed=own, **options)
                calls.append(call(stream=batch) if defers and batch is not None else call)
            bodies = all_of(calls)
        return [merged(bodies[i : i + n], n) for i in range(0, len(bodies), n)]

    def _completions(
        self, prompts: Sequence[Any], seed: int | None, n: int, options: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        each = [(prompt, own) for prompt in prompts for own in self._drawn(seed, n)]
        with self._batch(len(each)) as batch:
            return all_of([self._completion(*one, False, batch=batch, **options) for one in each])

    def _drawn(self, seed: int | None, n: int) -> list[int]:
        """Seeds of n choices: the one that was asked for and the next ones, so that they differ and can be had again; n times one
        that asks for fresh entropy; or the next of the constructor seed's chain."""
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ConfigError(f"n: expected 1 or more, got {n!r}")
        if seed is not None:
            seed &= 0xFFFFFFFF
            if seed == LLAMA_DEFAULT_SEED:
                return [seed] * n
            return [(seed + i) % LLAMA_DEFAULT_SEED for i in range(n)]  # behind the last seed comes 0
        drawn = []
        for _ in range(n):
            drawn.append(random.Random(self._seed).randint(0, 2**32))
            self.set_seed(drawn[-1])
        return drawn

    def _batch(self, n: int) -> AbstractContextManager[Batch | None]:
        """A batch for n generations; None where they run one by one. One warning of what belongs to the context, which a batch
        leaves alone."""
        if self.n_seq_max == 1 or n == 1:
            return nullcontext()
        left_out = {
            "set_cache: the cache is neither asked nor filled": self.cache is not None,
            "logits_all: scores are not kept": self._logits_all,
        }
        new = [told for told, asked in left_out.items() if asked and told not in self._told]
        self._told |= set(new)
        warn([f"{told} where several sequences are decoded as a batch" for told in new])
        return Batch(self.session.scheduler)

    @staticmethod
    def _all_options(method: Any, apart: Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords of a method with their defaults, but for those apart. Raises TypeError for others."""
        parameters = inspect.signature(method).parameters
        defaults = {name: value.default for name, value in parameters.items() if name not in apart}
        unknown = sorted(set(options) - set(defaults))
        if unknown:
            raise TypeError(f"create_completions() got an unexpected keyword argument {unknown[0]!r}")
        return {**defaults, **options}
