"""Tests of schemas and grammars of requests on every API: references, unsupported and empty schemas, how calls end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the server extra is not installed")
pytest.importorskip("llguidance", reason="the grammar extra is not installed")

from starlette.testclient import TestClient

from dflash_ggml.config import EngineConfig
from dflash_ggml.server.app import create_app, make_service
from dflash_ggml.server.dialect import Settings
from dflash_ggml.server.runner import Runner
from dflash_ggml.session.session import Session
from reference.fake_engine import TOOL_TEMPLATE, FakeEngine, byte_vocabulary

N = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
ROOT = {"$ref": "#/$defs/N", "$defs": {"N": N}}
NOWHERE = {"type": "object", "properties": {"n": {"$ref": "#/$defs/x"}}}
LEFT_OUT = {
    "type": "object",
    "properties": {"n": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}},
}
EMPTY = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 5, "maximum": 3}},
    "required": ["n"],
}
CALL = "<tool_call>\n<function=f>\n<parameter=n>\n20\n</parameter>\n</function>\n</tool_call>"
ASK = [{"role": "user", "content": "hello"}]

Server = tuple[TestClient, FakeEngine]


def serve(strict: bool = False) -> Iterator[Server]:
    engine = FakeEngine(
        config=EngineConfig(model=Path("toy.gguf"), n_ctx=4096, n_batch=512),
        tokenizer=byte_vocabulary(template=TOOL_TEMPLATE),
    )
    runner = Runner(Session(engine, thinking=False))  # type: ignore[arg-type]
    app = create_app(make_service(lambda progress: runner, Settings(names=("toy",), strict=strict)))
    with TestClient(app) as http:
        yield http, engine


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    yield from serve()


@pytest.fixture(scope="module")
def strict() -> Iterator[Server]:
    yield from serve(strict=True)


def with_tool(schema: Any, force: bool = False) -> dict[str, tuple[str, dict[str, Any]]]:
    """A request with this tool by surface."""
    function = {"name": "f", "parameters": schema}
    tools = [{"type": "function", "function": function}]
    choice = {"tool_choice": "required"} if force else {}
    return {
        "chat": ("/v1/chat/completions", {"messages": ASK, "tools": tools, "max_tokens": 300, **choice}),
        "functions": (
            "/v1/chat/completions",
            {"messages": ASK, "functions": [function], "max_tokens": 300}
            | ({"function_call": {"name": "f"}} if force else {}),
        ),
        "responses": (
            "/v1/responses",
            {
                "input": "hello",
                "tools": [{"type": "function", **function}],
                "max_output_tokens": 300,
                **choice,
            },
        ),
        "messages": (
            "/v1/messages",
            {"messages": ASK, "tools": [{"name": "f", "input_schema": schema}], "max_tokens": 300}
            | ({"tool_choice": {"type": "any"}} if force else {}),
        ),
        "ollama": (
            "/api/chat",
            {"messages": ASK, "tools": tools, "stream": False, "options": {"num_predict": 300}},
        ),
    }


def with_format(schema: Any) -> dict[str, tuple[str, dict[str, Any]]]:
    """A request for an answer of this schema by surface."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    flat = {"type": "json_schema", "name": "x", "schema": schema}
    chat, completion = {"messages": ASK, "max_tokens": 300}, {"prompt": "hello", "max_tokens": 300}
    return {
        "chat": ("/v1/chat/completions", {**chat, "response_format": form}),
        "json_schema": ("/v1/chat/completions", {**chat, "json_schema": schema}),
        "guided_json": ("/v1/chat/completions", {**chat, "guided_json": schema}),
        "structured_outputs": ("/v1/chat/completions", {**chat, "structured_outputs": {"json": schema}}),
        "completions": ("/v1/completions", {**completion, "response_format": form}),
        "completion": ("/completion", {"prompt": "hello", "n_predict": 300, "json_schema": schema}),
        "responses": (
            "/v1/responses",
            {"input": "hello", "max_output_tokens": 300, "text": {"format": flat}},
        ),
        "messages": (
            "/v1/messages",
            {**chat, "output_config": {"format": {"type": "json_schema", "schema": schema}}},
        ),
        "ollama": ("/api/chat", {"messages": ASK, "format": schema, "stream": False}),
        "generate": ("/api/generate", {"prompt": "hello", "format": schema, "stream": False}),
    }


TOOLS, FORMATS = list(with_tool({})), list(with_format({}))


def post(server: Server, path: str, body: dict[str, Any], reply: str = "") -> Any:
    server[1].replies[:] = [reply] if reply else []
    return server[0].post(path, json={"model": "toy", **body})


def called(name: str, body: dict[str, Any]) -> list[Any]:
    """The arguments of the calls in an answer."""
    if name in ("chat", "ollama", "functions"):
        message = body["message"] if name == "ollama" else body["choices"][0]["message"]
        if name == "functions" and "function_call" in message:
            return [json.loads(message["function_call"]["arguments"])]
        found = [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
        return found if name == "ollama" else [json.loads(arguments) for arguments in found]
    if name == "responses":
        return [json.loads(item["arguments"]) for item in body["output"] if item["type"] == "function_call"]
    return [block["input"] for block in body["content"] if block["type"] == "tool_use"]


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_whose_parameters_are_a_reference(server: Server, name: str, force: bool) -> None:
    path, body = with_tool(ROOT, force)[name]
    response = post(server, path, body, CALL)
    assert response.status_code == 200, response.text
    assert called(name, response.json()) == [{"n": 20}]
    assert "x-dflash-notes" not in response.headers or name == "functions"


@pytest.mark.parametrize("behind", ["\n", "\n\n", " \n"])
@pytest.mark.parametrize("name", ["chat", "responses", "messages"])
def test_a_forced_call_ends_though_the_model_writes_lines_behind_it(
    server: Server, name: str, behind: str
) -> None:
    path, body = with_tool(N, True)[name]
    response = post(server, path, body, CALL + behind).json()
    assert called(name, response) == [{"n": 20}]
    reason = {
        "chat": lambda: response["choices"][0]["finish_reason"],
        "responses": lambda: response["status"],
    }
    assert reason.get(name, lambda: response["stop_reason"])() in ("tool_calls", "completed", "tool_use")


@pytest.mark.parametrize("name", TOOLS)
def test_a_reference_of_a_tool_that_names_nothing(server: Server, name: str) -> None:
    path, body = with_tool(NOWHERE)[name]
    response = post(server, path, body)
    assert response.status_code == 400
    assert "f: n: $ref '#/$defs/x' names no schema" in response.text
    if name == "messages":
        counted = post(server, path + "/count_tokens", {k: body[k] for k in ("messages", "tools")})
        assert counted.status_code == 400 and "names no schema" in counted.text
    if name == "chat":
        assert post(server, path, {**body, "tool_choice": "none"}).status_code == 400


@pytest.mark.parametrize("name", FORMATS)
def test_formats_bind_by_reference_and_refuse_one_that_names_nothing(server: Server, name: str) -> None:
    path, body = with_format(ROOT)[name]
    response = post(server, path, body, '{"n": 20}')
    assert response.status_code == 200, response.text
    assert '{\\"n\\": 20}' in response.text or '"n": 20' in response.text
    path, body = with_format(NOWHERE)[name]
    response = post(server, path, body)
    assert response.status_code == 400
    assert "n: $ref '#/$defs/x' names no schema" in response.text


@pytest.mark.parametrize("name", TOOLS)
def test_what_cannot_be_bound_is_a_note_where_the_schema_binds(
    server: Server, strict: Server, name: str
) -> None:
    path, body = with_tool(LEFT_OUT, True)[name]
    reply = CALL.replace("20", "[2, 2]")
    response = post(server, path, body, reply)
    assert response.status_code == 200, response.text
    assert called(name, response.json()) == [{"n": [2, 2]}]
    forced = name != "ollama"  # which has no choice of tools
    assert ("tools: f: n: uniqueItems (not enforced)" in response.headers.get("x-dflash-notes", "")) == forced
    if name != "functions":
        assert post(strict, path, body).status_code == (400 if forced else 200)
        path, body = with_tool(LEFT_OUT)[name]
        assert "x-dflash-notes" not in post(server, path, body, reply).headers


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_format_cannot_bind_is_a_note(server: Server, strict: Server, name: str) -> None:
    path, body = with_format(LEFT_OUT)[name]
    response = post(server, path, body, '{"n": [2, 2]}')
    assert response.status_code == 200, response.text
    assert "n: uniqueItems (not enforced)" in response.headers["x-dflash-notes"]
    assert post(strict, path, body).status_code == 400
    record = {
        "type": "object",
        "propertyNames": {"type": "string"},
        "additionalProperties": {"type": "integer"},
    }
    path, body = with_format({"type": "object", "properties": {"n": record}})[name]
    response = post(server, path, body, '{"n": {"a": 2}}')
    assert response.status_code == 200 and "x-dflash-notes" not in response.headers


@pytest.mark.parametrize("name", [n for n in TOOLS if n != "ollama"])
def test_a_refused_tool_is_named_with_its_argument(server: Server, name: str) -> None:
    path, body = with_tool(EMPTY, True)[name]
    response = post(server, path, body)
    assert response.status_code == 400
    assert "tools: f: n: Unsatisfiable schema: minimum (5) is greater than maximum (3)" in response.text
    assert "%json" not in response.text and "call_0" not in response.text


@pytest.mark.parametrize("name", FORMATS)
def test_a_refused_format_is_named_with_its_property(server: Server, name: str) -> None:
    path, body = with_format(EMPTY)[name]
    response = post(server, path, body)
    assert response.status_code == 400
    assert ": n: Unsatisfiable schema: minimum (5) is greater than maximum (3)" in response.text


EMPTIES: list[dict[str, Any]] = [
    {"grammar": ""},
    {"grammar": " \n"},
    {"json_schema": ""},
    {"guided_json": ""},
    {"guided_grammar": ""},
    {"guided_regex": ""},
    {"guided_choice": []},
    {"regex": ""},
    {"ebnf": ""},
    {"structured_outputs": {"json": "", "regex": "", "grammar": "", "choice": []}},
    {"grammar": "", "json_schema": "", "guided_json": "", "guided_grammar": "", "regex": "", "ebnf": ""},
]


@pytest.mark.parametrize("fields", EMPTIES, ids=lambda fields: "-".join(fields))
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": ASK, "max_tokens": 20}),
        ("/v1/completions", {"prompt": "hello", "max_tokens": 20}),
        ("/completion", {"prompt": "hello", "n_predict": 20}),
    ],
)
def test_an_empty_constraint_is_none(server: Server, fields: Any, path: str, body: Any) -> None:
    response = post(server, path, {**body, **fields}, "some words")
    assert response.status_code == 200, response.text
    assert "some words" in response.text
    assert "x-dflash-notes" not in response.headers


def test_an_empty_constraint_stands_beside_one_that_is_not(server: Server) -> None:
    body = {"messages": ASK, "max_tokens": 20, "grammar": "", "guided_json": "", "regex": "ab+"}
    response = post(server, "/v1/chat/completions", body, "abb")
    assert response.json()["choices"][0]["message"]["content"] == "abb"
    assert (
        post(server, "/api/chat", {"messages": ASK, "format": "", "stream": False}, "some words")
        .json()["message"]["content"]
        .startswith("some words")
    )
