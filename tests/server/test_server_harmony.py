"""Tests of gpt-oss on every API: effort in, reasoning, text and calls out, whole and as a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the server extra is not installed")

from starlette.testclient import TestClient

from dflash_ggml.config import EngineConfig
from dflash_ggml.server.app import create_app, make_service
from dflash_ggml.server.dialect import Settings
from dflash_ggml.server.runner import Runner
from dflash_ggml.session.session import Session
from reference.fake_engine import FakeEngine, byte_vocabulary
from reference.vendored import vendored

HI = [{"role": "user", "content": "Hi"}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": PARAMETERS}}
THOUGHT = "<|channel|>analysis<|message|>Hm <b>.<|end|><|start|>assistant"
REPLY = THOUGHT + "<|channel|>final<|message|>Yes.<|return|>"
CALLED = THOUGHT + '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "wanted"}<|call|>'
# path -> what the body has for an effort, and for a tool
SURFACES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "/v1/chat/completions": ({"messages": HI, "reasoning_effort": "high"}, {"tools": [TOOL]}),
    "/v1/responses": (
        {"input": "Hi", "reasoning": {"effort": "high"}},
        {"tools": [{"type": "function", "name": "f", "parameters": PARAMETERS}]},
    ),
    "/v1/messages": (
        {
            "messages": HI,
            "max_tokens": 300,
            "thinking": {"type": "adaptive"},
            "output_config": {"effort": "high"},
        },
        {"tools": [{"name": "f", "input_schema": PARAMETERS}]},
    ),
    "/api/chat": ({"messages": HI, "think": "high"}, {"tools": [TOOL]}),
}


class Prompts(Runner):
    """A runner that remembers the prompts."""

    def prepare(self, request: Any) -> Any:
        self.prepared = super().prepare(request)
        return self.prepared


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[TestClient, Prompts, FakeEngine]]:
    template = vendored("templates/openai-gpt-oss-120b.jinja").read_text(encoding="utf-8")
    engine = FakeEngine(
        config=EngineConfig(model=Path("toy.gguf"), n_ctx=4096, n_batch=4096),
        tokenizer=byte_vocabulary(template=template, harmony=True),
    )
    runner = Prompts(Session(engine))  # type: ignore[arg-type]
    with TestClient(create_app(make_service(lambda progress: runner, Settings(names=("toy",))))) as http:
        yield http, runner, engine


def everything(text: str) -> str:
    """All strings in a body or a stream of bodies, pieces of a text joined."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith(("data: {", "{"))]
    found: dict[str, str] = {}

    def walk(value: Any, key: str) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                walk(inner, name)
        elif isinstance(value, list):
            for inner in value:
                walk(inner, key)
        elif isinstance(value, str):
            found[key] = found.get(key, "") + value

    for line in lines:
        walk(json.loads(line), "")
    return "\n".join(found.values())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", SURFACES)
def test_text_and_calls(server: tuple[TestClient, Prompts, FakeEngine], path: str, stream: bool) -> None:
    http, runner, engine = server
    body, tools = SURFACES[path]
    for reply, more, words in ((REPLY, {}, "Yes."), (CALLED, tools, "wanted")):
        engine.replies = [reply]
        response = http.post(path, json={"model": "toy", "stream": stream, **body, **more})
        assert response.status_code == 200, response.text
        assert "Reasoning: high\n" in runner.prepared.text
        assert ("type f = " in runner.prepared.text) == bool(more)
        shown = everything(response.text)
        assert "Hm <b>." in shown and words in shown
        assert not [tag for tag in ("<|", "analysis", "commentary", "functions.") if tag in shown], shown
