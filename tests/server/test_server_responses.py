"""Tests of the openai client's Responses interface against the application, in process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the server extra is not installed")
openai = pytest.importorskip("openai")

from starlette.testclient import TestClient  # noqa: E402

from dflash_ggml.server.errors import ApiError  # noqa: E402
from dflash_ggml.server.response_store import ResponseStore  # noqa: E402
from dflash_ggml.session.events import Begin, TextDelta  # noqa: E402
from reference.server_kit import (  # noqa: E402
    LOGPROB,
    ScriptedRunner,
    application,
    calling,
    plain,
    thoughtful,
)

TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {}},
    "strict": False,
}


HI = [{"role": "user", "content": "Hi"}]


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


def test_plain(client: Any, runner: ScriptedRunner) -> None:
    response = client.responses.create(model="toy", input="Hi", instructions="Be brief", max_output_tokens=30)
    assert response.output_text == "Hello there" and response.status == "completed"
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (12, 9, 21)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (5, 3)
    assert list(runner.requests[0].messages) == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "Hi"},
    ]
    assert runner.requests[0].max_tokens == 30


@pytest.mark.parametrize("script", [plain, thoughtful, calling])
def test_stream_equals_body(client: Any, runner: ScriptedRunner, script: Any) -> None:
    runner.script = lambda request: script()
    whole = client.responses.create(model="toy", input="Hi", tools=[TOOL])
    events = list(client.responses.create(model="toy", input="Hi", tools=[TOOL], stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert [e.type for e in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    with client.responses.stream(model="toy", input="Hi", tools=[TOOL]) as stream:
        final = stream.get_final_response()

    def shape(response: Any) -> list[Any]:
        items = [item.model_dump(exclude={"id", "parsed_arguments"}) for item in response.output]
        for item in items:
            for part in item.get("content") or ():
                part.pop("parsed", None)
        return items

    assert shape(events[-1].response) == shape(whole) == shape(final)
    assert final.usage == whole.usage
    done = [e.item.model_dump(exclude={"id"}) for e in events if e.type == "response.output_item.done"]
    assert done == [item.model_dump(exclude={"id"}) for item in whole.output]
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == whole.output_text


def test_an_empty_answer_is_an_empty_message(client: Any, runner: ScriptedRunner) -> None:
    thought = [e for e in thoughtful() if not isinstance(e, TextDelta)]
    for script, kinds in ((plain(""), ["message"]), (thought, ["reasoning", "message"])):
        runner.script = lambda request, script=script: script
        whole = client.responses.create(model="toy", input="Hi")
        assert [item.type for item in whole.output] == kinds and whole.output_text == ""
        events = list(client.responses.create(model="toy", input="Hi", stream=True))
        assert [item.type for item in events[-1].response.output] == kinds


def test_tool_items(client: Any, runner: ScriptedRunner) -> None:
    runner.script = lambda request: calling()
    response = client.responses.create(model="toy", input="Hi", tools=[TOOL], store=False)
    assert [i.type for i in response.output] == ["reasoning", "message", "function_call", "function_call"]
    assert response.output[2].arguments == '{"city": "Paris"}' and response.output[2].call_id == "call_a"
    items = [{"role": "user", "content": "Hi"}, *(i.model_dump(exclude_none=True) for i in response.output)]
    items += [{"type": "function_call_output", "call_id": "call_a", "output": "sunny"}]
    client.responses.create(model="toy", input=items, tools=[TOOL])
    messages = runner.requests[1].messages
    assert [m["role"] for m in messages] == ["user", "assistant", "tool"]
    assert messages[1]["reasoning_content"] == "I need the weather." and len(messages[1]["tool_calls"]) == 2


def test_previous_response(client: Any, runner: ScriptedRunner) -> None:
    first = client.responses.create(model="toy", input="One", instructions="Not kept")
    second = client.responses.create(model="toy", input="Two", previous_response_id=first.id)
    client.responses.create(model="toy", input="Three", previous_response_id=second.id)
    sent = [(m["role"], m["content"]) for m in runner.requests[2].messages]
    reply = ("assistant", "Hello there")
    assert sent == [("user", "One"), reply, ("user", "Two"), reply, ("user", "Three")]
    unstored = client.responses.create(model="toy", input="One", store=False)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="toy", input="Two", previous_response_id=unstored.id)
    assert caught.value.code == "previous_response_not_found"


def test_reasoning_comes_back_sealed_where_the_client_sends_nothing_else_of_it(
    client: Any, runner: ScriptedRunner
) -> None:
    runner.script = lambda request: thoughtful()
    first = client.responses.create(model="toy", input="Hi", include=["reasoning.encrypted_content"])
    sealed = first.output[0].encrypted_content
    items = [*HI, {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": sealed}]
    client.responses.create(model="toy", input=[*items, first.output[1]])
    assert runner.requests[1].messages[1]["reasoning_content"] == "Let me think."
    assert client.responses.create(model="toy", input="Hi").output[0].encrypted_content is None


def test_items_of_stored_responses_can_be_referred_to(client: Any, runner: ScriptedRunner) -> None:
    runner.script = lambda request: calling()
    output = client.responses.create(model="toy", input="Hi", tools=[TOOL]).output
    references = [{"type": "item_reference", "id": item.id} for item in output]
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "sun"} for item in output[2:]
    ]
    client.responses.create(model="toy", input=[*HI, *references, *results], tools=[TOOL])
    messages = runner.requests[1].messages
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "tool"]
    assert messages[1]["content"] == "One moment." and len(messages[1]["tool_calls"]) == 2
    assert messages[1]["reasoning_content"] == "I need the weather."


def test_store_forgets_the_oldest() -> None:
    store = ResponseStore(limit=3)
    for i in range(5):
        store.put(f"r{i}", f"r{i - 1}" if i else None, [{"role": "user", "content": str(i)}])
    assert len(store) == 3
    assert [m["content"] for m in store.history("r4")] == ["0", "1", "2", "3", "4"]
    with pytest.raises(ApiError, match="forgotten"):
        store.history("r1")


def test_store_is_bounded_by_size_too() -> None:
    store = ResponseStore(limit=100, budget=3000)
    for i in range(5):
        store.put(f"r{i}", None, [{"role": "user", "content": "x" * 1000}])
    assert len(store) == 2
    store.put("huge", "r4", [{"role": "user", "content": "x" * 5000}])
    assert len(store) == 0


def test_incomplete_logprobs_and_format(client: Any, runner: ScriptedRunner) -> None:
    ending = plain("", reason="length")[1:]
    runner.script = lambda request: [Begin(1, 0), TextDelta("Hi", (LOGPROB,)), *ending]
    text = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}
    response = client.responses.create(
        model="toy", input="Hi", include=["message.output_text.logprobs"], top_logprobs=2, text=text
    )
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"
    assert response.output[0].content[0].logprobs[0].token == "Hi"
    assert runner.requests[0].logprobs == 2
    assert runner.requests[0].response_format["json_schema"]["schema"] == {"type": "object"}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"content": "x"}]}, "input[0].type"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"temperature": "x"}, "temperature"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
    ],
)
def test_bad_requests(client: Any, change: dict[str, Any], param: str | None) -> None:
    refused(client, change, param)


def refused(client: Any, change: dict[str, Any], param: str | None) -> None:
    """The request with this change is a 400 that names the field."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/responses", body={"model": "toy", "input": "Hi", **change}, cast_to=object)
    if param is not None:
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, None, "left out: image"),
        ({"background": True}, "background", "ignored: background"),
        ({"truncation": "auto"}, "truncation", "ignored: truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "tool web_search"),
        ({"top_logprobs": 3}, "top_logprobs", "top_logprobs"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "text.verbosity"),
        ({"input": [*HI, {"type": "item_reference", "id": "msg_x"}]}, "input[1]", "'msg_x'"),
        ({"input": [*HI, {"type": "web_search_call", "id": "ws_1"}]}, "input[1]", "web_search_call"),
    ],
)
def test_what_is_not_met_is_noted_and_refused_only_by_a_strict_server(
    http: TestClient, change: dict[str, Any], param: str | None, words: str
) -> None:
    response = http.post("/v1/responses", json={"model": "toy", "input": "Hi", **change})
    assert words in response.headers["x-dflash-notes"] and response.json()["status"] == "completed"
    with TestClient(application(ScriptedRunner(), strict=True)) as other:
        strict = openai.OpenAI(base_url="http://testserver/v1", api_key="-", http_client=other, max_retries=0)
        refused(strict, change, param)


def test_failure_in_a_stream(client: Any, runner: ScriptedRunner) -> None:
    runner.script = lambda request: [*plain()[:2], RuntimeError("secret")]
    events = list(client.responses.create(model="toy", input="Hi", stream=True))
    assert events[-1].type == "error" and "internal error" in events[-1].message
    failed = events[-2]
    assert failed.type == "response.failed" and failed.response.status == "failed"
    assert "internal error" in failed.response.error.message
    assert failed.response.output[0].status == "incomplete"


def test_stored_responses_are_read_and_deleted(client: Any, runner: ScriptedRunner) -> None:
    made = client.responses.create(
        model="toy", input=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    )
    again = client.responses.retrieve(made.id)
    assert again.output_text == made.output_text and again.usage == made.usage
    items = list(client.responses.input_items.list(made.id, order="asc"))
    assert [(i.type, i.role, i.content[0].type, i.content[0].text) for i in items] == [
        ("message", "user", "input_text", "Hi"),
        ("message", "assistant", "output_text", "Yes"),
    ]
    one_by_one = list(client.responses.input_items.list(made.id, limit=1))
    assert [i.id for i in one_by_one] == [i.id for i in reversed(items)]
    follow = client.responses.create(model="toy", input="More", previous_response_id=made.id)
    client.responses.delete(made.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    last = client.responses.create(model="toy", input="Last", previous_response_id=follow.id)
    assert [m["content"] for m in runner.requests[-1].messages[:2]] == ["Hi", "Yes"]
    streamed = list(client.responses.create(model="toy", input="Hi", stream=True))[-1].response
    assert client.responses.retrieve(streamed.id).output_text == "Hello there"
    unkept = client.responses.create(model="toy", input="Hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)
    assert last.previous_response_id == follow.id


def test_pages_of_items_name_a_wrong_field(client: Any) -> None:
    made = client.responses.create(model="toy", input="Hi")
    for query, param in (({"limit": "many"}, "limit"), ({"after": "nobody"}, "after")):
        with pytest.raises(openai.BadRequestError) as caught:
            client.get(f"/responses/{made.id}/input_items", options={"params": query}, cast_to=object)
        assert caught.value.param == param


def test_input_tokens_are_counted_without_an_answer(client: Any, runner: ScriptedRunner) -> None:
    counted = client.responses.input_tokens.count(model="toy", input="Hello", instructions="abc")
    assert counted.input_tokens == 8 and counted.object == "response.input_tokens"
    assert runner.requests == []


def test_a_deleted_response_frees_its_memory() -> None:
    store = ResponseStore(limit=100, budget=3000)
    for i in range(8):
        store.put(f"r{i}", None, [{"role": "user", "content": "x" * 1000}], body={"id": f"r{i}"})
        if i < 6:
            store.delete(f"r{i}")
    assert store.body("r6") == {"id": "r6"} and store.body("r7") == {"id": "r7"}
