"""One engine, one conversation at a time: requests in, events out. Knows nothing of HTTP or of response shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .events import Event
from .requests import ChatRequest, CompletionRequest


class Session:
    """An engine with what requests share: chat template, grammar compiler and prefix cache.

    engine: the Engine; cache_bytes: budget of the prefix cache (0 turns it off).
    """

    def __init__(self, engine, *, cache_bytes: int = 1 << 30, template=None) -> None:
        self.engine = engine
        self.cache_bytes = cache_bytes
        self.template = template


def run_chat(
    session: Session, request: ChatRequest, *, should_stop: Callable[[], bool] | None = None
) -> Iterator[Event]:
    """Yield the events of one answer; see `events` for their order. Closing the iterator cancels within one step.

    Raises (at the first next()): ContextOverflowError, ConfigError. should_stop is asked once per step.
    """
    raise NotImplementedError


def run_completion(
    session: Session, request: CompletionRequest, *, should_stop: Callable[[], bool] | None = None
) -> Iterator[Event]:
    """As run_chat, for a plain continuation: TextDelta, Usage and Finish only."""
    raise NotImplementedError
