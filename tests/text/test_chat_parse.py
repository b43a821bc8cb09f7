"""Tests of the streaming parser: reasoning, text, tool calls, stop strings; the same answer for any chunking."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_ggml.session.events import (
    Event,
    ReasoningDelta,
    TextDelta,
    ToolCallArgs,
    ToolCallBegin,
    ToolCallEnd,
)
from dflash_ggml.text.chat_parser import ChatParser, reasoning_at_start
from dflash_ggml.text.schema_reading import ANY
from dflash_ggml.text.stopping import StopStrings
from dflash_ggml.text.tool_schema import ToolSchema

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "units": {"enum": ["c", "f"]},
        "where": {"$ref": "#/$defs/point"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "exact": {"type": "boolean"},
    },
    "$defs": {"point": {"type": "array", "items": {"type": "number"}}},
}
SCHEMAS = {"weather": ToolSchema(WEATHER), "ping": ToolSchema({"type": "object", "properties": {}})}


def parse(pieces: list[str], *, close: bool = True, **options: Any) -> dict[str, Any]:
    """Feed pieces and add the events up."""
    options = {"reasoning": "closed", "schemas": SCHEMAS, "new_id": lambda i, name: f"id{i}"} | options
    parser = ChatParser(**options)
    events: list[Event] = []
    for piece in pieces:
        events += parser.feed(piece)
    if close:
        events += parser.flush()
    calls: list[list[Any]] = []
    for event in events:
        if isinstance(event, ToolCallBegin):
            assert event.index == len(calls)
            calls.append([event.name, "", False])
        elif isinstance(event, ToolCallArgs):
            calls[event.index][1] += event.json
        elif isinstance(event, ToolCallEnd):
            calls[event.index][2] = True
    return {
        "text": "".join(e.text for e in events if isinstance(e, TextDelta)),
        "reasoning": "".join(e.text for e in events if isinstance(e, ReasoningDelta)),
        "calls": calls,
        "stopped": parser.stopped,
    }


XML = (
    '<tool_call>\n<function=weather>\n<parameter=city>\nSão "Paulo"\n</parameter>\n<parameter=days>\n3\n</parameter>\n'
    "<parameter=where>\n[1.5, -2]\n</parameter>\n</function>\n</tool_call>"
)


def test_parameter_form_becomes_typed_json() -> None:
    out = parse([f"Let me look.\n\n{XML}"])
    assert out["text"] == "Let me look."
    (name, arguments, ended) = out["calls"][0]
    assert (name, ended) == ("weather", True)
    assert json.loads(arguments) == {"city": 'São "Paulo"', "days": 3, "where": [1.5, -2]}


def test_several_calls_and_reasoning() -> None:
    text = f"\nhm, {{x}}\n</think>\n\n{XML}\n<tool_call>\n<function=ping>\n</function>\n</tool_call>"
    out = parse([text], reasoning="open")
    assert (out["reasoning"], out["text"]) == ("hm, {x}", "")
    assert [(c[0], c[2]) for c in out["calls"]] == [("weather", True), ("ping", True)]
    assert json.loads(out["calls"][1][1]) == {}


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "weather", "arguments": {"city": "a}]\\"{", "where": [1]}}',
        '{"arguments": {"city": "a}]\\"{", "where": [1]}, "name": "weather"}',
        '{"name": "weather", "arguments": "{\\"city\\": \\"a}]\\\\\\"{\\", \\"where\\": [1]}"}',
    ],
)
def test_json_form(body: str) -> None:
    out = parse([f"<tool_call>\n{body}\n</tool_call>"])
    assert [c[0] for c in out["calls"]] == ["weather"] and out["text"] == ""
    assert json.loads(out["calls"][0][1]) == {"city": 'a}]"{', "where": [1]}


def test_closing_tag_inside_a_json_string() -> None:
    out = parse(list('<tool_call>{"name": "weather", "arguments": {"city": "a</tool_call>b"}}</tool_call>c'))
    assert json.loads(out["calls"][0][1]) == {"city": "a</tool_call>b"} and out["text"] == "c"


def test_forgotten_closing_tags() -> None:
    text = "<tool_call><function=weather><parameter=city>Rome\n<parameter=days>2\n</function></tool_call>"
    assert json.loads(parse([text])["calls"][0][1]) == {"city": "Rome", "days": 2}
    text = "<tool_call><function=weather><parameter=city>Rome</tool_call>"
    assert json.loads(parse([text])["calls"][0][1]) == {"city": "Rome"}


def test_what_is_no_call_stays_text() -> None:
    text = "<tool_call>\nI would call weather\n</tool_call>"
    out = parse([text])
    assert (out["text"], out["calls"]) == (text, [])


def test_output_cut_inside_a_call_is_not_completed() -> None:
    out = parse(["<tool_call>\n<function=weather>\n<parameter=city>\nrm -rf /tmp"])
    assert out["calls"] == [["weather", '{"city": "rm -rf /tmp', True]]
    out = parse(["<tool_call>\n<func"])
    assert (out["text"], out["calls"]) == ("<tool_call>\n<func", [])


def test_tags_stay_in_the_text_by_default() -> None:
    text = f"<think>a</think>\n {XML}"
    assert parse([text], reasoning="off", schemas=None)["text"] == text


def test_whitespace() -> None:
    assert parse(["  two\n\n"])["text"] == "  two\n\n"
    assert parse(["\n\n  x  \n</think>\n\n hi "], reasoning="open") | {"calls": 0} == {
        "text": " hi ",
        "reasoning": "x",
        "calls": 0,
        "stopped": False,
    }


def test_stop_strings_bind_the_visible_text_only() -> None:
    stops = StopStrings(["END"])
    out = parse(["an END in thought</think>\nyes E", "N", "D no"], reasoning="open", stops=stops)
    assert (out["reasoning"], out["text"], out["stopped"]) == ("an END in thought", "yes ", True)
    assert stops.matched == "END"


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_pieces_do_not_matter(data: st.DataObject) -> None:
    text = data.draw(
        st.sampled_from(
            [
                f"a <thi b\n\n{XML}\n\n{XML} tail \n",
                f"thinking\n</think>\n\nanswer STO STOP never{XML}",
                'x<tool_call>{"name": "weather", "arguments": {"city": "<tool\\n"}}</tool_call>y',
                "<tool_call><function=weather><parameter=city>\n\n<b>\n</par\n</parameter></function>",
            ]
        )
    )
    reasoning = "open" if "</think>" in text else "closed"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse([text], reasoning=reasoning, stops=StopStrings(["STOP"]))
    assert parse(pieces, reasoning=reasoning, stops=StopStrings(["STOP"])) == whole
    assert parse(list(text), reasoning=reasoning, stops=StopStrings(["STOP"])) == whole


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet='abc<>/=\n"\\é{}', max_size=60))
def test_any_string_value_survives(value: str) -> None:
    text = (
        f"<tool_call>\n<function=weather>\n<parameter=city>\n{value}\n</parameter>\n</function>\n</tool_call>"
    )
    if any(tag in value for tag in ("</parameter>", "\n<parameter=", "\n</function>", "</tool_call>")):
        return
    out = parse(list(text))
    assert json.loads(out["calls"][0][1]) == {"city": value}


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet='<>/thinkol_ca\nfu=pr mew{"', max_size=80))
def test_no_input_raises_and_all_calls_end(text: str) -> None:
    out = parse(list(text), stops=StopStrings(["ink"]))
    assert all(call[2] for call in out["calls"])


def test_first_state_comes_from_the_prompt() -> None:
    assert reasoning_at_start("<|im_start|>assistant\n<think>\n") == "open"
    assert reasoning_at_start("<|im_start|>assistant\n<think>\n\n</think>\n\n") == "closed"


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("days", "3", 3),
        ("days", "3.0", 3),
        ("days", "three", "three"),
        ("exact", "True", True),
        ("exact", "false", False),
        ("note", "null", None),
        ("note", "3", "3"),
        ("units", "c", "c"),
        ("where", "[1, 2]", [1, 2]),
        ("unheard_of", "3", "3"),
    ],
)
def test_values_follow_the_schema(key: str, text: str, value: Any) -> None:
    assert ToolSchema(WEATHER).value(key, text) == value


def test_endless_references_end() -> None:
    schema = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    assert ToolSchema(schema).typed("a") == ANY
