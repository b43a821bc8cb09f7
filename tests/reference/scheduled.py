"""Sessions on the toy engine with several slots, and requests for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import SamplingParams
from dflash_ggml.session.answer import Answer
from dflash_ggml.session.generation import RequestGeneration
from dflash_ggml.session.requests import ChatRequest, CompletionRequest
from dflash_ggml.session.session import Session, generation_of, run_chat, run_completion
from reference.fake_engine import FakeEngine

GUARD_S = 60


def config(n_ctx: int = 1024, n_batch: int = 32) -> EngineConfig:
    return EngineConfig(model=Path("toy.gguf"), n_ctx=n_ctx, n_batch=n_batch)


def session(parallel: int = 4, n_ctx: int = 1024, n_batch: int = 32, **options: Any) -> Session:
    return Session(FakeEngine(config(n_ctx, n_batch), parallel=parallel), **options)  # type: ignore[arg-type]


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


def alone(one: Any) -> Answer:
    run = run_chat if isinstance(one, ChatRequest) else run_completion
    return Answer.of(run(Session(FakeEngine(config())), one))  # type: ignore[arg-type]


def batched(on: Session, requests: list[Any]) -> list[Any]:
    """The answers of requests, or what they raised, decoded as a batch."""
    found = submitted(on, *requests)
    while on.scheduler.is_busy:
        on.scheduler.iterate()
    return [generation.error or Answer.of(generation.events) for generation in found]


def read(run: Any, answers: list[Any], i: int) -> None:
    try:
        for event in run:
            answers[i].feed(event)
    except Exception as error:  # noqa: BLE001 - what a test looks at
        answers[i] = error


def submitted(on: Session, *requests: CompletionRequest, **options: Any) -> list[RequestGeneration]:
    """Generations of requests, queued; each advances in every iteration."""
    found = [generation_of(on, on.prepare(one), **options) for one in requests]
    for generation in found:
        generation.runs_ahead = True
    on.scheduler.submit(*found)
    return found
