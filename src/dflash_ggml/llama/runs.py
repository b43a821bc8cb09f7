"""Running the requests of a `Llama`: one by one with its context, or several as a batch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ..errors import ConfigError
from ..session.binding import unbound
from ..session.events import Event, Usage
from ..session.generation import Generation
from ..session.hooks import Hooks
from ..session.openai_parts import usage_line
from ..session.prefix_cache import common_prefix
from ..session.requests import ChatRequest, CompletionRequest
from ..session.scheduler import Scheduler
from ..session.session import generation_of
from ..session.slots import CachedSlot
from .lenient import warn


class Batch:
    """Generations of one call, which run while any of them is awaited; after the `with` block all have ended."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._generations = scheduler, list[Generation]()

    def add(self, generation: Generation) -> Iterator[Event]:
        """Begin a generation; returns its events."""
        generation.runs_ahead = True
        self._scheduler.submit(generation)
        self._generations.append(generation)
        return self._scheduler.events(generation)

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *exc: object) -> None:
        for generation in self._generations:
            self._scheduler.abandon(generation)


def all_of(calls: Sequence[Callable[[], dict[str, Any]]]) -> list[dict[str, Any]]:
    """Results of all calls, in order. The first error is raised once all have ended."""
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
    """Whether a prompt is one text or its ids, not a list of several."""
    if isinstance(prompt, (str, bytes)) or not isinstance(prompt, Iterable):
        return True  # an invalid prompt is not a list either
    return not any(isinstance(part, (str, list, tuple)) for part in prompt)


def events_of(
    llm: Any, request: ChatRequest | CompletionRequest, hooks: Hooks, batch: Batch | None = None
) -> Iterator[Event]:
    """The events of a generation.

    Args:
        llm: The Llama.
        request: The request.
        hooks: Callables for steps and the end.
        batch: Begin it at once as part of this batch; None: alone, with the context and the state cache.
    """
    with suppress(ConfigError):  # errors are raised when the request is prepared
        for label, what in unbound(request):
            warn([f"{label}: {what} (not enforced)"])
    if batch is None:
        return _reported(llm, _alone(llm, request, hooks))
    prepared = llm.session.prepare(request)
    return _reported(llm, batch.add(generation_of(llm.session, prepared, hooks)))


def _reported(llm: Any, events: Iterator[Event]) -> Iterator[Event]:
    """Pass events through, and print statistics with `verbose`."""
    for event in events:
        if llm.verbose and isinstance(event, Usage):
            print(usage_line(event), file=sys.stderr)
        yield event


def _alone(llm: Any, request: ChatRequest | CompletionRequest, hooks: Hooks) -> Iterator[Event]:
    """Run a generation with the state cache, and its `scores` with logits_all."""
    prepared = llm.session.prepare(request)

    def keep_scores(ids: Any, scores: Any) -> Any:
        llm.scores[len(ids) - 1] = scores
        return scores

    def keep_context(slot: CachedSlot) -> None:
        llm._ctx.follow(slot.tokens)
        if llm.cache is not None:
            llm.cache[list(slot.tokens)] = llm._ctx.state(slot, llm._seed)

    keepers = (keep_scores,) if llm._logits_all else ()
    hooks = replace(hooks, logits_processor=(*keepers, *hooks.logits_processor), on_end=keep_context)
    _consult_cache(llm, prepared.ids)
    yield from llm.session.scheduler.run(generation_of(llm.session, prepared, hooks))


def _consult_cache(llm: Any, prompt: Sequence[int]) -> None:
    """Load the cached state with a longer common prefix than the context's; the seed stays."""
    if not llm.cache:
        return
    try:
        item = llm.cache[prompt]
    except KeyError:
        return
    if common_prefix(item.input_ids[: item.n_tokens], prompt) > common_prefix(llm._ctx.ids, prompt):
        llm._ctx.restore(item, lambda: None)
