"""Requests changed at random: every answer is a success or an error that the client can parse, never a 500."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the server extra is not installed")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from dflash_ggml.session.requests import ChatRequest
from dflash_ggml.session.session import Session
from reference.fake_engine import TOOL_TEMPLATE, FakeEngine, byte_vocabulary
from reference.server_kit import ScriptedRunner, application, calling

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
THOUGHT = {"type": "thinking", "thinking": "t"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "toy",
        "messages": [
            {"role": "system", "content": "s"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "u"}, {"type": "image_url", "image_url": {}}],
            },
            {"role": "assistant", "content": None, "tool_calls": [CALL], "thinking_blocks": [THOUGHT]},
            {"role": "tool", "tool_call_id": "c", "content": "r"},
            {"role": "developer", "content": "d"},
        ],
        "tools": [
            {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
            {
                "type": "custom",
                "custom": {"name": "g", "format": {"type": "grammar", "grammar": {"syntax": "lark"}}},
            },
        ],
        "stop_token_ids": [3],
        "reasoning": {"effort": "low"},
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        "stream": True,
        "stream_options": {"include_usage": True},
        "stop": ["x"],
        "logit_bias": {"5": 1.5},
        "temperature": 0.5,
        "dflash": {"mode": "tree", "budget": 7, "return_steps": True},
    },
    "/v1/completions": {
        "model": "toy",
        "prompt": [1, 2],
        "max_tokens": 4,
        "logprobs": 2,
        "stop": "x",
        "seed": 3,
    },
    "/v1/responses": {
        "model": "toy",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "u"}]},
            {
                "type": "reasoning",
                "id": "r",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "t"}],
            },
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "r"},
            {"type": "local_shell_call", "call_id": "d", "action": {"type": "exec", "command": ["ls"]}},
            {"type": "local_shell_call_output", "call_id": "d", "output": "r"},
            {"type": "item_reference", "id": "i"},
            {"type": "additional_tools", "tools": [{"type": "local_shell"}]},
        ],
        "tools": [
            {"type": "function", "name": "f", "parameters": SCHEMA, "strict": None},
            {"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "g"}]},
            {"type": "web_search"},
        ],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
        "reasoning": {"effort": "low"},
        "stream": True,
    },
    "/v1/messages": {
        "model": "toy",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": "u"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": ""},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"a": "b"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image"}]},
                    {"type": "document", "title": "t", "source": {"type": "text", "data": "d"}},
                    {"type": "search_result", "content": [{"type": "text", "text": "s"}]},
                ],
            },
            {"role": "system", "content": "s"},
        ],
        "tools": [{"name": "f", "input_schema": SCHEMA}, {"type": "bash_20250124", "name": "bash"}],
        "context_management": {"edits": []},
        "tool_choice": {"type": "any"},
        "stream": True,
    },
    "/completion": {
        "prompt": ["a", [1, 2], {"prompt_string": "b"}],
        "n_predict": 4,
        "n_probs": 2,
        "n_cmpl": 2,
        "logit_bias": [[1, 0.5], ["hello", False]],
        "response_fields": ["content", "generation_settings/n_predict"],
        "stop": ["x"],
        "timings_per_token": True,
        "samplers": ["top_k"],
    },
    "/v1/embeddings": {"model": "toy", "input": ["a", [1, 2]], "encoding_format": "base64", "dimensions": 4},
    "/api/chat": {
        "model": "toy",
        "messages": [
            {"role": "user", "content": "u", "images": ["aGk="]},
            {
                "role": "assistant",
                "content": "",
                "thinking": "t",
                "tool_calls": [{"function": {"name": "f", "arguments": {"a": "b"}}}],
            },
            {"role": "tool", "content": "r", "tool_name": "f"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
        "format": SCHEMA,
        "options": {"temperature": 0.5, "num_predict": 3, "stop": ["x"], "num_ctx": 100},
        "think": "low",
        "keep_alive": "5m",
        "logprobs": True,
        "top_logprobs": 1,
    },
    "/api/generate": {
        "model": "toy",
        "prompt": "a",
        "suffix": "b",
        "system": "s",
        "format": "json",
        "raw": True,
    },
    "/api/embed": {"model": "toy", "input": ["a"], "dimensions": 4, "truncate": False},
}
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything inside `value`."""
    children = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, child in children:
        yield (*path, key)
        yield from places(child, (*path, key))


@st.composite
def changed(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """An endpoint, and a body in which up to three things were replaced, removed or added."""
    path = draw(st.sampled_from(sorted(REQUESTS)))
    body = copy.deepcopy(REQUESTS[path])
    for _ in range(draw(st.integers(0, 3))):
        where = draw(st.sampled_from(sorted(places(body), key=repr) or [("x",)]))
        holder: Any = body
        for key in where[:-1]:
            holder = holder[key]
        action = draw(st.sampled_from(("replace", "remove", "add")))
        if action == "replace" or (action == "add" and not isinstance(holder, dict)):
            holder[where[-1]] = draw(JUNK)
        elif action == "add":
            holder[draw(st.text(min_size=1, max_size=5))] = draw(JUNK)
        else:
            del holder[where[-1]]
    return path, body


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    runner = ScriptedRunner(lambda request: calling())
    session = Session(FakeEngine(tokenizer=byte_vocabulary(template=TOOL_TEMPLATE)))

    def count(
        request: Any,
    ) -> int:  # a real session renders and counts the prompt, only the answer is scripted
        return session.count_tokens(request) if isinstance(request, ChatRequest) else 1

    runner.n_ctx = 4096
    runner.count = count  # type: ignore[method-assign]
    with TestClient(application(runner)) as made:
        yield made


def test_the_unchanged_requests_are_fine(client: TestClient) -> None:
    for path, body in REQUESTS.items():
        response = client.post(path, json=body)
        assert response.status_code == 200, (path, response.text)
        assert '"error"' not in response.text.replace('"error":null', ""), (path, response.text)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(changed())
def test_changed_requests_never_crash(client: TestClient, case: tuple[str, dict[str, Any]]) -> None:
    path, body = case
    response = client.post(path, json=body)
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200 and path.startswith("/api/"):
        assert response.json()["error"]
    elif response.status_code != 200:
        error = response.json()["error"]
        assert error["message"] and error["type"] in ("invalid_request_error", "not_found_error")
    else:
        assert "internal error" not in response.text
