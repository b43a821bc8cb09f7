"""Tests of other servers' fields that are honoured under their own names, on a toy engine that decodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the server extra is not installed")

from starlette.testclient import TestClient

from dflash_ggml.server.app import create_app, make_service
from dflash_ggml.server.dialect import Settings
from dflash_ggml.server.runner import Runner
from dflash_ggml.session.requests import GrammarSpec, NamedTool
from dflash_ggml.session.session import Session
from reference.fake_engine import TOOL_TEMPLATE, FakeEngine, byte_vocabulary
from reference.server_kit import ScriptedRunner, application, calling, thoughtful

ASK = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


@pytest.fixture
def runner() -> ScriptedRunner:
    return ScriptedRunner()


@pytest.fixture
def http(runner: ScriptedRunner) -> Iterator[TestClient]:
    with TestClient(application(runner)) as http:
        yield http


def chat(http: TestClient, **fields: Any) -> Any:
    """The answer to a chat request with these fields; no note may come with it."""
    response = http.post("/v1/chat/completions", json={"messages": ASK, **fields})
    assert response.status_code == 200, response.text
    assert "x-dflash-notes" not in response.headers
    return response.json()


# --- what reaches the request


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"min_tokens": 4, "stop_token_ids": [7, 8]}, {"min_tokens": 4, "stop_token_ids": (7, 8)}),
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"reasoning": {"enabled": True}}, {"enable_thinking": True}),
        ({"reasoning": {"max_tokens": 64}}, {"enable_thinking": True, "reasoning_budget": 64}),
        (
            {"reasoning": {"effort": "high"}, "enable_thinking": False},
            {"enable_thinking": True, "reasoning_effort": "high", "reasoning_budget": None},
        ),
        ({"reasoning_effort": "auto"}, {"enable_thinking": True, "reasoning_effort": None}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 64}},
            {"enable_thinking": True, "reasoning_budget": 64},
        ),
        ({"reasoning_budget": -1}, {"reasoning_budget": -1, "enable_thinking": None}),
        ({"thinking_budget": 64, "enable_thinking": True}, {"reasoning_budget": 64, "enable_thinking": True}),
        ({"thinking_budget_tokens": 0}, {"reasoning_budget": 0}),
        ({"reasoning_budget_tokens": 64.0}, {"reasoning_budget": 64}),
        ({"thinking_token_budget": 64, "thinking": {"type": "enabled"}}, {"reasoning_budget": 64}),
        ({"reasoning_format": "none"}, {"split_reasoning": False}),
        ({"separate_reasoning": False}, {"split_reasoning": False}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
        ({"n_probs": 3}, {"logprobs": 3}),
        ({"max_tokens": -1}, {"max_tokens": None}),
        ({"max_tokens": 7.0}, {"max_tokens": 7}),
        ({"json_schema": SCHEMA}, {"grammar": GrammarSpec("json_schema", json.dumps(SCHEMA))}),
        ({"guided_json": json.dumps(SCHEMA)}, {"grammar": GrammarSpec("json_schema", json.dumps(SCHEMA))}),
        ({"guided_regex": "a+"}, {"grammar": GrammarSpec("regex", "a+")}),
        ({"regex": "a+"}, {"grammar": GrammarSpec("regex", "a+")}),
        ({"ebnf": 'root ::= "a"'}, {"grammar": GrammarSpec("gbnf", 'root ::= "a"')}),
        ({"guided_grammar": 'start: "a"'}, {"grammar": GrammarSpec("lark", 'start: "a"')}),
        (
            {"structured_outputs": {"choice": ["a b", 'c"']}},
            {"grammar": GrammarSpec("lark", 'start: "a b" | "c\\""\n')},
        ),
        ({"structured_outputs": {"json_object": True}}, {"grammar": GrammarSpec("json_object")}),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "response", "schema": SCHEMA},
                }
            },
        ),
        (
            {
                "tools": [TOOL],
                "tool_choice": {"type": "function", "function": {"name": "weather"}},
                "response_format": {"type": "json_object"},
            },
            {"tool_choice": NamedTool("weather"), "response_format": None},
        ),
        ({"tools": [TOOL], "tool_choice": "any"}, {"tool_choice": "required"}),
        (
            {
                "tools": [TOOL, {"type": "function", "name": "flat"}],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "required", "tools": [{"type": "function", "name": "flat"}]},
                },
            },
            {
                "tool_choice": "required",
                "tools": (
                    {
                        "type": "function",
                        "function": {"name": "flat", "parameters": {"type": "object", "properties": {}}},
                    },
                ),
            },
        ),
    ],
    ids=lambda value: next(iter(value)),
)
def test_fields_reach_the_request(
    http: TestClient, runner: ScriptedRunner, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    chat(http, **fields)
    assert {name: getattr(runner.requests[0], name) for name in expected} == expected


def test_names_of_the_sampler(http: TestClient, runner: ScriptedRunner) -> None:
    chat(http, repetition_penalty=1.3, logit_bias=[[5, 2], [6, False]])
    sampling = runner.requests[0].sampling
    assert (sampling.repeat_penalty, sampling.penalty_last_n) == (1.3, -1)
    assert sampling.logit_bias == {5: 2.0, 6: float("-inf")}
    chat(http, repetition_penalty=1.3, repeat_penalty=1.1)
    assert (runner.requests[1].sampling.repeat_penalty, runner.requests[1].sampling.penalty_last_n) == (
        1.1,
        64,
    )


def test_ignored_values_do_not_warn(http: TestClient) -> None:
    chat(
        http,
        cache_prompt=False,
        id_slot=3,
        timings_per_token=False,
        samplers=None,
        dry_multiplier=0.0,
        dry_base=1.75,
        xtc_probability=0,
        xtc_threshold=0.1,
        skip_special_tokens=True,
        service_tier="flex",
        verbosity="medium",
        store=False,
        prediction={"type": "content", "content": "x"},
        session_id="s",
        keep_alive="5m",
        functions=None,
        audio=None,
        unheard_of=None,
        unheard_of_either=[],
    )


def test_reasoning_that_is_not_wanted_is_not_sent(http: TestClient, runner: ScriptedRunner) -> None:
    runner.script = lambda request: thoughtful()
    assert "reasoning_content" in chat(http)["choices"][0]["message"]
    for fields in ({"include_reasoning": False}, {"reasoning": {"exclude": True}}):
        assert "reasoning_content" not in chat(http, **fields)["choices"][0]["message"]
        streamed = http.post("/v1/chat/completions", json={"messages": ASK, "stream": True, **fields}).text
        assert "reasoning_content" not in streamed and "42" in streamed


def test_a_custom_tool_of_a_chat_gets_its_text_back(http: TestClient, runner: ScriptedRunner) -> None:
    tool = {"type": "custom", "custom": {"name": "weather", "format": {"type": "text"}}}
    script = calling()
    script[4:6] = [type(script[4])(0, '{"input": "su'), type(script[4])(0, 'n"}')]
    runner.script = lambda request: script
    calls = chat(http, tools=[tool])["choices"][0]["message"]["tool_calls"]
    assert calls[0] == {"id": "call_a", "type": "custom", "custom": {"name": "weather", "input": "sun"}}
    text = http.post("/v1/chat/completions", json={"messages": ASK, "tools": [tool], "stream": True}).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    deltas = [c for e in events for c in e["choices"][0]["delta"].get("tool_calls", ()) if c["index"] == 0]
    assert "".join(d["custom"]["input"] for d in deltas) == "sun" and deltas[0]["custom"]["name"] == "weather"
    echo = [*ASK, {"role": "assistant", "content": None, "tool_calls": calls[:1]}]
    chat(http, messages=echo, tools=[tool])
    sent = runner.requests[-1].messages[1]["tool_calls"][0]["function"]
    assert sent == {"name": "weather", "arguments": {"input": "sun"}}


# --- what becomes of it


@pytest.fixture
def toy() -> Iterator[tuple[TestClient, FakeEngine]]:
    engine = FakeEngine(tokenizer=byte_vocabulary(template=TOOL_TEMPLATE))
    runner = Runner(Session(engine))  # type: ignore[arg-type]
    with TestClient(create_app(make_service(lambda progress: runner, Settings(names=("toy",))))) as http:
        yield http, engine


def test_an_answer_goes_on_for_as_long_as_it_must(toy: tuple[TestClient, FakeEngine]) -> None:
    http, engine = toy

    def tokens(**fields: Any) -> int:
        engine.replies = ["ok"]
        answer = chat(http, enable_thinking=False, temperature=0, max_tokens=20, **fields)
        return int(answer["usage"]["completion_tokens"])

    assert tokens() == 2
    assert tokens(min_tokens=9) >= 9
    assert tokens(ignore_eos=True) == 20


def test_tokens_that_end_an_answer_are_not_shown(toy: tuple[TestClient, FakeEngine]) -> None:
    http, engine = toy
    engine.replies = ["one.two"]
    dot = engine.tokenizer.encode(".")
    answer = chat(http, enable_thinking=False, temperature=0, max_tokens=20, stop_token_ids=dot)
    assert answer["choices"][0]["message"]["content"] == "one"
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_a_grammar_ends_an_answer_that_may_not_end(toy: tuple[TestClient, FakeEngine]) -> None:
    pytest.importorskip("llguidance", reason="the grammar extra is not installed")
    http, _ = toy
    answer = chat(http, enable_thinking=False, max_tokens=30, ignore_eos=True, guided_choice=["yes", "no"])
    assert answer["choices"][0]["message"]["content"] in ("yes", "no")


def test_a_prompt_that_does_not_fit_reports_by_how_much(toy: tuple[TestClient, FakeEngine]) -> None:
    """Whether the tokeniser notices midway or the count at the end."""
    http, engine = toy
    bare = http.post("/v1/chat/completions", json={"messages": ASK, "max_tokens": 1}).json()["usage"][
        "prompt_tokens"
    ]
    for n in (engine.n_ctx - bare + 2, 50 * engine.n_ctx):
        messages = [{"role": "user", "content": "x" * n}]
        response = http.post("/v1/chat/completions", json={"messages": messages})
        error = response.json()["error"]
        assert response.status_code == 400 and error["type"] == "exceed_context_size_error"
        assert error["n_prompt_tokens"] >= error["n_ctx"] == engine.n_ctx
        response = http.post("/v1/messages", json={"model": "m", "max_tokens": 1, "messages": messages})
        assert response.json()["error"]["message"].startswith("prompt is too long: ")
