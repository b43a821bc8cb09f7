"""Tests of thinking budgets and continued thoughts, through every API on a toy engine that decodes."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the server extra is not installed")

from starlette.testclient import TestClient

from dflash_ggml.server.app import create_app, make_service
from dflash_ggml.server.dialect import Settings
from dflash_ggml.server.runner import Runner
from dflash_ggml.session.session import Session
from reference.fake_engine import TOOL_TEMPLATE, FakeEngine, byte_vocabulary

ASK = [{"role": "user", "content": "Hi"}]
THOUGHT = "abcdfgabcdfgabcdfg"
N_END = len(byte_vocabulary().encode("\n</think>"))

Answer = tuple[str, str, int | None]  # thought, text, tokens of the thought if they are reported


def serving(*replies: str, **options: Any) -> TestClient:
    engine = FakeEngine(tokenizer=byte_vocabulary(template=TOOL_TEMPLATE), replies=list(replies))
    runner = Runner(Session(engine, **options))  # type: ignore[arg-type]
    return TestClient(create_app(make_service(lambda progress: runner, Settings(names=("toy",)))))


def events(text: str) -> list[Any]:
    lines = (line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: "))
    return [json.loads(line) for line in lines if line != "[DONE]"]


def of_chat(body: Any) -> Answer:
    message, usage = body["choices"][0]["message"], body["usage"]
    n = usage["completion_tokens_details"]["reasoning_tokens"]
    return message.get("reasoning_content", ""), message["content"], n


def of_chat_stream(text: str) -> Answer:
    deltas = [chunk["choices"][0]["delta"] for chunk in events(text) if chunk["choices"]]
    thought, answer = ("".join(d.get(k) or "" for d in deltas) for k in ("reasoning_content", "content"))
    return thought, answer, None


def of_responses(body: Any) -> Answer:
    parts = {item["type"]: "".join(p["text"] for p in item["content"]) for item in body["output"]}
    n = body["usage"]["output_tokens_details"]["reasoning_tokens"]
    return parts.get("reasoning", ""), parts.get("message", ""), n


def of_messages(body: Any) -> Answer:
    parts = {block["type"]: block.get("thinking") or block.get("text", "") for block in body["content"]}
    return parts.get("thinking", ""), parts.get("text", ""), None


def of_messages_stream(text: str) -> Answer:
    deltas = [e["delta"] for e in events(text) if e["type"] == "content_block_delta"]
    thought, answer = ("".join(d.get(k) or "" for d in deltas) for k in ("thinking", "text"))
    return thought, answer, None


def of_ollama(body: Any) -> Answer:
    return body["message"].get("thinking", ""), body["message"]["content"], None


CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
ENABLED = {"type": "enabled", "budget_tokens": 4}
APIS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "chat": (CHAT, {"messages": ASK, "max_tokens": 30, "reasoning_budget": 4}, of_chat),
    "chat stream": (
        CHAT,
        {"messages": ASK, "max_tokens": 30, "thinking_budget_tokens": 4, "stream": True},
        of_chat_stream,
    ),
    "chat, Anthropic's name": (CHAT, {"messages": ASK, "max_tokens": 30, "thinking": ENABLED}, of_chat),
    "chat, effort": (CHAT, {"messages": ASK, "max_tokens": 64, "reasoning_effort": "low"}, of_chat),
    "responses": (
        "/v1/responses",
        {"input": "Hi", "max_output_tokens": 64, "reasoning": {"effort": "low"}},
        of_responses,
    ),
    "messages": (MESSAGES, {"messages": ASK, "max_tokens": 30, "thinking": ENABLED}, of_messages),
    "messages stream": (
        MESSAGES,
        {"messages": ASK, "max_tokens": 30, "thinking": ENABLED, "stream": True},
        of_messages_stream,
    ),
    "messages, effort": (
        MESSAGES,
        {
            "messages": ASK,
            "max_tokens": 64,
            "thinking": {"type": "adaptive"},
            "output_config": {"effort": "low"},
        },
        of_messages,
    ),
    "ollama": (
        "/api/chat",
        {"messages": ASK, "stream": False, "think": "low", "options": {"num_predict": 64, "temperature": 0}},
        of_ollama,
    ),
}


def answered(http: TestClient, api: str) -> Answer:
    path, body, read = APIS[api]
    greedy = {} if "options" in body else {"temperature": 0}
    answer = http.post(path, json={"model": "toy", **greedy, **body})
    assert answer.status_code == 200, answer.text
    assert "x-dflash-notes" not in answer.headers
    return read(answer.text if body.get("stream") else answer.json())


@pytest.mark.parametrize("api", APIS)
def test_a_budget_of_four_tokens(api: str) -> None:
    with serving(THOUGHT, "abc</think>fine") as http:
        thought, answer, n = answered(http, api)
        assert thought == "abcd" and answer
        assert n in (None, 4 + N_END)
        assert answered(http, api)[:2] == ("abc", "fine"), "a thought that ends in time"


def test_the_servers_budget_is_the_default_of_requests() -> None:
    with serving(THOUGHT, THOUGHT, reasoning_budget=2) as http:
        thoughts = []
        for fields in ({}, {"reasoning_budget": 5}):
            body = {"messages": ASK, "max_tokens": 40, "temperature": 0, **fields}
            thoughts.append(of_chat(http.post(CHAT, json=body).json())[0])
        assert thoughts == ["ab", "abcdf"]


@pytest.mark.parametrize("value", [-2, "many", 1.5, True])
def test_what_is_no_budget_is_named(value: Any) -> None:
    with serving() as http:
        for fields, path in (
            ({"reasoning_budget": value}, "reasoning_budget"),
            ({"thinking": {"type": "enabled", "budget_tokens": value}}, "thinking.budget_tokens"),
        ):
            answer = http.post(CHAT, json={"messages": ASK, **fields})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == path


@pytest.mark.parametrize(
    ("path", "last", "more"),
    [
        (CHAT, {"content": "", "reasoning_content": "I was"}, {"continue_final_message": True}),
        (CHAT, {"content": None, "reasoning": "I was"}, {"continue_final_message": True}),
        (CHAT, {"content": "<think>\nI was"}, {"continue_final_message": True}),
        (MESSAGES, {"content": [{"type": "thinking", "thinking": "I was", "signature": ""}]}, {}),
        (
            MESSAGES,
            {"content": [{"type": "thinking", "thinking": "I was", "signature": ""}]},
            {"thinking": ENABLED},
        ),
    ],
)
def test_the_thought_of_the_last_message_goes_on(path: str, last: Any, more: Any) -> None:
    with serving(" ok</think>yes") as http:
        messages = [*ASK, {"role": "assistant", **last}]
        body = {"model": "toy", "max_tokens": 40, "temperature": 0, "messages": messages, **more}
        answer = http.post(path, json=body).json()
        assert (of_chat if path == CHAT else of_messages)(answer)[:2] == (" ok", "yes")
