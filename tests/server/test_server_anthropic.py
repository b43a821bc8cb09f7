"""Tests of the official anthropic client against the application, in process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the server extra is not installed")
anthropic = pytest.importorskip("anthropic")

from starlette.testclient import TestClient  # noqa: E402

from dflash_ggml.errors import ContextOverflowError  # noqa: E402
from dflash_ggml.session.requests import NamedTool  # noqa: E402
from reference.server_kit import (  # noqa: E402
    ScriptedRunner,
    application,
    calling,
    plain,
    thoughtful,
)

ASK = [{"role": "user", "content": "Hi"}]
TOOL = {"name": "weather", "description": "Weather", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture
def runner() -> ScriptedRunner:
    return ScriptedRunner()


@pytest.fixture
def http(runner: ScriptedRunner) -> Iterator[TestClient]:
    with TestClient(application(runner, keys=["sesame"])) as http:
        yield http


@pytest.fixture
def client(http: TestClient) -> Any:
    return anthropic.Anthropic(
        base_url="http://testserver", api_key="sesame", http_client=http, max_retries=0
    )


def test_plain(client: Any, runner: ScriptedRunner) -> None:
    message = client.messages.create(
        model="toy",
        messages=ASK,
        max_tokens=20,
        system="Be brief",
        stop_sequences=["END"],
        extra_body={"temperature": 0, "top_k": 3},
    )
    assert (message.type, message.role, message.model) == ("message", "assistant", "toy")
    assert [b.text for b in message.content] == ["Hello there"]
    assert message.stop_reason == "end_turn" and message.stop_sequence is None
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (7, 5, 9)
    request = runner.requests[0]
    assert list(request.messages) == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "Hi"},
    ]
    assert request.stop == ("END",) and request.sampling.top_k == 3 and request.sampling.temperature == 0
    assert request.enable_thinking is False


@pytest.mark.parametrize("script", [plain, thoughtful, calling])
def test_stream_equals_body(client: Any, runner: ScriptedRunner, script: Any) -> None:
    runner.script = lambda request: script()
    options = {"model": "toy", "messages": ASK, "max_tokens": 50, "tools": [TOOL]}
    whole = client.messages.create(**options)
    with client.messages.stream(**options) as stream:
        streamed = stream.get_final_message()
    left, right = whole.model_dump(), streamed.model_dump()
    for message in (left, right):
        message.pop("id")
        message.pop("timings", None)
        message["usage"].pop("timings", None)
        for block in message["content"]:
            block.pop("parsed_output", None)
    assert left == right


def test_event_order(client: Any, runner: ScriptedRunner) -> None:
    runner.script = lambda request: thoughtful()[1:]
    with client.messages.with_streaming_response.create(
        model="toy", messages=ASK, max_tokens=50, stream=True
    ) as response:
        lines = [line for line in response.iter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    assert names == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert [d["type"] for d in data] == names
    assert [d["index"] for d in data if "index" in d] == [0] * 5 + [1] * 4
    kinds = [d["delta"]["type"] for d in data if d["type"] == "content_block_delta"]
    assert kinds == ["thinking_delta", "thinking_delta", "signature_delta", "text_delta", "text_delta"]


def test_tools_and_results(client: Any, runner: ScriptedRunner) -> None:
    runner.script = lambda request: calling()
    choice = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    answer = client.messages.create(
        model="toy",
        messages=ASK,
        max_tokens=50,
        tools=[TOOL],
        tool_choice=choice,
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    assert answer.stop_reason == "tool_use"
    assert [b.type for b in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert answer.content[2].input == {"city": "Paris"} and answer.content[2].id == "call_a"
    request = runner.requests[0]
    assert request.tool_choice == NamedTool("weather") and not request.parallel_tool_calls
    assert request.enable_thinking is True
    results = [
        {"type": "tool_result", "tool_use_id": "call_a", "content": [{"type": "text", "text": "sunny"}]},
        {"type": "tool_result", "tool_use_id": "call_b", "content": "no such city", "is_error": True},
        {"type": "text", "text": "Go on", "cache_control": {"type": "ephemeral"}},
    ]
    history = [*ASK, {"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    client.messages.create(model="toy", messages=history, max_tokens=50, tools=[TOOL])
    messages = runner.requests[1].messages
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "tool", "user"]
    assert (
        messages[1]["reasoning_content"] == "I need the weather." and messages[1]["content"] == "One moment."
    )
    assert messages[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city":"Paris"}'}
    assert messages[3] == {"role": "tool", "tool_call_id": "call_b", "content": "Error: no such city"}


def test_stop_reasons(client: Any, runner: ScriptedRunner) -> None:
    def ask(n: int) -> Any:
        return client.messages.create(model="toy", messages=ASK, max_tokens=n)

    runner.script = lambda request: plain(reason="stop", stop="END")
    assert (ask(9).stop_reason, ask(9).stop_sequence) == ("stop_sequence", "END")
    runner.script = lambda request: plain(reason="length")
    assert ask(9).stop_reason == "max_tokens"
    assert ask(5000).stop_reason == "model_context_window_exceeded"


def test_a_call_that_was_cut_keeps_what_there_is_of_it(client: Any, runner: ScriptedRunner) -> None:
    script = calling()
    cut = [*script[:3], script[3], type(script[4])(0, '{"city": "Par'), *plain("", reason="length")[1:]]
    runner.script = lambda request: cut
    answer = client.messages.create(model="toy", messages=ASK, max_tokens=9, tools=[TOOL])
    assert answer.stop_reason == "max_tokens" and answer.content[-1].input == {"city": "Par"}


def test_prefill_and_structured_output(client: Any, runner: ScriptedRunner) -> None:
    client.messages.create(model="toy", messages=[*ASK, {"role": "assistant", "content": "1."}], max_tokens=5)
    assert runner.requests[0].continue_final_message
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    client.messages.create(
        model="toy",
        messages=ASK,
        max_tokens=5,
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    assert runner.requests[1].response_format["json_schema"]["schema"] == schema


def test_omitted_thinking(client: Any, runner: ScriptedRunner) -> None:
    runner.script = lambda request: thoughtful()
    options = {"model": "toy", "messages": ASK, "max_tokens": 50}
    thinking = {"type": "adaptive", "display": "omitted"}
    whole = client.messages.create(**options, thinking=thinking)
    with client.messages.stream(**options, thinking=thinking) as stream:
        streamed = stream.get_final_message()
    assert [(b.type, getattr(b, "thinking", None)) for b in whole.content] == [
        ("thinking", ""),
        ("text", None),
    ]
    assert [b.type for b in streamed.content] == ["thinking", "text"] and streamed.content[0].thinking == ""


def test_count_tokens(client: Any, runner: ScriptedRunner) -> None:
    count = client.messages.count_tokens(model="toy", messages=ASK, system="Be brief")
    assert count.input_tokens == len("HiBe brief")


def test_beta_header_and_query(client: Any) -> None:
    message = client.beta.messages.create(
        model="toy", messages=ASK, max_tokens=5, betas=["anything-2030-01-01"]
    )
    assert message.content[0].text == "Hello there"


def test_models(client: Any) -> None:
    models = client.models.list()
    assert [(m.id, m.type, m.display_name) for m in models] == [
        ("toy", "model", "toy"),
        ("toy-alias", "model", "toy-alias"),
    ]
    assert models.data[0].created_at.year >= 2024
    assert client.models.retrieve("toy").id == "toy"


def test_any_tool_is_a_call_of_one_of_them(client: Any, runner: ScriptedRunner) -> None:
    ask = {"model": "toy", "messages": ASK, "max_tokens": 5, "tool_choice": {"type": "any"}}
    client.messages.create(**ask, tools=[TOOL])
    assert runner.requests[0].tool_choice == "required"
    with pytest.raises(anthropic.BadRequestError, match="tool_choice: 'any' without tools"):
        client.messages.create(**ask)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"tools": [{"name": "f"}]}, r"tools\[0\].input_schema"),
        ({"tool_choice": {"type": "tool", "name": "other"}, "tools": [TOOL]}, "tool_choice.name"),
        ({"stop_sequences": ["x" * 300]}, r"stop_sequences\[0\]"),
        ({"top_p": 2}, "top_p"),
    ],
)
def test_bad_requests(client: Any, change: dict[str, Any], words: str) -> None:
    refused(client, change, words)


def refused(client: Any, change: dict[str, Any], words: str) -> None:
    """The request with this change is a 400 with this message."""
    body = {"model": "toy", "messages": ASK, "max_tokens": 5, **change}
    body = {k: v for k, v in body.items() if v is not None}
    with pytest.raises(anthropic.BadRequestError, match=words) as caught:
        client.post("/v1/messages", body=body, cast_to=object)
    error = caught.value.body
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    field, _, rest = error["error"]["message"].partition(": ")
    assert field and not rest.startswith(f"{field}: ")  # named once
    assert error["request_id"] == caught.value.response.headers["request-id"]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}


@pytest.mark.parametrize(
    ("change", "words", "note"),
    [
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages", "'robot'"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, r"messages\[0\].content", "left out: image"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            r"tools\[0\]",
            "web_search_20250305",
        ),
        ({"container": "c"}, "container", "ignored: container"),
        (
            {"mcp_servers": [{"type": "url", "name": "m", "url": "http://127.0.0.1"}]},
            "mcp_servers",
            "mcp_servers",
        ),
    ],
)
def test_what_is_not_met_is_noted_and_refused_only_by_a_strict_server(
    http: TestClient, change: dict[str, Any], words: str, note: str
) -> None:
    body = {"model": "toy", "messages": ASK, "max_tokens": 5, **change}
    response = http.post("/v1/messages", json=body, headers={"x-api-key": "sesame"})
    assert response.status_code == 200 and note in response.headers["x-dflash-notes"]
    with TestClient(application(ScriptedRunner(), strict=True)) as other:
        strict = anthropic.Anthropic(
            base_url="http://testserver", api_key="-", http_client=other, max_retries=0
        )
        refused(strict, change, words)


def test_other_failures(client: Any, runner: ScriptedRunner) -> None:
    assert client.messages.create(model="other", messages=ASK, max_tokens=5).model == "toy"
    with TestClient(application(ScriptedRunner(), strict_model=True)) as http:
        strict = client.with_options(http_client=http)
        with pytest.raises(anthropic.NotFoundError) as caught:
            strict.messages.create(model="other", messages=ASK, max_tokens=5)
    assert caught.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.AuthenticationError) as caught:
        client.with_options(api_key="wrong").messages.create(model="toy", messages=ASK, max_tokens=5)
    assert caught.value.body["error"]["type"] == "authentication_error"
    runner.script = lambda request: ContextOverflowError(
        "Requested tokens (300) exceed context window of 256"
    )
    with pytest.raises(anthropic.BadRequestError, match="exceed context window"):
        client.messages.create(model="toy", messages=ASK, max_tokens=5)
    long = [{"role": "user", "content": "x" * 300}]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 300 tokens > 256 maximum"):
        client.messages.create(model="toy", messages=long, max_tokens=5)
    runner.script = lambda request: [*plain()[:2], RuntimeError("secret")]
    stream = client.messages.stream(model="toy", messages=ASK, max_tokens=5)
    with pytest.raises(anthropic.APIStatusError, match="internal error"), stream as answer:
        answer.get_final_message()
