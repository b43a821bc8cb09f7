"""Tests of `dflash.prompt_keep` over HTTP: applied, counted, and reported in the header before the answer begins."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("starlette", reason="the server extra is not installed")

from pathlib import Path

from starlette.testclient import TestClient

from dflash_ggml.config import EngineConfig
from dflash_ggml.server.app import create_app, make_service
from dflash_ggml.server.dialect import Settings
from dflash_ggml.server.runner import Runner
from dflash_ggml.session.session import Session
from reference.fake_engine import FakeEngine, FakeScorer, byte_vocabulary

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
DOCUMENT = "".join(f"Line {i}: the lamp of room {i * 7 % 311} is lit.\n" for i in range(200))
BODY: dict[str, Any] = {
    "model": "toy",
    "max_tokens": 4,
    "messages": [
        {"role": "user", "content": DOCUMENT},
        {"role": "assistant", "content": "Read."},
        {"role": "user", "content": "Is the lamp of room 301 lit?"},
    ],
}


def post(
    body: dict[str, Any], path: str = "/v1/chat/completions", least: float | None = 0.1, scored: bool = False
) -> Any:
    engine: Any = FakeEngine(
        tokenizer=byte_vocabulary(template=TEMPLATE), config=EngineConfig(Path("toy.gguf"), n_ctx=16_384)
    )
    engine.scorer = FakeScorer(engine) if scored else None
    runner = Runner(Session(engine, prompt_keep=least))
    with TestClient(create_app(make_service(lambda progress: runner, Settings(names=("toy",))))) as client:
        return client.post(path, json=body)


def test_a_share_is_applied_counted_and_reported() -> None:
    whole = post(BODY).json()
    part = post(BODY | {"dflash": {"prompt_keep": 0.4}})
    n = whole["usage"]["prompt_tokens"]
    assert part.json()["usage"]["prompt_tokens"] == n
    timings = part.json()["timings"]
    assert timings["prompt_kept_n"] == timings["prompt_n"] <= 0.4 * n + 1 and timings["score_ms"] > 0
    assert "prompt_kept_n" not in whole["timings"]
    note = (
        f"prompt compressed: {timings['prompt_kept_n']:,} of {n:,} tokens are prefilled (lossy, on request)"
    )
    assert part.headers["x-dflash-notes"] == note
    streamed = post(BODY | {"dflash": {"prompt_keep": 0.4}, "stream": True})
    assert streamed.headers["x-dflash-notes"] == note


def test_where_a_model_chooses_the_number_is_about() -> None:
    """Scoring comes after the header; the stream then has the exact number."""
    body = BODY | {"dflash": {"prompt_keep": 0.4}}
    part = post(body, scored=True)
    timings, n = part.json()["timings"], part.json()["usage"]["prompt_tokens"]
    assert 0 < timings["score_ms"] < timings["prompt_ms"]
    about = int(0.4 * n) + 1
    assert timings["prompt_kept_n"] <= about
    assert f"prompt compressed: about {about:,} of {n:,} tokens" in part.headers["x-dflash-notes"]
    by_words = post(BODY | {"dflash": {"prompt_keep": 0.4, "prompt_scorer": "lexical"}}, scored=True)
    assert "about" not in by_words.headers["x-dflash-notes"]


def test_what_is_not_permitted_is_reported() -> None:
    answer = post(BODY | {"dflash": {"prompt_keep": 0.4}}, least=None)
    assert answer.status_code == 200 and "prompt_kept_n" not in answer.json()["timings"]
    assert "--prompt-keep" in answer.headers["x-dflash-notes"]


@pytest.mark.parametrize("share", [0, 1.5, "half"])
def test_a_share_that_is_none_is_refused(share: Any) -> None:
    answer = post(BODY | {"dflash": {"prompt_keep": share}})
    assert answer.status_code == 400 and "dflash.prompt_keep" in answer.text


def test_completions_and_responses_take_it_too() -> None:
    text = {"model": "toy", "prompt": DOCUMENT, "max_tokens": 4, "dflash": {"prompt_keep": 0.5}}
    assert "prompt compressed" in post(text, "/v1/completions").headers["x-dflash-notes"]
    body = {"model": "toy", "input": BODY["messages"], "dflash": {"prompt_keep": 0.4}}
    assert "prompt compressed" in post(body, "/v1/responses").headers["x-dflash-notes"]
