"""Tests of Ollama's API: the requests of its documentation and of its clients, answered in its shapes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette", reason="the server extra is not installed")

from starlette.testclient import TestClient

from dflash_ggml.server.app import create_app, make_service
from dflash_ggml.server.dialect import Settings
from dflash_ggml.server.runner import Runner
from dflash_ggml.session.events import Begin, Finish, ToolCallArgs, ToolCallBegin, ToolCallEnd
from dflash_ggml.session.session import Session
from reference.fake_engine import TOOL_TEMPLATE, FakeEngine, byte_vocabulary
from reference.server_kit import USAGE, ScriptedRunner, application, plain, thoughtful

ASK = [{"role": "user", "content": "Weather in Paris?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "w", "parameters": SCHEMA}}
REPLY = (
    "I should look.</think>\n\nLet me see.<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)


def serving(*replies: str, template: str = TOOL_TEMPLATE) -> TestClient:
    engine = FakeEngine(tokenizer=byte_vocabulary(template=template), replies=list(replies))
    runner = Runner(Session(engine))
    return TestClient(create_app(make_service(lambda progress: runner, Settings(names=("toy",)))))


def lines(http: TestClient, path: str, **body: Any) -> list[Any]:
    answer = http.post(path, json={"model": "toy", **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in answer.text.splitlines()]


def whole(http: TestClient, path: str, **body: Any) -> Any:
    answer = http.post(path, json={"model": "toy", "stream": False, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_chat_streams_by_default() -> None:
    options = {"temperature": 0, "num_predict": 200, "num_ctx": 4096, "num_gpu": 99}
    with serving(REPLY, REPLY) as http:
        body = whole(http, "/api/chat", messages=ASK, tools=[TOOL], options=options)
        *parts, last = lines(http, "/api/chat", messages=ASK, tools=[TOOL], options=options)
    message = body["message"]
    assert message["role"] == "assistant" and message["content"].strip() == "Let me see."
    assert message["thinking"].strip() == "I should look."
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": {"city": "Paris", "days": 3}}
    assert all(p["done"] is False and p["model"] == "toy" for p in parts)
    for key in ("content", "thinking"):
        assert "".join(p["message"].get(key, "") for p in parts) == message[key]
    streamed = [c for p in parts for c in p["message"].get("tool_calls", [])]
    assert [c["function"] for c in streamed] == [call["function"]]
    assert last["done"] is True and last["done_reason"] == body["done_reason"] == "stop"
    assert last["message"] == {"role": "assistant", "content": ""}
    counts = ("prompt_eval_count", "eval_count")
    assert [last[c] for c in counts] == [body[c] for c in counts] and body["eval_count"] > 0
    assert all(isinstance(last[d], int) for d in ("total_duration", "prompt_eval_duration", "eval_duration"))


def test_a_conversation_with_calls_goes_back_in() -> None:
    runner = ScriptedRunner()
    calls = [{"function": {"name": "weather", "arguments": {"city": "Paris"}}}]
    messages = [
        *ASK,
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": calls},
        {"role": "tool", "content": "sunny", "tool_name": "weather"},
        {"role": "user", "content": "And this?", "images": ["aGk="]},
    ]
    with TestClient(application(runner)) as http:
        answer = http.post("/api/chat", json={"model": "toy", "messages": messages, "stream": False})
    assert answer.status_code == 200 and answer.headers["x-dflash-notes"] == "left out: image"
    user, assistant, tool, last = runner.requests[0].messages
    assert user == ASK[0] and assistant["reasoning_content"] == "hm"
    assert assistant["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}
    assert tool == {"role": "tool", "content": "sunny", "tool_call_id": "weather"}
    assert "left out" in last["content"] and last["content"].endswith("And this?")


def test_options_formats_and_thinking_reach_the_request() -> None:
    runner = ScriptedRunner()
    options = {"temperature": 0.1, "top_k": 3, "seed": 7, "num_predict": 5, "stop": "END", "repeat_last_n": 9}
    with TestClient(application(runner)) as http:
        whole(http, "/api/chat", messages=ASK, options=options, think=True, format=SCHEMA)
        whole(
            http,
            "/api/chat",
            messages=ASK,
            think="low",
            format="json",
            options={"num_predict": -1, "num_ctx": 9},
        )
        whole(http, "/api/chat", messages=ASK, think=False, logprobs=True, top_logprobs=2)
        answer = http.post("/api/chat", json={"model": "toy", "messages": ASK, "options": {"brand_new": 3}})
    first, second, third, _ = runner.requests
    sampling = first.sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed, sampling.penalty_last_n) == (0.1, 3, 7, 9)
    assert first.max_tokens == 5 and first.stop == ("END",) and first.enable_thinking is True
    assert first.response_format["json_schema"]["schema"] == SCHEMA
    assert second.response_format == {"type": "json_object"} and second.enable_thinking is True
    assert second.max_tokens is None and third.enable_thinking is False and third.logprobs == 2
    assert answer.status_code == 200 and "brand_new" in answer.headers["x-dflash-notes"]


def test_generate_renders_the_template_unless_raw() -> None:
    runner = ScriptedRunner()
    with TestClient(application(runner)) as http:
        body = whole(http, "/api/generate", prompt="Hi", system="Be brief")
        assert body["response"] == "Hello there" and body["done_reason"] == "stop" and "message" not in body
        assert list(runner.requests[0].messages) == [
            {"role": "system", "content": "Be brief"},
            {"role": "user", "content": "Hi"},
        ]
        whole(http, "/api/generate", prompt="Once", raw=True, options={"num_predict": 3})
        assert runner.requests[1].prompt == "Once" and runner.requests[1].max_tokens == 3
        whole(http, "/api/generate", prompt="a", suffix="b")
        assert runner.requests[2].suffix == "b"
        runner.script = lambda request: thoughtful()
        parts = lines(http, "/api/generate", prompt="Hi")
        assert "".join(p.get("thinking", "") for p in parts) == "Let me think."
        assert "".join(p["response"] for p in parts) == "Answer: 42" and parts[-1]["done"]


def test_loading_and_unloading_answer_at_once() -> None:
    runner = ScriptedRunner()
    with TestClient(application(runner)) as http:
        chat = http.post("/api/chat", json={"model": "toy", "messages": []}).json()
        assert chat["done_reason"] == "load" and chat["message"]["content"] == ""
        assert http.post("/api/generate", json={"model": "toy"}).json()["done_reason"] == "load"
        gone = http.post("/api/generate", json={"model": "toy", "keep_alive": 0}).json()
        assert gone["done_reason"] == "unload"
    assert runner.requests == []


def test_errors_have_ollamas_shape() -> None:
    runner = ScriptedRunner()
    with TestClient(application(runner)) as http:
        for path in ("/api/chat", "/api/nothing"):
            answer = http.post(path, json={"model": "toy", "messages": [{"content": "x"}]})
            assert answer.status_code in (400, 404) and isinstance(answer.json()["error"], str)
        wrong = http.post("/api/chat", json={"model": "toy", "messages": [{"role": "user", "content": [3]}]})
        assert wrong.json()["error"].startswith("messages[0].content")
        runner.script = lambda request: [*plain()[:2], RuntimeError("secret detail")]
        last = lines(http, "/api/chat", messages=ASK)[-1]
        assert "internal error" in last["error"] and "secret" not in last["error"]


def test_a_length_limit_and_a_cut_call_are_reported() -> None:
    runner = ScriptedRunner(
        lambda request: [
            Begin(3, 0),
            ToolCallBegin(0, "a", "f"),
            ToolCallArgs(0, '{"x": '),
            ToolCallEnd(0),
            USAGE,
            Finish("length"),
        ]
    )
    with TestClient(application(runner)) as http:
        body = whole(http, "/api/chat", messages=ASK, tools=[TOOL])
    assert body["done_reason"] == "length" and "tool_calls" not in body["message"]


def test_bodies_without_a_type_from_programs_only() -> None:
    """The documentation's examples send forms; web pages, which send an Origin, may not."""
    with TestClient(application(ScriptedRunner())) as http:
        body = json.dumps({"model": "toy", "messages": ASK, "stream": False})
        form = {"content-type": "application/x-www-form-urlencoded"}
        assert http.post("/api/chat", content=body, headers=form).status_code == 200
        for page in ({"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}):
            assert http.post("/api/chat", content=body, headers={**form, **page}).status_code == 415
        assert http.post("/v1/chat/completions", content=body, headers=form).status_code == 415


def test_models_are_listed_and_shown() -> None:
    with serving() as http:
        (model,) = http.get("/api/tags").json()["models"]
        assert model["name"] == model["model"] == "toy" and model["details"]["family"] == "qwen35"
        assert len(model["digest"]) == 64 and model["modified_at"]
        (loaded,) = http.get("/api/ps").json()["models"]
        assert loaded["context_length"] == 1024 and loaded["digest"] == model["digest"]
        shown = http.post("/api/show", json={"model": "toy"}).json()
        assert shown["template"] == TOOL_TEMPLATE and shown["model_info"]["qwen35.block_count"] == 4
        assert shown["capabilities"] == ["completion", "tools", "thinking"]
        assert "tokenizer.ggml.tokens" not in shown["model_info"]
        assert http.post("/api/show", json={"name": "toy:latest"}).status_code == 200
        assert tuple(int(n) for n in http.get("/api/version").json()["version"].split(".")) > (0, 6, 4)


def test_embeddings() -> None:
    with serving() as http:
        body = whole(http, "/api/embed", input=["hello", "Once upon"], dimensions=16)
        assert np.shape(body["embeddings"]) == (2, 16) and body["prompt_eval_count"] == 9
        one = whole(http, "/api/embed", input="hello")["embeddings"]
        old = http.post("/api/embeddings", json={"model": "toy", "prompt": "hello"}).json()["embedding"]
        assert one == [old] and np.linalg.norm(old) == pytest.approx(1)
        assert whole(http, "/api/embed", input=[])["embeddings"] == []
        long = {"model": "toy", "input": "x" * 2000}
        assert http.post("/api/embed", json=long).status_code == 200
        assert http.post("/api/embed", json={**long, "truncate": False}).status_code == 400
