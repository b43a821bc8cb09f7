"""Tests of the official openai client against the application, in process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the server extra is not installed")
openai = pytest.importorskip("openai")

from starlette.testclient import TestClient  # noqa: E402

from dflash_ggml.errors import ConfigError, ContextOverflowError  # noqa: E402
from dflash_ggml.session.events import Begin, Finish, TextDelta  # noqa: E402
from dflash_ggml.session.requests import NamedTool  # noqa: E402
from reference.server_kit import (  # noqa: E402
    LOGPROB,
    USAGE,
    ScriptedRunner,
    application,
    calling,
    plain,
    thoughtful,
)

ASK = [{"role": "user", "content": "Hi"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture
def runner() -> ScriptedRunner:
    return ScriptedRunner()


@pytest.fixture
def http(runner: ScriptedRunner) -> Iterator[TestClient]:
    with TestClient(application(runner)) as http:
        yield http


@pytest.fixture
def client(http: TestClient) -> Any:
    return openai.OpenAI(base_url="http://testserver/v1", api_key="-", http_client=http, max_retries=0)


@pytest.fixture
def strict(runner: ScriptedRunner) -> Iterator[Any]:
    with TestClient(application(runner, strict=True, strict_model=True)) as http:
        yield openai.OpenAI(
            base_url="http://testserver/v1", api_key="unused", http_client=http, max_retries=0
        )


def test_chat_plain(client: Any, runner: ScriptedRunner) -> None:
    answer = client.chat.completions.create(
        model="toy", messages=ASK, temperature=0, max_tokens=20, stop="END"
    )
    assert answer.object == "chat.completion" and answer.model == "toy"
    assert answer.choices[0].message.content == "Hello there"
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        12,
        9,
        21,
    )
    assert answer.usage.prompt_tokens_details.cached_tokens == 5
    assert answer.usage.completion_tokens_details.reasoning_tokens == 3
    timings = answer.model_extra["timings"]
    assert timings["draft_n"] == 60 and timings["draft_n_accepted"] == 5 and timings["prompt_n"] == 7
    assert timings["sources"] == [
        {"name": "dflash", "steps": 4, "draft_n": 52, "draft_n_accepted": 3},
        {"name": "suffix", "steps": 2, "draft_n": 14, "draft_n_accepted": 4},
    ]
    assert timings["predicted_per_second"] == 225.0 and timings["mode"] == "tree" and timings["budget"] == 15
    request = runner.requests[0]
    assert request.sampling.temperature == 0 and request.max_tokens == 20 and request.stop == ("END",)


@pytest.mark.parametrize("script", [plain, thoughtful, calling])
def test_chat_stream_equals_body(client: Any, runner: ScriptedRunner, script: Any) -> None:
    runner.script = lambda request: script()
    whole = client.chat.completions.create(model="toy", messages=ASK, tools=[TOOL])
    stream = client.chat.completions.create(
        model="toy", messages=ASK, tools=[TOOL], stream=True, stream_options={"include_usage": True}
    )
    text, reasoning, calls, reasons, usage = "", "", {}, [], None
    for n, chunk in enumerate(stream):
        assert chunk.object == "chat.completion.chunk"
        if chunk.usage is not None:
            assert chunk.choices == []
            usage = chunk.usage
            continue
        assert usage is None
        delta = chunk.choices[0].delta
        assert (delta.role == "assistant") == (n == 0)
        text += delta.content or ""
        reasoning += (delta.model_extra or {}).get("reasoning_content", "")
        for call in delta.tool_calls or ():
            if call.id is not None:
                assert call.index not in calls
                calls[call.index] = {"id": call.id, "name": call.function.name, "arguments": ""}
            calls[call.index]["arguments"] += call.function.arguments
        if chunk.choices[0].finish_reason:
            reasons.append(chunk.choices[0].finish_reason)
    message = whole.choices[0].message
    assert text == (message.content or "")
    assert reasoning == (message.model_extra or {}).get("reasoning_content", "")
    expected = [
        {"id": c.id, "name": c.function.name, "arguments": c.function.arguments}
        for c in message.tool_calls or ()
    ]
    assert [calls[i] for i in sorted(calls)] == expected
    assert reasons == [whole.choices[0].finish_reason] and usage == whole.usage


def test_chat_tools_round_trip(client: Any, runner: ScriptedRunner) -> None:
    runner.script = lambda request: calling()
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = client.chat.completions.create(
        model="toy", messages=ASK, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    assert runner.requests[0].tool_choice == NamedTool("weather")
    assert runner.requests[0].parallel_tool_calls is False
    sent_back = answer.choices[0].message.model_dump(exclude_none=True)
    results = [{"role": "tool", "tool_call_id": c["id"], "content": "sunny"} for c in sent_back["tool_calls"]]
    client.chat.completions.create(model="toy", messages=[*ASK, sent_back, *results], tools=[TOOL])
    messages = runner.requests[1].messages
    assert json.loads(messages[1]["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}
    assert messages[1]["reasoning_content"] == "I need the weather."
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "tool"]


def test_functions_are_tools_by_their_first_name(client: Any, runner: ScriptedRunner) -> None:
    """One call at a time, whose result comes in a message of role "function"."""
    runner.script = lambda request: [*calling()[:7], USAGE, Finish("tool_calls")]
    ask = {
        "model": "toy",
        "messages": ASK,
        "functions": [TOOL["function"]],
        "function_call": {"name": "weather"},
    }
    choice = client.chat.completions.create(**ask).choices[0]
    assert choice.finish_reason == "function_call" and choice.message.tool_calls is None
    assert choice.message.function_call.name == "weather"
    assert json.loads(choice.message.function_call.arguments) == {"city": "Paris"}
    assert runner.requests[0].tool_choice == NamedTool("weather")
    assert runner.requests[0].parallel_tool_calls is False
    deltas = [chunk.choices[0] for chunk in client.chat.completions.create(**ask, stream=True)]
    calls = [d.delta.function_call for d in deltas if d.delta.function_call]
    assert calls[0].name == "weather" and "".join(c.arguments for c in calls) == '{"city": "Paris"}'
    assert deltas[-1].finish_reason == "function_call"
    echo = choice.message.model_dump(exclude_none=True)
    result = {"role": "function", "name": "weather", "content": "sunny"}
    client.chat.completions.create(model="toy", messages=[*ASK, echo, result], functions=[TOOL["function"]])
    messages = runner.requests[-1].messages
    assert messages[1]["tool_calls"][0]["function"]["name"] == "weather"
    assert messages[2]["role"] == "function" and messages[2]["content"] == "sunny"


def test_chat_stream_helper_accumulates(client: Any, runner: ScriptedRunner) -> None:
    runner.script = lambda request: calling()
    with client.chat.completions.stream(model="toy", messages=ASK) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls[1].function.arguments == '{"city": "Rome"}'


def test_chat_logprobs(client: Any, runner: ScriptedRunner) -> None:
    runner.script = lambda request: [Begin(12, 5), TextDelta("Hi", (LOGPROB,)), *plain("")[1:]]
    answer = client.chat.completions.create(model="toy", messages=ASK, logprobs=True, top_logprobs=2)
    entry = answer.choices[0].logprobs.content[0]
    assert (entry.token, entry.bytes, entry.logprob) == ("Hi", [72, 105], -0.25)
    assert [t.token for t in entry.top_logprobs] == ["Hi", "Ho"]
    assert runner.requests[0].logprobs == 2
    stream = client.chat.completions.create(model="toy", messages=ASK, logprobs=True, stream=True)
    content = [t for c in stream if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert [t.token for t in content] == ["Hi"]


def test_an_answer_without_text_reports_that_it_has_no_logprobs(client: Any, runner: ScriptedRunner) -> None:
    """Asked for, they are an empty object; not asked for, null."""
    runner.script = lambda request: [Begin(12, 5), *plain("")[1:]]
    chat = client.chat.completions.create(model="toy", messages=ASK, logprobs=True).choices[0]
    assert chat.message.content == "" and chat.logprobs.to_dict() == {"content": [], "refusal": None}
    text = client.completions.create(model="toy", prompt="Once", logprobs=0).choices[0]
    lists = ("tokens", "text_offset", "token_logprobs", "top_logprobs")
    assert text.text == "" and text.logprobs.to_dict() == {name: [] for name in lists}
    assert client.chat.completions.create(model="toy", messages=ASK).choices[0].logprobs is None
    assert client.completions.create(model="toy", prompt="Once").choices[0].logprobs is None


@pytest.mark.parametrize(
    ("stop", "kept"), [("", ()), (["a", ""], ("a",)), ([f"<{i}>" for i in range(64)], None)]
)
def test_empty_stop_strings_stop_nothing(client: Any, runner: ScriptedRunner, stop: Any, kept: Any) -> None:
    client.chat.completions.create(model="toy", messages=ASK, stop=stop)
    assert runner.requests[-1].stop == (tuple(stop) if kept is None else kept)


def test_sampling_fields_reach_the_request(client: Any, runner: ScriptedRunner) -> None:
    client.chat.completions.create(
        model="toy",
        messages=ASK,
        temperature=0.5,
        top_p=0.7,
        seed=11,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"5": -100, "6": 3},
        extra_body={"top_k": 7, "min_p": 0.1, "repeat_penalty": 1.2, "dflash": {"mode": "tree", "budget": 9}},
    )
    request = runner.requests[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.top_k) == (0.5, 0.7, 11, 7)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert (sampling.min_p, sampling.repeat_penalty) == (0.1, 1.2)
    assert sampling.logit_bias == {5: float("-inf"), 6: 3.0}
    assert (request.mode, request.budget) == ("tree", 9)


def test_thinking_switch_and_notes(client: Any, runner: ScriptedRunner) -> None:
    create = client.chat.completions.with_raw_response.create
    raw = create(model="toy", messages=ASK, reasoning_effort="low")
    assert "x-dflash-notes" not in raw.headers
    assert (runner.requests[-1].enable_thinking, runner.requests[-1].reasoning_effort) == (True, "low")
    raw = create(model="toy", messages=ASK, reasoning_effort="herculean")
    assert "herculean is not a known effort" in raw.headers["x-dflash-notes"]
    assert (runner.requests[-1].enable_thinking, runner.requests[-1].reasoning_effort) == (True, None)
    client.chat.completions.create(model="toy", messages=ASK, reasoning_effort="none")
    assert runner.requests[-1].enable_thinking is False
    extra = {"chat_template_kwargs": {"enable_thinking": False, "tone": "dry"}}
    client.chat.completions.create(model="toy", messages=ASK, extra_body=extra)
    assert runner.requests[-1].enable_thinking is False
    assert runner.requests[-1].chat_template_kwargs == {"tone": "dry"}


def test_response_format(client: Any, runner: ScriptedRunner) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    client.chat.completions.create(model="toy", messages=ASK, response_format=wanted)
    assert runner.requests[0].response_format == {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": schema},
    }


def test_steps_and_progress_are_opt_in(client: Any, runner: ScriptedRunner) -> None:
    runner.script = lambda request: thoughtful()
    extra = {"dflash": {"return_steps": True}, "return_progress": True}
    stream = client.chat.completions.create(model="toy", messages=ASK, stream=True, extra_body=extra)
    chunks = [c.model_extra or {} for c in stream]
    steps = [c["dflash"]["step"] for c in chunks if "dflash" in c]
    assert steps[0]["tokens"] == [72, 101, 105, 108] and steps[0]["parents"] == [-1, 0, 0, 1]
    assert steps[0]["path"] == [0, 1, 3] and steps[0]["accepted"] == 2 and steps[0]["texts"][1] == "e"
    assert [c["prompt_progress"]["processed"] for c in chunks if "prompt_progress" in c] == [6, 12]
    silent = client.chat.completions.create(model="toy", messages=ASK, stream=True)
    assert not any({"dflash", "prompt_progress"} & set(c.model_extra or {}) for c in silent)


def test_completions(client: Any, runner: ScriptedRunner) -> None:
    runner.script = lambda request: [
        Begin(2, 0),
        TextDelta("Hi", (LOGPROB,)),
        TextDelta("!"),
        *plain("")[1:],
    ]
    whole = client.completions.create(model="toy", prompt="Once", logprobs=2, max_tokens=4)
    assert whole.choices[0].text == "Hi!" and whole.choices[0].finish_reason == "stop"
    assert (
        whole.choices[0].logprobs.tokens == ["Hi"] and whole.choices[0].logprobs.top_logprobs[0]["Ho"] == -2.0
    )
    stream = list(client.completions.create(model="toy", prompt="Once", stream=True))
    assert "".join(c.choices[0].text for c in stream) == "Hi!"
    echoed = client.completions.create(model="toy", prompt="Once", echo=True)
    assert echoed.choices[0].text == "OnceHi!"
    echo_stream = client.completions.create(model="toy", prompt="Once", echo=True, stream=True)
    assert "".join(c.choices[0].text for c in echo_stream) == "OnceHi!"
    client.completions.create(model="toy", prompt=[1, 2, 3], suffix="end")
    assert runner.requests[-1].prompt == [1, 2, 3] and runner.requests[-1].suffix == "end"
    assert runner.requests[-1].max_tokens == 16


def test_models(client: Any) -> None:
    assert [m.id for m in client.models.list()] == ["toy", "toy-alias"]
    assert client.models.retrieve("toy-alias").owned_by == "dflash-ggml"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 9}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop": ["a" * 300]}, "stop[0]"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": [[5, "much"]]}, "logit_bias"),
        ({"logit_bias": [[5, 10**400]]}, "logit_bias"),
        ({"logit_bias": {"1" * 5000: 1}}, "logit_bias"),
        ({"messages": []}, None),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]},
            "messages[0].content[0].text",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "none"}}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"description": "d"}}]}, "tools[0].function.name"),
        ({"functions": {"name": "f"}}, "functions"),
        ({"functions": [{"name": "f"}], "tools": [TOOL]}, "functions"),
        ({"functions": [{"description": "f"}]}, "tools[0].function.name"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"dflash": {"mode": "forest"}}, "dflash.mode"),
        ({"dflash": {"budget": 0}}, "dflash.budget"),
        ({"grammar": "root ::= x", "response_format": {"type": "json_object"}}, "grammar"),
        ({"guided_regex": "x", "json_schema": {}}, "guided_regex"),
    ],
)
def test_bad_requests_name_the_field(
    client: Any, runner: ScriptedRunner, change: Any, param: str | None
) -> None:
    if change == {"messages": []}:
        runner.script = lambda request: ConfigError("messages: expected a non-empty list of messages")
    refused(client, change, param)


def refused(client: Any, change: Any, param: str | None) -> None:
    """The request with this change is a 400 that names the field."""
    body = {"model": "toy", "messages": ASK, **change}
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/chat/completions", body=body, cast_to=object)
    error = caught.value
    assert error.type == "invalid_request_error" and error.body["message"]
    if param is not None:
        assert error.param == param
    assert error.response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs"),
        ({"messages": [{"role": "user"}, {"role": "owner", "content": "x"}]}, "messages[1].role", "'owner'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
            "left out: image",
        ),
        ({"store": True}, "store", "ignored: store"),
        ({"nonsense": 1}, "nonsense", "ignored: nonsense"),
        ({"dry_multiplier": 0.8}, "dry_multiplier", "ignored: dry_multiplier"),
        ({"verbosity": "low"}, "verbosity", "ignored: verbosity"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "max_completion_tokens differs"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "tool web_search"),
        ({"stream_options": {"odd": 1}}, "stream_options.odd", "stream_options.odd"),
    ],
)
def test_what_is_not_met_is_noted_and_refused_only_by_a_strict_server(
    http: TestClient, strict: Any, change: Any, param: str, words: str
) -> None:
    response = http.post("/v1/chat/completions", json={"model": "toy", "messages": ASK, **change})
    assert words in response.headers["x-dflash-notes"]
    assert response.json()["choices"][0]["message"]["content"] == "Hello there"
    refused(strict, change, param)


def test_options_of_a_stream_are_no_matter_without_one(http: TestClient, strict: Any) -> None:
    change = {"stream_options": {"include_usage": True}}
    response = http.post("/v1/chat/completions", json={"messages": ASK, **change})
    assert response.status_code == 200 and "x-dflash-notes" not in response.headers
    refused(strict, change, "stream_options")


def test_notes_are_one_short_line_of_ascii(http: TestClient) -> None:
    body = {"model": "toy", "messages": ASK, "naïve\r\nx-evil: 1": 1} | {f"field_{i}": 1 for i in range(200)}
    response = http.post("/v1/chat/completions", json=body)
    notes = response.headers["x-dflash-notes"]
    assert len(notes) <= 512 and notes.isascii() and notes.endswith(" ...")
    assert "x-evil" not in response.headers
    assert notes.startswith("ignored: na?ve??x-evil: 1, field_0, ")


def test_a_note_about_many_messages_is_given_once(http: TestClient) -> None:
    messages = [*ASK, *({"role": "critic", "content": str(i)} for i in range(3))]
    tools = [{"type": "function", "odd": i, "function": {"name": f"f{i}"}} for i in range(3)]
    body = {"messages": messages, "tools": tools}
    notes = http.post("/v1/chat/completions", json=body).headers["x-dflash-notes"]
    assert notes.count("'critic'") == 1 and notes.endswith("; ignored: tools[].odd")


def test_any_model_name_is_answered_and_the_served_one_reported(
    client: Any, strict: Any, runner: ScriptedRunner
) -> None:
    names = {"gpt-9": "toy", "": "toy", "toy-alias": "toy-alias", "toy": "toy"}
    for name, reported in names.items():
        assert client.chat.completions.create(model=name, messages=ASK).model == reported
    with pytest.raises(openai.NotFoundError) as caught:
        strict.chat.completions.create(model="gpt-9", messages=ASK)
    assert caught.value.code == "model_not_found" and "toy" in str(caught.value)


def test_a_prompt_that_does_not_fit_reports_by_how_much(client: Any, runner: ScriptedRunner) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(
                model="toy", messages=[{"role": "user", "content": "x" * 300}], stream=stream
            )
        error = caught.value.body
        assert (error["type"], error["code"]) == ("exceed_context_size_error", "context_length_exceeded")
        assert (error["n_prompt_tokens"], error["n_ctx"]) == (300, 256)
        assert "maximum context length is 256 tokens" in error["message"]
    runner.script = lambda request: ContextOverflowError("the window is full")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="toy", messages=ASK)
    assert caught.value.code == "context_length_exceeded" and "n_ctx" not in caught.value.body


def test_failure_before_and_in_a_stream(client: Any, runner: ScriptedRunner) -> None:
    runner.script = lambda request: RuntimeError("secret detail")
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model="toy", messages=ASK)
    assert "secret" not in str(caught.value) and "internal error" in str(caught.value)
    runner.script = lambda request: [*plain()[:2], RuntimeError("secret detail")]
    stream = client.chat.completions.create(model="toy", messages=ASK, stream=True)
    with pytest.raises(openai.APIError, match="internal error"):
        list(stream)
    runner.script = lambda request: plain()
    assert (
        client.chat.completions.create(model="toy", messages=ASK).choices[0].message.content == "Hello there"
    )


def test_length(client: Any, runner: ScriptedRunner) -> None:
    runner.script = lambda request: plain(reason="length")
    assert client.chat.completions.create(model="toy", messages=ASK).choices[0].finish_reason == "length"
    assert replace(runner.requests[0]).max_tokens is None
