"""Tests that a prompt is rendered once and tokenised once, however often its text, its tokens or their number are needed."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("starlette", reason="the server extra is not installed")

from starlette.testclient import TestClient

from dflash_ggml.server.app import create_app, make_service
from dflash_ggml.server.dialect import Settings
from dflash_ggml.server.runner import Runner
from dflash_ggml.session import Session
from reference.fake_engine import TOOL_TEMPLATE, FakeEngine, byte_vocabulary
from reference.prompt_calls import recorded

ASK = [{"role": "user", "content": "Weather in Paris?"}]
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
REQUESTS: list[tuple[str, dict[str, Any], int]] = [
    ("/v1/chat/completions", {"messages": ASK, "max_tokens": 5}, 1),
    ("/v1/completions", {"prompt": "Once upon", "max_tokens": 5}, 0),
    ("/v1/responses", {"input": "Weather?", "tools": [TOOL], "max_output_tokens": 5}, 1),
    ("/v1/messages", {"model": "toy", "messages": ASK, "max_tokens": 5}, 1),
    ("/v1/messages/count_tokens", {"model": "toy", "messages": ASK}, 1),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "renders"),
    REQUESTS,
    ids=[path.rpartition("/")[2] + str(n) for n, (path, _, _) in enumerate(REQUESTS)],
)
def test_one_rendering_and_one_tokenisation_per_request(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], renders: int, stream: bool
) -> None:
    runner = Runner(Session(FakeEngine(tokenizer=byte_vocabulary(template=TOOL_TEMPLATE))))
    with TestClient(create_app(make_service(lambda progress: runner, Settings(names=("toy",))))) as client:
        calls = recorded(monkeypatch)
        for _ in range(2):
            calls.clear()
            assert client.post(path, json={**body, "stream": stream}).status_code == 200
            assert calls == ["render"] * renders + ["encode"]
