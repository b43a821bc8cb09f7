"""Tests of tool calls as models emit them and as parsers are known to misread them; the same answer for any chunking."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_ggml.text.chat_parser import ChatParser
from dflash_ggml.text.deltas import ReasoningDelta, TextDelta, ToolCallArgs, ToolCallBegin, ToolCallEnd
from dflash_ggml.text.grammar import GrammarCompiler
from dflash_ggml.text.stopping import StopStrings
from dflash_ggml.text.tool_grammar import forced_call_grammar
from dflash_ggml.text.tool_schema import ToolSchema
from dflash_ggml.text.tools import check_tools
from reference.fake_engine import byte_vocabulary

WRITE = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "content": {"type": "string"}, "append": {"type": "boolean"}},
    "required": ["path", "content"],
}
TRIP = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "budget": {"type": "float"},
        "stops": {"type": "array", "items": {"type": "string"}},
        "options": {"type": "object"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "filter": {"anyOf": [{"type": "object"}, {"type": "null"}]},
        "limit": {"type": "integer", "nullable": True},
        "quiet": {"type": "bool"},
        "anything": {},
    },
}
NAMED = {"write": WRITE, "trip": TRIP, "ping": {"type": "object", "properties": {}}}
SCHEMAS = check_tools(
    [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in NAMED.items()]
)


def call(name: str, *params: tuple[str, str]) -> str:
    """A call in the form that Qwen's templates teach."""
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in params)
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def keyed(name: str, *arguments: tuple[str, str]) -> str:
    """A call in the form that Laguna's templates teach."""
    body = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments)
    return f"<tool_call>{name}\n{body}</tool_call>"


@dataclass
class Read:
    """The result of parsing a text."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    stopped: bool = False

    @property
    def arguments(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def read(pieces: list[str], reasoning: Any = "closed", cut: bool = False, stops: bool = False) -> Read:
    parser = ChatParser(reasoning=reasoning, schemas=SCHEMAS, stops=StopStrings(["STOP"]) if stops else None)
    out, n_ended = Read(), 0
    for event in [e for piece in pieces for e in parser.feed(piece)] + parser.flush(cut):
        if isinstance(event, TextDelta):
            out.text += event.text
        elif isinstance(event, ReasoningDelta):
            out.reasoning += event.text
        elif isinstance(event, ToolCallBegin):
            assert event.index == len(out.calls) == n_ended
            out.calls.append((event.name, ""))
        elif isinstance(event, ToolCallArgs):
            name, arguments = out.calls[event.index]
            out.calls[event.index] = (name, arguments + event.json)
        elif isinstance(event, ToolCallEnd):
            n_ended += 1
    assert n_ended == len(out.calls)
    out.stopped = parser.stopped
    return out


QUOTED = call("write", ("path", "inner.md"), ("content", "x"))
PYTHON = 'def f(a: dict) -> str:\n    if a["b"] < 3 and a["c"] > 4:\n        return "<p class=\\"x\\">"\n\treturn \'\''
HTML = '<!DOCTYPE html>\n<function>\n<param name="a">1</param>\n</function >\n<b>&amp;</b>'
LONE = "Write a line\n<parameter=path>\nand then\n<parameter=append>\nor </function> and </tool_call>, too."

# name -> (text, what is visible, calls)
CASES: dict[str, tuple[str, str, list[tuple[str, Any]]]] = {
    "no call": ("Just an answer.", "Just an answer.", []),
    "one call": (call("trip", ("city", "Rome")), "", [("trip", {"city": "Rome"})]),
    "text before": (f"I look.\n\n{call('ping')}", "I look.", [("ping", {})]),
    "text behind": (f"{call('ping')}\n\nDone.", "Done.", [("ping", {})]),
    "two calls": (
        call("trip", ("city", "Rome")) + "\n" + call("trip", ("city", "Oslo")),
        "",
        [("trip", {"city": "Rome"}), ("trip", {"city": "Oslo"})],
    ),
    "two tools": (call("ping") + call("trip", ("days", "2")), "", [("ping", {}), ("trip", {"days": 2})]),
    "two functions in a block": (
        "<tool_call>\n<function=ping>\n</function>\n<function=trip>\n<parameter=days>\n1\n</parameter>\n</function>\n</tool_call>",
        "",
        [("ping", {}), ("trip", {"days": 1})],
    ),
    "no arguments": ("<tool_call><function=ping></function></tool_call>", "", [("ping", {})]),
    "on one line": (
        "<tool_call><function=trip><parameter=city>Rome</parameter><parameter=days>3</parameter></function></tool_call>",
        "",
        [("trip", {"city": "Rome", "days": 3})],
    ),
    "empty value": (call("trip", ("city", "")), "", [("trip", {"city": ""})]),
    "value of blanks": (call("trip", ("city", "  a \n\n")), "", [("trip", {"city": "  a \n\n"})]),
    "value of lines": (call("write", ("content", "a\n\nb\n")), "", [("write", {"content": "a\n\nb\n"})]),
    "code": (call("write", ("content", PYTHON)), "", [("write", {"content": PYTHON})]),
    "xml": (call("write", ("content", HTML)), "", [("write", {"content": HTML})]),
    "json in a string": (
        call("write", ("content", '{"a": [1, "x"]}')),
        "",
        [("write", {"content": '{"a": [1, "x"]}'})],
    ),
    "number in a string": (call("trip", ("city", "007")), "", [("trip", {"city": "007"})]),
    "true in a string": (call("trip", ("city", "true")), "", [("trip", {"city": "true"})]),
    "null in a string": (call("trip", ("city", "null")), "", [("trip", {"city": "null"})]),
    "quotes and backslashes": (
        call("trip", ("city", '\\"a\\\\"\t/')),
        "",
        [("trip", {"city": '\\"a\\\\"\t/'})],
    ),
    "unicode": (
        call("trip", ("city", "São 東京 🎈\u2028\u200d")),
        "",
        [("trip", {"city": "São 東京 🎈\u2028\u200d"})],
    ),
    "integer": (call("trip", ("days", "-12")), "", [("trip", {"days": -12})]),
    "the type float": (call("trip", ("budget", "1.50")), "", [("trip", {"budget": 1.5})]),
    "a float without digits behind": (call("trip", ("budget", "2.")), "", [("trip", {"budget": 2.0})]),
    "no number": (call("trip", ("budget", "NaN")), "", [("trip", {"budget": "NaN"})]),
    "a number too large": (call("trip", ("budget", "1e999")), "", [("trip", {"budget": "1e999"})]),
    "words of python": (
        call("trip", ("quiet", "True"), ("limit", "None")),
        "",
        [("trip", {"quiet": True, "limit": None})],
    ),
    "array": (call("trip", ("stops", '["a",\n "b"]')), "", [("trip", {"stops": ["a", "b"]})]),
    "object": (call("trip", ("options", '{"a": {"b": [1]}}')), "", [("trip", {"options": {"a": {"b": [1]}}})]),
    "object of python": (
        call("trip", ("options", "{'a': True, 'b': [None, \"it's\"], 'c': 'say \"x\"'}")),
        "",
        [("trip", {"options": {"a": True, "b": [None, "it's"], "c": 'say "x"'}})],
    ),
    "object encoded twice": (
        call("trip", ("options", '"{\\"a\\": 1}"')),
        "",
        [("trip", {"options": {"a": 1}})],
    ),
    "object that is none": (call("trip", ("options", "{a: 1")), "", [("trip", {"options": "{a: 1"})]),
    "anyOf null": (call("trip", ("note", "null")), "", [("trip", {"note": None})]),
    "anyOf string": (call("trip", ("note", "12")), "", [("trip", {"note": "12"})]),
    "anyOf object": (call("trip", ("filter", '{"a": 1}')), "", [("trip", {"filter": {"a": 1}})]),
    "no type": (call("trip", ("anything", "[1]")), "", [("trip", {"anything": "[1]"})]),
    "undeclared parameter": (call("trip", ("pace", "5")), "", [("trip", {"pace": "5"})]),
    "unknown tool": (call("fly", ("to", "Rome")), "", [("fly", {"to": "Rome"})]),
    "lone tags in a value": (
        call("write", ("path", "real.md"), ("content", LONE)),
        "",
        [("write", {"path": "real.md", "content": LONE})],
    ),
    "lone tags before the real parameter": (
        call("write", ("content", LONE), ("path", "real.md")),
        "",
        [("write", {"content": LONE, "path": "real.md"})],
    ),
    "a closing tag in a value": (
        call("write", ("content", "a </parameter> b\n</parameter>\nc"), ("path", "p")),
        "",
        [("write", {"content": "a </parameter> b\n</parameter>\nc", "path": "p"})],
    ),
    "a value that ends with a closing tag": (
        call("write", ("content", "see </parameter>"), ("path", "p")),
        "",
        [("write", {"content": "see </parameter>", "path": "p"})],
    ),
    "a quoted call in a value": (
        call("write", ("path", "doc.md"), ("content", f"Do:\n{QUOTED}\nand go on.")),
        "",
        [("write", {"path": "doc.md", "content": f"Do:\n{QUOTED}\nand go on."})],
    ),
    "half of a quoted call in a value": (
        call("write", ("content", "Begin with\n<function=write>\n<parameter=path>\n..."), ("path", "p")) + "\n" + QUOTED,
        "",
        [
            ("write", {"content": "Begin with\n<function=write>\n<parameter=path>\n...", "path": "p"}),
            ("write", {"path": "inner.md", "content": "x"}),
        ],
    ),
    "a parameter given twice": (
        call("write", ("path", "first"), ("path", "second"), ("content", "c")),
        "",
        [("write", {"path": "first", "content": "c"})],
    ),
    "forgotten: the end of a parameter": (
        "<tool_call>\n<function=write>\n<parameter=path>\na.md\n<parameter=content>\nb\n</parameter>\n"
        "<parameter=append>\ntrue\n</parameter>\n</function>\n</tool_call>",
        "",
        [("write", {"path": "a.md", "content": "b", "append": True})],
    ),
    "forgotten: the end of the last parameter": (
        "<tool_call>\n<function=trip>\n<parameter=city>\nRome\n</function>\n</tool_call>",
        "",
        [("trip", {"city": "Rome"})],
    ),
    "forgotten: the end of a function": (
        "<tool_call>\n<function=trip>\n<parameter=city>\nRome\n</parameter>\n</tool_call>\n" + call("ping"),
        "",
        [("trip", {"city": "Rome"}), ("ping", {})],
    ),
    "forgotten: the end of the call": (
        "<tool_call>\n<function=trip>\n<parameter=city>\nRome\n</parameter>\n</function>",
        "",
        [("trip", {"city": "Rome"})],
    ),
    "forgotten: all behind the value": (
        "<tool_call>\n<function=trip>\n<parameter=city>\nRome\n</parameter>",
        "",
        [("trip", {"city": "Rome"})],
    ),
    "without the call's tags": (
        "Now.\n<function=trip>\n<parameter=city>\nRome\n</parameter>\n</function>",
        "Now.",
        [("trip", {"city": "Rome"})],
    ),
    "without the call's first tag": (
        "<function=ping>\n</function>\n</tool_call>\nDone",
        "Done",
        [("ping", {})],
    ),
    "a function's tag in prose": ("Write <function=trip> first.", "Write <function=trip> first.", []),
    "a function nobody has": (
        "<function=fly>\n<parameter=to>\nRome\n</parameter>\n</function>",
        "<function=fly>\n<parameter=to>\nRome\n</parameter>\n</function>",
        [],
    ),
    "a call's tag in prose": ("Use `<tool_call>` here.", "Use `<tool_call>` here.", []),
    "a call's tag in prose before a call": (
        f"I use <tool_call>: {call('ping')}",
        "I use <tool_call>:",
        [("ping", {})],
    ),
    "a block that holds no call": (
        "<tool_call>\nping it\n</tool_call> ",
        "<tool_call>\nping it\n</tool_call> ",
        [],
    ),
    "json": (
        '<tool_call>\n{"name": "trip", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>',
        "",
        [("trip", {"city": "Rome", "days": 3})],
    ),
    "json, two calls": (
        '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>\n' * 2,
        "",
        [("ping", {}), ("ping", {})],
    ),
    "json, arguments first": (
        '<tool_call>{"arguments": {"city": "</tool_call>"}, "name": "trip"}</tool_call>.',
        ".",
        [("trip", {"city": "</tool_call>"})],
    ),
    "json, more keys": (
        '<tool_call>{"name": "ping", "arguments": {}, "id": "}</tool_call>"}</tool_call>',
        "",
        [("ping", {})],
    ),
    "json, arguments as text": (
        '<tool_call>{"name": "trip", "arguments": "{\\"days\\": 3}"}</tool_call>',
        "",
        [("trip", {"days": 3})],
    ),
    "json, arguments as text twice": (
        '<tool_call>{"name": "trip", "arguments": "\\"{\\\\\\"days\\\\\\": 3}\\""}</tool_call>',
        "",
        [("trip", {"days": 3})],
    ),
    "json, no arguments": ('<tool_call>{"name": "ping"}</tool_call>', "", [("ping", {})]),
    "json, a list of calls": (
        '<tool_call>[{"name": "ping", "arguments": {}}, {"name": "trip", "parameters": {"days": 1}}]</tool_call>',
        "",
        [("ping", {}), ("trip", {"days": 1})],
    ),
    "json in the shape of an API": (
        '<tool_call>{"type": "function", "function": {"name": "trip", "arguments": "{\\"days\\": 1}"}}</tool_call>',
        "",
        [("trip", {"days": 1})],
    ),
    "json with line ends in a string": (
        '<tool_call>{"name": "write", "arguments": {"content": "a\nb"}}</tool_call>',
        "",
        [("write", {"content": "a\nb"})],
    ),
    "json without tags": (
        ' {"name": "trip", "arguments": {"city": "Rome"}}',
        "",
        [("trip", {"city": "Rome"})],
    ),
    "json that is an answer": ('{"name": "Rome", "days": 3}', '{"name": "Rome", "days": 3}', []),
    "json that is broken": ("<tool_call>{'name' 'ping'}</tool_call>", "<tool_call>{'name' 'ping'}</tool_call>", []),
    "object of python as a call": (
        "<tool_call>\n{'name': 'trip', 'arguments': {'quiet': True, 'note': None, 'city': \"L'Aquila\"}}\n</tool_call>",
        "",
        [("trip", {"quiet": True, "note": None, "city": "L'Aquila"})],
    ),
    "python behind a head of json": (
        '<tool_call>{"name": "trip", "arguments": {\'quiet\': False, \'city\': \'\\xe9\'}}</tool_call>',
        "",
        [("trip", {"quiet": False, "city": "é"})],
    ),
    "json inside a function": (
        '<function=trip>{"city": "Rome"}</function>',
        "",
        [("trip", {"city": "Rome"})],
    ),
    "an end of thinking in the answer": ("Write </think> last.", "Write </think> last.", []),
    "a beginning of thinking in the answer": ("It starts with <think>.", "It starts with <think>.", []),
    "an end of thinking in a value": (
        call("write", ("content", "<think>a</think>")),
        "",
        [("write", {"content": "<think>a</think>"})],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_cases(name: str) -> None:
    text, visible, calls = CASES[name]
    whole = read([text])
    assert (whole.text, whole.reasoning, whole.arguments) == (visible, "", calls)
    assert read(list(text)) == whole
    thought = read(list(f"Hm.\n</think>\n\n{text}"), reasoning="open")
    assert (thought.reasoning, thought.arguments) == ("Hm.", calls)
    assert thought.text.strip() == visible.strip()


def test_there_are_cases_enough() -> None:
    assert len(CASES) >= 45


@pytest.mark.parametrize(
    ("text", "reasoning", "visible", "n_calls"),
    [
        ("I write <tool_call> first</think>\n\nNo.", "I write <tool_call> first", "No.", 0),
        (f"As in {QUOTED} then</think>Yes", f"As in {QUOTED} then", "Yes", 0),
        (f"As in {QUOTED}</think>{call('ping')}", f"As in {QUOTED}", "", 1),
        (
            f"I call.\n{call('ping')}\n{call('ping')}\n",
            "I call.",
            "",
            2,
        ),  # never ended, and the output ends here
        (f"As in {QUOTED} but then", f"As in {QUOTED} but then", "", 0),
        ("a <tool_call>\n<function=ping>", "a <tool_call>\n<function=ping>", "", 0),
        ("a</think>b</think>c", "a", "b</think>c", 0),
        ("only thoughts", "only thoughts", "", 0),
    ],
)
def test_reasoning(text: str, reasoning: str, visible: str, n_calls: int) -> None:
    """Nothing quoted ends it; a model that calls without ending it is understood."""
    whole = read([text], reasoning="open")
    assert (whole.reasoning, whole.text, len(whole.calls)) == (reasoning, visible, n_calls)
    assert read(list(text), reasoning="open") == whole


def test_reasoning_that_the_model_opens() -> None:
    out = read(list("\n<think>\nwhy <think></think>\n\nanswer <think>b</think>"))
    assert (out.reasoning, out.text) == ("why <think>", "answer <think>b</think>")


@pytest.mark.parametrize(
    "schema",
    [{"required": True}, {"required": [["a"]], "properties": ["a"]}, {"properties": {"a": 1}, "type": 3}],
)
def test_an_invalid_schema_breaks_no_call(schema: dict[str, Any]) -> None:
    parser = ChatParser(reasoning="closed", schemas={"odd": ToolSchema(schema)})
    events = parser.feed(call("odd", ("a", "x\n<parameter=b>\ny"))) + parser.flush()
    arguments = "".join(e.json for e in events if isinstance(e, ToolCallArgs))
    assert json.loads(arguments) == {"a": "x\n<parameter=b>\ny"}


@pytest.mark.parametrize("cut", [False, True])
def test_a_cut_call_keeps_what_there_was(cut: bool) -> None:
    """Every beginning of a call gives a beginning of its arguments, and no complete object before the call has ended."""
    text = call("write", ("path", "a.md"), ("content", f"one\n{LONE}\n{QUOTED}\ntwo"))
    (whole,) = read([text]).calls
    end = text.rindex("\n</parameter>")
    for n in range(end):
        out = read([text[:n]], cut=True)
        for name, arguments in out.calls:
            assert name == whole[0] and whole[1].startswith(arguments) and arguments != whole[1]
        assert not out.calls or out.text == ""
    out = read([text[: end - 1]], cut=cut)
    assert out.calls[0][1].endswith("\\ntw")
    closed = read([text[: end + len("\n</parameter>")]], cut=cut)
    assert closed.calls[0][1] == (whole[1][:-1] if cut else whole[1])


@pytest.mark.parametrize(
    "second",
    [
        call("ping"),
        '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>',
        "<function=ping>\n</function>",
    ],
)
def test_markup_that_a_limit_cut_is_no_text(second: str) -> None:
    """Neither the head of a call nor its closing tags, wherever the limit falls behind the first characters of a tag."""
    first = call("trip", ("days", "2"))
    text = f"I look.\n\n{first}\n{second}"
    for n in range(len("I look.\n\n<tool"), len(text)):
        out = read([text[:n]], cut=True)
        assert out.text.rstrip() == "I look.", text[:n]
    assert read([first + "\nif a <"], cut=True).text == "if a <"
    assert read(["<tool_call>\n<function=ping>"], cut=True).calls == [("ping", "")]
    for kept in (
        "a </tab",
        "a <t",
        '{"name": "trip", "argu',
        "<tool_box",
        "<tool_call> is a tag",
        "<functions",
    ):
        assert read([kept], cut=True).text == kept


# name -> (value of `content`, what follows it, the arguments behind that value)
KEPT_BY_A_CUT: dict[str, tuple[str, str, str]] = {
    # the value streams up to its first tag and waits for the call's end: `path` is required and may be inside it
    "in the next tag": ("a\n<parameter=path>\nb", "\n</parameter>\n<parameter=pa", ""),
    # not a character of it was sent before the tag
    "in the next tag, a tag first": ("\n<parameter=path>\n", "\n</parameter>\n<parameter=", ""),
    # a quoted call has a line of `path`, too: the value waits from the call's first tag on
    "a quoted call first": (f"{QUOTED}</tool_call><tool_call>", "\n</parameter>\n<parameter=path", ""),
    "a quoted function": (
        "m<function=e>\n<parameter=path></parameter></function>",
        "</parameter><parameter=",
        "",
    ),
    # behind the value of `path` the call is still open
    "behind another value": (
        "a\n<parameter=path>\nb",
        "\n</parameter>\n<parameter=path>\np\n</parameter>\n</func",
        ', "path": "p"',
    ),
    # values that are no text wait with it, in their order
    "behind a value of another type": (
        "a\n<parameter=path>\nb",
        "\n</parameter>\n<parameter=append>\nTrue\n</parameter>\n",
        ', "append": true',
    ),
    # the first one counts
    "behind the same parameter": (
        "a\n<parameter=path>\nb",
        "\n</parameter>\n<parameter=content>\nc\n</parameter>\n",
        "",
    ),
    # nothing comes behind it: the tag may still turn out to be part of the value
    "right behind the value": ("a\n<parameter=path>\nb", "\n</parameter>", ""),
    # the limit falls into a value: the one before it is complete
    "in another value": (
        "a\n<parameter=path>\nb",
        "\n</parameter>\n<parameter=path>\np\n</para",
        ', "path": "p',
    ),
}


@pytest.mark.parametrize("name", KEPT_BY_A_CUT)
def test_a_value_that_waits_for_the_calls_end_is_kept_by_a_cut(name: str) -> None:
    """However much of it was sent before the limit came, the answer has it in full."""
    value, behind, more = KEPT_BY_A_CUT[name]
    text = f"<tool_call>\n<function=write>\n<parameter=content>\n{value}{behind}"
    kept = [("write", f'{{"content": {json.dumps(value)}{more}')]
    assert read([text], cut=True).calls == kept
    assert read(list(text), cut=True).calls == kept
    for n in range(len(text)):
        assert read([text[:n], text[n:]], cut=True).calls == kept, n


@pytest.mark.parametrize("name", [n for n in CASES if n.startswith(("lone", "forgotten", "half", "a "))])
@pytest.mark.parametrize("cut", [False, True])
def test_cases_that_end_anywhere_stream_as_they_are_read_whole(name: str, cut: bool) -> None:
    text = CASES[name][0]
    for n in range(len(text)):
        assert read(list(text[:n]), cut=cut) == read([text[:n]], cut=cut), text[:n]


def test_a_string_streams_while_it_is_written() -> None:
    parser = ChatParser(reasoning="closed", schemas=SCHEMAS)
    events = parser.feed("<tool_call>\n<function=write>\n<parameter=content>\nA long text, line")
    assert "".join(e.json for e in events if isinstance(e, ToolCallArgs)) == '{"content": "A long text, line'
    assert parser.in_call and parser.n_calls == 0
    parser.feed(" ends\n</parameter>\n</function>\n</tool_call>")
    assert not parser.in_call and parser.n_calls == 1


FRAGMENTS = (
    "<tool_call>", "</tool_call>", "<function=trip>", "<function=ping>", "<function=fly>", "</function>",
    "<parameter=city>", "<parameter=days>", "<parameter=content>", "</parameter>", "<think>", "</think>", "\n", "\n\n",
    " ", "text", "STOP", "STO", "<", "</", "<tool_", "<func", "</para", "<parameter=", "é🎈", "{", "}", '"', "'", "\\",
    '{"name": "trip", "arguments": ', '{"city": "x"}}', "{'name': 'ping'}", "[1]", "3", "True", QUOTED, call("ping"),
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_streaming_is_parsing_whole(data: st.DataObject) -> None:
    """Over texts of markers and parts of markers, inside a call and outside, cut anywhere."""
    text = "".join(data.draw(st.lists(st.sampled_from(FRAGMENTS), max_size=12)))
    if data.draw(st.booleans()):
        text = call("write", ("content", text), ("path", "p"))[: data.draw(st.integers(0, 400))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    options = {
        "reasoning": data.draw(st.sampled_from(["open", "closed", "off"])),
        "cut": data.draw(st.booleans()),
        "stops": data.draw(st.booleans()),
    }
    whole = read([text], **options)
    assert read(pieces, **options) == whole
    assert read(list(text), **options) == whole


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=10).map("".join))
def test_any_value_survives_that_does_not_end_itself(value: str) -> None:
    """Parameters and a complete call around it: the value comes back, letter by letter."""
    ends = re.search(r"</parameter>\s*(<parameter=|</function>|</tool_call>)", value.replace(QUOTED, ""))
    if ends or "<function=" in value.replace(QUOTED, "").replace(call("ping"), ""):
        return
    text = call("write", ("path", "p"), ("content", value))
    assert read(list(text)).arguments == [("write", {"path": "p", "content": value})]


KEYED: dict[str, tuple[str, str, list[tuple[str, Any]]]] = {
    "one": (
        f"Hm.\n{keyed('write', ('path', 'a'), ('content', 'b'))}",
        "Hm.",
        [("write", {"path": "a", "content": "b"})],
    ),
    "without line ends": (
        "<tool_call>trip<arg_key>city</arg_key><arg_value>Bonn</arg_value><arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
        "",
        [("trip", {"city": "Bonn", "days": 3})],
    ),
    "no arguments": ("<tool_call>ping\n\n</tool_call>", "", [("ping", {})]),
    "two": (
        keyed("ping") + "\n" + keyed("write", ("path", "x")),
        "",
        [("ping", {}), ("write", {"path": "x"})],
    ),
    "an unknown tool": (keyed("dig", ("depth", "3")), "", [("dig", {"depth": "3"})]),
    "tags inside a value": (
        keyed(
            "write", ("content", "<arg_key>k</arg_key>\n</arg_value> and <b> </tool_call> on"), ("path", "p")
        ),
        "",
        [("write", {"content": "<arg_key>k</arg_key>\n</arg_value> and <b> </tool_call> on", "path": "p"})],
    ),
    "lines and blanks of a value": (
        keyed("write", ("content", "\n  a\n\n")),
        "",
        [("write", {"content": "\n  a\n\n"})],
    ),
    "a forgotten end": (
        "<tool_call>write<arg_key>path</arg_key><arg_value>p</tool_call>",
        "",
        [("write", {"path": "p"})],
    ),
    "quoted": ("Write <tool_call>name to call.", "Write <tool_call>name to call.", []),
    "a tool that nobody knows": ("<tool_call>what</tool_call>", "<tool_call>what</tool_call>", []),
}


@pytest.mark.parametrize("name", KEYED)
def test_calls_of_keys_and_values(name: str) -> None:
    text, expected, arguments = KEYED[name]
    for pieces in ([text], list(text), [text[i : i + 3] for i in range(0, len(text), 3)]):
        found = read(pieces)
        assert (found.text, found.arguments) == (expected, arguments)


def test_values_of_keys_stream() -> None:
    parser = ChatParser(reasoning="closed", schemas=SCHEMAS)
    parser.feed("<tool_call>write\n<arg_key>content</arg_key>\n<arg_value>")
    streamed = [
        [e.json for e in parser.feed(piece) if isinstance(e, ToolCallArgs)]
        for piece in ("one ", "two </arg_", "x")
    ]
    assert streamed == [['"', "one "], ["two "], ["</arg_x"]]


@pytest.mark.parametrize("cut", [False, True])
def test_a_cut_call_of_keys_keeps_what_there_was(cut: bool) -> None:
    whole = keyed("write", ("path", "a"), ("content", "b"))
    for end in range(whole.index("<arg_key>") + len("<arg_key>"), len(whole)):
        found = read([whole[:end]], cut=cut)
        assert len(found.calls) == 1 and found.text == ""
        assert (
            '{"path": "a", "content": "b"}'.startswith(found.calls[0][1].rstrip("}"))
            or found.calls[0][1] == "{}"
        )


@given(
    st.lists(st.sampled_from([*"ab<>/_ \n", "<arg_key>", "</arg_value>", "</tool_call>"]), max_size=20).map(
        "".join
    )
)
def test_any_value_of_a_key_survives(value: str) -> None:
    if not re.search(r"</arg_value>\s*(<arg_key>|</tool_call>)", value):
        text = keyed("write", ("content", value), ("path", "p"))
        assert read(list(text)).arguments == [("write", {"content": value, "path": "p"})]


@pytest.mark.parametrize("form", ["xml", "json", "keys"])
def test_what_a_forced_call_may_write_is_read_back(form: Any) -> None:
    """Whatever the grammar of forced calls lets through is a call to the parser, with the value that was written."""
    pytest.importorskip("llguidance", reason="llguidance is not installed (extra: grammar)")
    vocabulary = byte_vocabulary()
    compiler = GrammarCompiler(vocabulary, vocabulary.n_vocab)
    schemas = {"write": SCHEMAS["write"]}
    matcher = compiler.matcher(forced_call_grammar(schemas, form, several=True))
    n_accepted = 0

    def is_allowed(text: str) -> bool:
        matcher.reset()
        ids = vocabulary.encode(text)
        return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())

    @settings(max_examples=150, deadline=None)
    @given(st.lists(st.sampled_from((*FRAGMENTS, "</p", "<b>\n")), max_size=5).map("".join))
    def check(value: str) -> None:
        nonlocal n_accepted
        arguments = {"path": "p", "content": value}
        if form == "xml":
            text = call("write", *arguments.items())
        elif form == "keys":
            text = keyed("write", *arguments.items())
        else:
            text = f"<tool_call>\n{json.dumps({'name': 'write', 'arguments': arguments})}\n</tool_call>"
        if is_allowed(f"{text}\n{text}"):
            n_accepted += 1
            assert read(list(f"{text}\n{text}")).arguments == [("write", arguments)] * 2

    check()
    assert n_accepted > 20


@pytest.mark.parametrize("piece", ["</para<", "<function=", "</parameter>\n", "\n<parameter=path>", "<b>\n"])
def test_a_long_value_of_half_markers(piece: str) -> None:
    value = piece * 4000 + "end"
    text = call("write", ("path", "p"), ("content", value))
    pieces = [text[i : i + 4] for i in range(0, len(text), 4)]
    assert read(pieces).arguments == [("write", {"path": "p", "content": value})]


@pytest.mark.parametrize("text", ['<tool_call>{"x": "' + "</tool_call>" * 4000, "<tool_call>{" * 4000])
def test_a_long_object_without_an_end_is_text(text: str) -> None:
    assert read([text[i : i + 4] for i in range(0, len(text), 4)]).text == text


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("city", '{"a": 1}', '{"a": 1}'),
        ("days", "3.0", 3),
        ("days", "+3", 3),
        ("days", "9" * 5000, "9" * 5000),
        ("days", "true", "true"),
        ("quiet", "FALSE", False),
        ("quiet", "yes", "yes"),
        ("limit", "null", None),
        ("limit", "7", 7),
        ("stops", "['a', 'b']", ["a", "b"]),
        ("stops", '"[\\"a\\"]"', ["a"]),
        ("stops", "[" * 100_000, "[" * 100_000),
        ("options", "{'a': (1, 2)}", "{'a': (1, 2)}"),
        ("filter", "none", None),
        ("filter", "1", "1"),
    ],
)
def test_values_follow_the_schema(key: str, text: str, value: Any) -> None:
    assert SCHEMAS["trip"].value(key, text) == value
