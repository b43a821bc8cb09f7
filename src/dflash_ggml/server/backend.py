"""What the worker thread runs requests on: a session with its engine, seen as a source of events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

from ..session.events import Event, Finish, Usage
from ..session.requests import ChatRequest, CompletionRequest
from ..session.session import Session, run_chat, run_completion
from .metrics import Metrics
from .step_view import StepView


class Backend:
    """Owns a session's engine. `events` and `close` belong to the worker thread, the rest to any."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.tokenizer = session.engine.tokenizer
        self.n_ctx: int = session.engine.n_ctx

    def events(
        self, request: ChatRequest | CompletionRequest, cancelled: Callable[[], bool], return_steps: bool
    ) -> Generator[Any, None, None]:
        """The session's events; if asked for, a StepView of each engine step before the events it led to."""
        steps: deque[StepView] = deque()
        if return_steps:
            request = replace(request, on_step=lambda step: steps.append(StepView.of(step, self.tokenizer)))
        with closing(self._run(request, cancelled)) as events:
            for event in events:
                while steps:
                    yield steps.popleft()
                yield event

    def _run(
        self, request: ChatRequest | CompletionRequest, cancelled: Callable[[], bool]
    ) -> Generator[Event, None, None]:
        if isinstance(request, ChatRequest):
            yield from run_chat(self.session, request, should_stop=cancelled)
        else:
            yield from run_completion(self.session, request, should_stop=cancelled)

    def count(self, request: ChatRequest | CompletionRequest) -> int:
        """Tokens of a request's prompt. Raises ConfigError for one that cannot be rendered."""
        if isinstance(request, ChatRequest):
            return self.session.count_tokens(request)
        return len(self.session.completion_ids(request))

    def info(self) -> dict[str, Any]:
        """What /props tells about the model."""
        engine = self.session.engine
        return {
            "n_ctx": engine.n_ctx,
            "n_vocab": engine.n_vocab,
            "has_draft": engine.has_draft,
            "mode": engine.config.mode,
            "budget": engine.config.budget,
            "chat_template": self.tokenizer.chat_template,
            "bos_token": self._text(self.tokenizer.bos_id),
            "eos_token": self._text(self.tokenizer.eos_id),
        }

    def _text(self, token: int | None) -> str | None:
        return None if token is None else self.tokenizer.token_bytes(token).decode("utf-8", "replace")

    def close(self) -> None:
        """Free the engine's memory."""
        self.session.engine.close()


def work(
    request: ChatRequest | CompletionRequest, return_steps: bool, metrics: Metrics
) -> Callable[[Backend, Callable[[], bool]], Iterator[Any]]:
    """A worker's job that answers one request and counts it."""

    def run(backend: Backend, cancelled: Callable[[], bool]) -> Iterator[Any]:
        with closing(backend.events(request, cancelled, return_steps)) as events:
            for event in events:
                if isinstance(event, Usage):
                    metrics.usage(event)
                elif isinstance(event, Finish):
                    metrics.finished(event.reason)
                yield event

    return run
