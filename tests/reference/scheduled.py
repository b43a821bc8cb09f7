"""Sessions on the toy engine whose texts are written side by side, with requests for them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import SamplingParams
from dflash_ggml.session.answer import Answer
from dflash_ggml.session.requests import ChatRequest, CompletionRequest
from dflash_ggml.session.session import Session, completion_generation, run_chat, run_completion
from reference.fake_engine import FakeEngine
from reference.fake_places import FakePlaces

GUARD_S = 60


def config(n_ctx: int = 1024, n_batch: int = 32) -> EngineConfig:
    return EngineConfig(model=Path("toy.gguf"), n_ctx=n_ctx, n_batch=n_batch)


def session(parallel: int = 4, n_ctx: int = 1024, n_batch: int = 32, **options: Any) -> Session:
    return Session(FakePlaces(config(n_ctx, n_batch), parallel=parallel), side_by_side=True, **options)  # type: ignore[arg-type]


def request(i: int, **options: Any) -> CompletionRequest:
    """A prompt of its own, with sampling of its own."""
    sampling = SamplingParams(temperature=0 if i % 3 == 0 else 0.5 + 0.2 * (i % 4), seed=i)
    return CompletionRequest(
        **{
            "prompt": f"{i} text " * (3 + 5 * (i % 4)),
            "sampling": sampling,
            "max_tokens": 12 + 3 * (i % 5),
            **options,
        }
    )


def alone(asked: Any) -> Answer:
    run = run_chat if isinstance(asked, ChatRequest) else run_completion
    return Answer.of(run(Session(FakeEngine(config())), asked))  # type: ignore[arg-type]


def together(on: Session, asked: list[Any]) -> list[Any]:
    """The answers of requests, or what they raised, each read by a thread of its own."""
    runs = [run_completion(on, one) for one in asked]
    answers: list[Any] = [Answer() for _ in asked]
    threads = [threading.Thread(target=read, args=(run, answers, i)) for i, run in enumerate(runs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GUARD_S)
        assert not thread.is_alive()
    return answers


def read(run: Any, answers: list[Any], i: int) -> None:
    try:
        for event in run:
            answers[i].feed(event)
    except Exception as error:  # noqa: BLE001 - what a test looks at
        answers[i] = error


def events(on: Session, asked: CompletionRequest, seat: Any) -> Any:
    """What a task runs."""
    return completion_generation(on, on.prepare(asked), seat).events()
