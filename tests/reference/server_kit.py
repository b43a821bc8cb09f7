"""A fake runner that plays scripted events, and helpers to put the server's application around it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette

from dflash_ggml.errors import ContextOverflowError
from dflash_ggml.server.app import Service, create_app, make_service
from dflash_ggml.server.dialect import Settings
from dflash_ggml.server.limits import Limits
from dflash_ggml.session.events import (
    Begin,
    Finish,
    Progress,
    ReasoningDelta,
    SourceTotal,
    StepReport,
    TextDelta,
    TokenLogprob,
    ToolCallArgs,
    ToolCallBegin,
    ToolCallEnd,
    TopLogprob,
    Usage,
    WidthUse,
)
from dflash_ggml.session.prompts import Prepared
from dflash_ggml.session.requests import CompletionRequest
from reference.fake_engine import byte_vocabulary

STEP = StepReport(
    tokens=(72, 101, 105, 108),
    parents=(-1, 0, 0, 1),
    texts=("H", "e", "i", "l"),
    log_probs=(0.0, -0.2, -1.7, -0.4),
    path=(0, 1, 3),
    accepted=2,
    emitted=("e", "l", "l"),
    mode="tree",
    times={"draft": 1.0, "tree": 0.1, "verify": 2.0, "commit": 0.2, "host": 0.1},
)
SOURCES = (SourceTotal("dflash", 4, 52, 3), SourceTotal("suffix", 2, 14, 4))
USAGE = Usage(12, 5, 9, 3, 4, 60, 5, 8.0, 40.0, "tree", 15, (WidthUse(15, 4, 9, 40.0, None),), SOURCES)
LOGPROB = TokenLogprob(7, b"Hi", -0.25, (TopLogprob(7, b"Hi", -0.25), TopLogprob(9, b"Ho", -2.0)))


def plain(text: str = "Hello there", reason: str = "stop", stop: str | None = None) -> list[Any]:
    """An answer of text only, in three deltas."""
    third = max(1, len(text) // 3)
    deltas = [TextDelta(p) for p in (text[:third], text[third : 2 * third], text[2 * third :]) if p]
    return [Begin(12, 5), *deltas, USAGE, Finish(reason, stop)]


def thoughtful() -> list[Any]:
    """Reasoning, then text."""
    return [
        Progress("prefill", 6, 12),
        Begin(12, 5),
        Progress("prefill", 12, 12),
        ReasoningDelta("Let me "),
        ReasoningDelta("think."),
        TextDelta("Answer: "),
        TextDelta("42"),
        USAGE,
        Finish("stop"),
    ]


def calling() -> list[Any]:
    """Reasoning, a word of text, and two tool calls."""
    return [
        Begin(12, 5),
        ReasoningDelta("I need the weather."),
        TextDelta("One moment."),
        ToolCallBegin(0, "call_a", "weather"),
        ToolCallArgs(0, '{"city": '),
        ToolCallArgs(0, '"Paris"}'),
        ToolCallEnd(0),
        ToolCallBegin(1, "call_b", "weather"),
        ToolCallArgs(1, '{"city": "Rome"}'),
        ToolCallEnd(1),
        USAGE,
        Finish("tool_calls"),
    ]


class ScriptedRunner:
    """Plays `script(request)`; remembers the requests. `pace` seconds pass before each event.

    A request is endless when the script is `None`: one TextDelta after the other until it is cancelled.
    """

    def __init__(self, script: Callable[[Any], Sequence[Any] | None] = lambda request: plain()) -> None:
        self.script = script
        self.pace = 0.0
        self.word = "word "
        self.requests: list[Any] = []
        self.cancelled = 0
        self.tokenizer = byte_vocabulary()
        self.n_ctx = 256
        self.parallel = 1
        self.prefill_fp8 = False
        self.closed = False

    def events(self, prepared: Prepared, cancelled: Callable[[], bool]) -> Iterator[Any]:
        request = prepared.request
        self.requests.append(request)
        script = self.script(request)
        if isinstance(script, BaseException):
            raise script
        if script is None:
            yield Begin(3, 0)
            while not cancelled():
                time.sleep(self.pace)
                yield TextDelta(self.word)
            self.cancelled += 1
            yield Usage(3, 0, 1, 0, 1, 4, 0, 1.0, 1.0, "tree", 15)
            yield Finish("cancelled")
            return
        for event in script:
            if cancelled():
                self.cancelled += 1
                return
            if self.pace:
                time.sleep(self.pace)
            if isinstance(event, BaseException):
                raise event
            if request.return_steps and isinstance(event, TextDelta):
                yield STEP
            yield event

    def count(self, request: Any) -> int:
        """One token per character of the prompt."""
        if isinstance(request, CompletionRequest):
            return len(request.prompt)
        return sum(len(str(m.get("content", ""))) for m in request.messages)

    def prepare(self, request: Any) -> Prepared:
        n = self.count(request)
        if n >= self.n_ctx:
            raise ContextOverflowError(
                f"Requested tokens ({n}) exceed context window of {self.n_ctx}", n, self.n_ctx
            )
        text = getattr(request, "prompt", "")
        return Prepared(request, text if isinstance(text, str) else "", (0,) * n)

    def render(self, request: Any) -> str:
        return str(self.count(request))

    def text_tokens(self, text: Any, truncate: bool) -> tuple[int, ...]:
        """As many tokens as it has characters, or as it is long."""
        return self.prepare(CompletionRequest(prompt=text)).ids

    def embed(self, ids: Any, cancelled: Callable[[], bool]) -> Any:
        return np.arange(1, 9, dtype=np.float32)

    def info(self) -> dict[str, Any]:
        return {
            "model_path": "toy.gguf",
            "model_size": 4096,
            "n_ctx": self.n_ctx,
            "n_embd": 8,
            "n_vocab": 300,
            "has_draft": True,
            "mode": "auto",
            "budget": 15,
            "prefill_fp8": self.prefill_fp8,
            "chat_template": "x",
        }

    def load(self) -> dict[str, float]:
        counts = dict.fromkeys(
            (
                "passes",
                "columns",
                "sequences",
                "emitted",
                "preemptions",
                "running",
                "waiting",
                "graphs",
                "built",
            ),
            0,
        )
        return {**counts, "seconds": 0.0}

    def close(self) -> None:
        self.closed = True


def service(runner: ScriptedRunner, **options: Any) -> Service:
    """A service around a scripted runner; `limits`, `strict`, `strict_model` and make_service's options may be given."""
    limits = options.pop("limits", Limits())
    rules = {name: options.pop(name, False) for name in ("strict", "strict_model")}
    settings = Settings(names=("toy", "toy-alias"), limits=limits, **rules)
    return make_service(lambda progress: runner, settings, **options)  # type: ignore[arg-type,return-value]


def application(runner: ScriptedRunner, **options: Any) -> Starlette:
    """The ASGI application around a scripted runner."""
    return create_app(service(runner, **options))


@contextmanager
def serving(app: Starlette) -> Iterator[int]:
    """Run an application on a loopback port in a thread; yields the port."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield sock.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(20)
        sock.close()
        assert not thread.is_alive()


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Poll until `condition()`; fails after a bound that only a hang can reach."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)
