"""Several answers of one call, written side by side: calls that are made ready, run together, and put into bodies."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from ..errors import ConfigError
from ..session.session import Session
from .lenient import warn
from .merged import merged
from .options import LLAMA_DEFAULT_SEED
from .runs import LlamaRuns

Call = Callable[[], dict[str, Any]]


def run_together(
    session: Session, calls: Sequence[Call], places: int, after: Callable[[], None]
) -> list[dict[str, Any]]:
    """What all calls give, in their order; `places` at a time. The first error, in that order, is raised once all have ended.

    after: done at the end of the turn that they share. An interrupt of the caller, or of a call, ends all within a step.
    """
    if places == 1 or len(calls) == 1:
        return [call() for call in calls]
    with session.together(after) as group:
        pool = ThreadPoolExecutor(places, "dflash-together")
        try:
            return [future.result() for future in [pool.submit(group.run, call) for call in calls]]
        except BaseException as error:
            if not isinstance(error, Exception):
                group.stop()
                pool.shutdown(wait=False, cancel_futures=True)
            raise
        finally:
            pool.shutdown()


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

    _told: frozenset[str] = frozenset()  # what was warned of

    def create_completions(
        self, prompts: Sequence[str | Sequence[int]], *, n: int = 1, seed: int | None = None, **options: Any
    ) -> list[dict[str, Any]]:
        """Continue several texts side by side: a dict each, of n choices, in their order. options: of create_completion.

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
        """Answer several conversations side by side, as create_completions continues texts."""
        if "stream" in options:
            raise TypeError("create_chat_completions() got an unexpected keyword argument 'stream'")
        calls: list[Any] = []
        for messages in conversations:
            for own in self._drawn(seed, n):
                calls.append(partial(self.create_chat_completion, messages=messages, seed=own, **options))
                self.set_seed(own)  # as a call of its own would
        bodies = self._together(calls)
        return [merged(bodies[i : i + n], n) for i in range(0, len(bodies), n)]

    def _completions(
        self, prompts: Sequence[Any], seed: int | None, n: int, options: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        calls: list[Any] = [
            self._completion(prompt, own, False, **options)
            for prompt in prompts
            for own in self._drawn(seed, n)
        ]
        return self._together(calls)

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

    def _together(self, calls: Sequence[Call]) -> list[dict[str, Any]]:
        if self.n_seq_max > 1 and len(calls) > 1:
            self._tell_left_out()
        return run_together(self.session, calls, self.n_seq_max, self._follow_engine)

    def _tell_left_out(self) -> None:
        """One warning of what belongs to the one context, and is left alone by texts that are written beside it."""
        left_out = {
            "set_cache: the cache is neither asked nor filled": self.cache is not None,
            "logits_all: scores are not kept": self._logits_all,
        }
        new = [told for told, asked in left_out.items() if asked and told not in self._told]
        self._told |= set(new)
        warn([f"{told} where several texts are written side by side" for told in new])

    @staticmethod
    def _all_options(method: Any, apart: Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords of a method with their defaults, but for those apart. Raises TypeError for others."""
        parameters = inspect.signature(method).parameters
        defaults = {name: value.default for name, value in parameters.items() if name not in apart}
        unknown = sorted(set(options) - set(defaults))
        if unknown:
            raise TypeError(f"create_completions() got an unexpected keyword argument {unknown[0]!r}")
        return {**defaults, **options}
