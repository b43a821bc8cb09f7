"""Tests of the server on real sessions: a toy engine with scripted replies, and the embedded pair."""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the server extra is not installed")
openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

from starlette.testclient import TestClient  # noqa: E402

from dflash_ggml.cli.chat_options import session_options  # noqa: E402
from dflash_ggml.config import EngineConfig  # noqa: E402
from dflash_ggml.decode.sampling import SamplingParams  # noqa: E402
from dflash_ggml.engine.engine import Engine  # noqa: E402
from dflash_ggml.files.pairs import EMBEDDED_DRAFT, EMBEDDED_TARGET  # noqa: E402
from dflash_ggml.server import openai_chat  # noqa: E402
from dflash_ggml.server.app import create_app, make_service  # noqa: E402
from dflash_ggml.server.cli import build_parser  # noqa: E402
from dflash_ggml.server.dialect import Settings  # noqa: E402
from dflash_ggml.server.opening import Opener  # noqa: E402
from dflash_ggml.server.runner import Runner  # noqa: E402
from dflash_ggml.session.answer import Answer  # noqa: E402
from dflash_ggml.session.requests import ChatRequest  # noqa: E402
from dflash_ggml.session.session import Session, run_chat  # noqa: E402
from reference.fake_engine import TOOL_TEMPLATE, FakeEngine, byte_vocabulary  # noqa: E402

ASK = [{"role": "user", "content": "Weather in Paris?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
REPLY = (
    "I should look.</think>\n\nLet me see.<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)


@contextlib.contextmanager
def client_of(engine: Any) -> Iterator[TestClient]:
    runner = Runner(Session(engine))
    with TestClient(create_app(make_service(lambda progress: runner, Settings(names=("toy",))))) as client:
        yield client


def toy(*replies: str) -> FakeEngine:
    return FakeEngine(tokenizer=byte_vocabulary(template=TOOL_TEMPLATE), replies=list(replies))


def openai_client(http: TestClient) -> Any:
    return openai.OpenAI(base_url="http://testserver/v1", api_key="x", http_client=http, max_retries=0)


def test_tools_and_reasoning_in_every_dialect() -> None:
    with client_of(toy(*[REPLY] * 4)) as http:
        client = openai_client(http)
        chat = client.chat.completions.create(model="toy", messages=ASK, tools=[TOOL], temperature=0)
        message = chat.choices[0].message
        assert chat.choices[0].finish_reason == "tool_calls"
        assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Paris", "days": 3}
        assert message.model_extra["reasoning_content"].strip() == "I should look."
        assert message.content.strip() == "Let me see."
        assert chat.usage.completion_tokens_details.reasoning_tokens > 0
        with client.chat.completions.stream(model="toy", messages=ASK, tools=[TOOL], temperature=0) as stream:
            streamed = stream.get_final_completion().choices[0].message
        assert streamed.tool_calls[0].function.arguments == message.tool_calls[0].function.arguments
        flat = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
        response = client.responses.create(model="toy", input="Weather?", tools=[flat], temperature=0)
        kinds = [item.type for item in response.output]
        assert kinds == ["reasoning", "message", "function_call"]
        other = anthropic.Anthropic(
            base_url="http://testserver", api_key="x", http_client=http, max_retries=0
        )
        answer = other.messages.create(
            model="toy",
            max_tokens=500,
            messages=ASK,
            thinking={"type": "adaptive"},
            tools=[{"name": "weather", "input_schema": SCHEMA}],
            extra_body={"temperature": 0},
        )
        assert [b.type for b in answer.content] == ["thinking", "text", "tool_use"]
        assert answer.content[2].input == {"city": "Paris", "days": 3} and answer.stop_reason == "tool_use"


UNIT = {
    "type": "object",
    "properties": {"unit": {"type": "string", "enum": ["c", "f"]}},
    "required": ["unit"],
}
KELVIN = "</think>\n\n<tool_call>\n<function=weather>\n<parameter=unit>\nk\n</parameter>\n</function>\n</tool_call>"


def chat_call(http: TestClient, strict: bool) -> Any:
    tool = {"type": "function", "function": {"name": "weather", "parameters": UNIT, "strict": strict}}
    body = {"messages": ASK, "tools": [tool], "max_tokens": 300, "temperature": 0}
    message = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    return json.loads(message["tool_calls"][0]["function"]["arguments"])


def responses_call(http: TestClient, strict: bool) -> Any:
    tool = {"type": "function", "name": "weather", "parameters": UNIT, "strict": strict}
    body = {"input": "Weather?", "tools": [tool], "max_output_tokens": 300, "temperature": 0}
    output = http.post("/v1/responses", json=body).json()["output"]
    return json.loads(next(item for item in output if item["type"] == "function_call")["arguments"])


def messages_call(http: TestClient, strict: bool) -> Any:
    tool = {"name": "weather", "input_schema": UNIT, "strict": strict}
    body = {"model": "toy", "messages": ASK, "tools": [tool], "max_tokens": 300, "temperature": 0}
    body["thinking"] = {"type": "adaptive"}
    content = http.post("/v1/messages", json=body).json()["content"]
    return next(block for block in content if block["type"] == "tool_use")["input"]


@pytest.mark.parametrize("call", [chat_call, responses_call, messages_call])
def test_strict_tools_bind_the_arguments_in_every_dialect(call: Any) -> None:
    pytest.importorskip("llguidance")
    with client_of(toy(KELVIN, KELVIN)) as http:
        assert call(http, strict=False) == {"unit": "k"}
        assert call(http, strict=True)["unit"] in ("c", "f")


def test_stop_strings_lengths_and_refused_conversations() -> None:
    with client_of(toy("one two three", "one two three")) as http:
        client = openai_client(http)
        options = {"model": "toy", "messages": ASK, "temperature": 0, "reasoning_effort": "none"}
        assert (
            client.chat.completions.create(**options, stop=[" three"]).choices[0].message.content == "one two"
        )
        cut = client.chat.completions.create(**options, max_tokens=3)
        assert cut.choices[0].finish_reason == "length" and cut.usage.completion_tokens == 3
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**{**options, "messages": []})
        assert caught.value.param == "messages"
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(
                **{**options, "messages": [{"role": "user", "content": "x" * 5000}]}
            )
        assert caught.value.code == "context_length_exceeded"


def test_count_tokens_is_the_prompt_length() -> None:
    with client_of(toy("hello")) as http:
        client = anthropic.Anthropic(
            base_url="http://testserver", api_key="x", http_client=http, max_retries=0
        )
        count = client.messages.count_tokens(model="toy", messages=ASK, system="Be brief")
        answer = client.messages.create(model="toy", messages=ASK, system="Be brief", max_tokens=5)
        usage = answer.usage
        assert usage.input_tokens + usage.cache_read_input_tokens == count.input_tokens


@pytest.fixture(scope="module")
def demo() -> Iterator[TestClient]:
    config = EngineConfig(model=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, n_ctx=512, n_threads=2)
    with client_of(Engine.load(config)) as http:
        yield http


def test_embedded_pair_steps(demo: TestClient) -> None:
    client = openai_client(demo)
    extra = {"dflash": {"return_steps": True, "mode": "tree", "budget": 15}}
    prompt = "def fibonacci(n):\n    "
    stream = client.completions.create(
        model="toy", prompt=prompt, max_tokens=24, temperature=0, stream=True, extra_body=extra
    )
    text, steps, timings = "", [], {}
    for chunk in stream:
        text += chunk.choices[0].text
        extras = chunk.model_extra or {}
        timings = extras.get("timings", timings)
        if "dflash" in extras:
            steps.append(extras["dflash"]["step"])
    assert "".join("".join(s["emitted"]) for s in steps).startswith(text) and text
    trees = [s for s in steps if s["mode"] == "tree"]
    assert len(trees) == timings["steps"] and sum(s["accepted"] for s in trees) == timings["draft_n_accepted"]
    for step in trees:
        assert len(step["tokens"]) == len(step["parents"]) == len(step["texts"]) <= 16
        assert step["path"][0] == 0 and all(
            step["parents"][b] == a for a, b in zip(step["path"], step["path"][1:])
        )
        assert [step["texts"][i] for i in step["path"][1:]] == step["emitted"][:-1]
    plain = client.completions.create(
        model="toy", prompt=prompt, max_tokens=24, temperature=0, extra_body={"dflash": {"mode": "plain"}}
    )
    assert plain.model_extra["timings"]["mode"] == "plain" and plain.model_extra["timings"]["draft_n"] == 0


def test_embedded_pair_budget_and_seed(demo: TestClient) -> None:
    client = openai_client(demo)
    with pytest.raises(openai.BadRequestError, match="budget"):
        client.completions.create(model="toy", prompt="x", extra_body={"dflash": {"budget": 200}})
    options = {"model": "toy", "messages": ASK, "max_tokens": 16, "seed": 7, "temperature": 0.9}
    one, two = (client.chat.completions.create(**options).choices[0].message.content for _ in range(2))
    assert one == two != ""


def test_the_command_turns_thinking_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """--think is the default of requests; a template without a switch is reported once, at the start."""
    for template, words in (
        (TOOL_TEMPLATE, 0),
        (TOOL_TEMPLATE.replace("enable_thinking", "nothing"), 1),
    ):
        engine = FakeEngine(tokenizer=byte_vocabulary(template=template))
        monkeypatch.setattr("dflash_ggml.engine.engine.Engine.load", lambda config, progress, e=engine: e)
        open_runner = Opener(engine.config, 0, SamplingParams(), "off")
        session = open_runner(lambda stage, done, total: None).session
        for _ in range(2):
            prepared = session.prepare(ChatRequest(messages=[{"role": "user", "content": "Hi"}]))
            assert (prepared.reasoning == "open") == bool(words)
        assert caplog.text.count("knows no such switch") == words


def test_options_of_chats_reach_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template for a model without one, its variables and where thoughts go; clients see the template that is used."""
    engine = FakeEngine(tokenizer=byte_vocabulary(template=""), replies=["Hm.</think>Yes"] * 2)
    monkeypatch.setattr("dflash_ggml.engine.engine.Engine.load", lambda config, progress: engine)
    line = ["--chat-template", "{{ a }}" + TOOL_TEMPLATE, "--chat-template-kwargs", '{"a": "z"}']
    given = build_parser().parse_args([*line, "--reasoning-format", "none"])
    opener = pickle.loads(
        pickle.dumps(Opener(engine.config, 0, SamplingParams(), chats=session_options(given)))
    )
    runner = opener(lambda stage, done, total: None)
    assert runner.info()["chat_template"] == "{{ a }}" + TOOL_TEMPLATE
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
    for more, text in (({}, "Hm.</think>Yes"), ({"reasoning_format": "deepseek"}, "Yes")):
        request = openai_chat.read_call({**body, **more}, Settings(names=("toy",))).request
        assert runner.session.prepare(request).text.startswith("z<")
        assert Answer.of(run_chat(runner.session, request)).text == text
