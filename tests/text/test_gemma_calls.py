"""Tests of Gemma 4's calls and thoughts: parsed whole and in pieces, cut off, forced by a grammar, and as its template renders
them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_ggml.text.call_forms import GEMMA
from dflash_ggml.text.chat_parser import ChatParser, ReasoningMode
from dflash_ggml.text.constraints import chat_constraint
from dflash_ggml.text.deltas import ReasoningDelta, TextDelta, ToolCallArgs, ToolCallBegin
from dflash_ggml.text.grammar import GrammarCompiler
from dflash_ggml.text.template import ChatTemplate, normalise_messages
from dflash_ggml.text.tool_grammar import forced_call_grammar
from dflash_ggml.text.tools import check_tools
from reference.fake_engine import byte_vocabulary
from reference.vendored import vendored

TRIP = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "units": {"enum": ["c", "f"]},
        "note": {"type": ["string", "null"]},
        "stops": {"type": "array", "items": {"type": "string"}},
        "a key: {odd}": {"type": "boolean"},
    },
    "required": ["city"],
    "additionalProperties": False,
}
CODE = {
    "type": "object",
    "properties": {"code": {"type": "string", "pattern": '^[a-z<|>"]+$'}},
    "required": ["code"],
}
NAMED = {"trip": TRIP, "ping": {"type": "object", "properties": {}}, "free": {"type": "object"}, "code": CODE}
TOOLS = [
    {"type": "function", "function": {"name": n, "description": "x", "parameters": s}}
    for n, s in NAMED.items()
]
SCHEMAS = check_tools(TOOLS)
Q = '<|"|>'


def call(name: str, inside: str = "") -> str:
    return f"<|tool_call>call:{name}{{{inside}}}<tool_call|>"


def read(
    pieces: list[str], reasoning: ReasoningMode = "closed", cut: bool = False, tools: bool = True
) -> tuple[str, str, list[list[str]]]:
    """Visible text, reasoning, and calls as names with their arguments' text."""
    parser = ChatParser(reasoning=reasoning, schemas=SCHEMAS if tools else None, form=GEMMA)
    text, thought, calls = "", "", []
    for event in [e for piece in pieces for e in parser.feed(piece)] + parser.flush(cut):
        if isinstance(event, TextDelta):
            text += event.text
        elif isinstance(event, ReasoningDelta):
            thought += event.text
        elif isinstance(event, ToolCallBegin):
            calls.append([event.name, ""])
        elif isinstance(event, ToolCallArgs):
            calls[event.index][1] += event.json
    assert parser.n_calls == len(calls)
    return text, thought, calls


BRACES = 'if (a["b"] < 3) { return \'}\'; } \\n\n<tool_call|> <|x|> <|"|'
# name -> (text, what is visible, reasoning, calls)
CASES: dict[str, tuple[str, str, str, list[tuple[str, Any]]]] = {
    "no call": ("Just <b>text</b>.", "Just <b>text</b>.", "", []),
    "one": (call("trip", f"city:{Q}Rome{Q},days:3"), "", "", [("trip", {"city": "Rome", "days": 3})]),
    "no arguments": (call("ping"), "", "", [("ping", {})]),
    "text before": (f"I look.\n{call('ping')}", "I look.", "", [("ping", {})]),
    "text behind": (f"{call('ping')}\nDone.", "Done.", "", [("ping", {})]),
    "several": (
        call("trip", f"city:{Q}Rome{Q}") + call("ping") + call("trip", f"city:{Q}Oslo{Q}"),
        "",
        "",
        [("trip", {"city": "Rome"}), ("ping", {}), ("trip", {"city": "Oslo"})],
    ),
    "scalars": (
        call("free", "a:true,b:false,c:null,d:None,e:-1.5e-05,f:0,g:True"),
        "",
        "",
        [("free", {"a": True, "b": False, "c": None, "d": None, "e": -1.5e-05, "f": 0, "g": True})],
    ),
    "nested": (
        call("free", f"a:{{b:[1,{{c:{Q}x{Q}}},[]],d:{{}}}},e:[{Q}y{Q},{Q}{Q}],f:2"),
        "",
        "",
        [("free", {"a": {"b": [1, {"c": "x"}, []], "d": {}}, "e": ["y", ""], "f": 2})],
    ),
    "braces, quotes and ends in a string": (
        call("trip", f"city:{Q}{BRACES}{Q},days:1"),
        "",
        "",
        [("trip", {"city": BRACES, "days": 1})],
    ),
    "blanks between": (
        call("free", f' a : 1 ,\n b : [ 1 , {Q}x{Q} ] '),
        "",
        "",
        [("free", {"a": 1, "b": [1, "x"]})],
    ),
    "keys between marks, as JSON, and odd ones": (
        call("free", f'{Q}a{Q}:1,"b":2,c-d e:3,True:4'),
        "",
        "",
        [("free", {"a": 1, "b": 2, "c-d e": 3, "True": 4})],
    ),
    "JSON in its place": (
        call("free", '"a": "x\\n{\\"", "b": ["<", {"c": null}]'),
        "",
        "",
        [("free", {"a": 'x\n{"', "b": ["<", {"c": None}]})],
    ),
    "words without marks": (
        call("trip", "city:New York,days:007,at:12:30"),
        "",
        "",
        [("trip", {"city": "New York", "days": "007", "at": "12:30"})],
    ),
    "an unknown tool": (call("what", "a:1"), "", "", [("what", {"a": 1})]),
    "an object of JSON between the tags": (
        '<|tool_call>{"name": "trip", "arguments": {"city": "x"}}<tool_call|>',
        "",
        "",
        [("trip", {"city": "x"})],
    ),
    "a missing end": (
        call("ping").removesuffix("<tool_call|>") + call("trip", f"city:{Q}x{Q}"),
        "",
        "",
        [("ping", {}), ("trip", {"city": "x"})],
    ),
    "quoted": ("Write <|tool_call>name to call.", "Write <|tool_call>name to call.", "", []),
    "a thought": ("<|channel>thought\nHm.\n<channel|>Yes.", "Yes.", "Hm.", []),
    "an empty thought": ("<|channel>thought\n<channel|>Yes.", "Yes.", "", []),
    "a thought and a call": (
        f"<|channel>thought\nHm, {{a}}.\n<channel|>{call('ping')}",
        "",
        "Hm, {a}.",
        [("ping", {})],
    ),
    "a thought that never ends": ("<|channel>thought\nHm", "", "Hm", []),
    "a thought is what the answer begins with": (
        "It writes <|channel>thought and <channel|>.",
        "It writes <|channel>thought and <channel|>.",
        "",
        [],
    ),
    "a call that ends a thought": (
        f"<|channel>thought\nHm.\n{call('ping')}",
        "",
        "Hm.",
        [("ping", {})],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_calls_and_thoughts_are_read_whole_and_in_any_pieces(name: str) -> None:
    text, expected, thought, calls = CASES[name]
    found = read([text])
    assert (found[0], found[1], [(n, json.loads(a)) for n, a in found[2]]) == (expected, thought, calls)
    assert read(list(text)) == found
    for n in range(len(text)):
        assert read([text[:n], text[n:]]) == found, text[:n]


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_an_answer_that_ends_anywhere_streams_as_it_is_read_whole(name: str, cut: bool) -> None:
    text = CASES[name][0]
    for n in range(len(text)):
        assert read(list(text[:n]), cut=cut) == read([text[:n]], cut=cut), text[:n]


def test_a_call_that_was_cut_keeps_what_there_was() -> None:
    whole = call("trip", f"city:{Q}Rome{Q},days:12")
    for n in range(len("<|tool_call>call:trip{"), len(whole)):
        text, _, ((name, arguments),) = read([whole[:n]], cut=True)
        assert (text, name) == ("", "trip") and '{"city":"Rome","days":12}'.startswith(arguments)
    assert read(["Hm. <|tool_call>call:tri"], cut=True) == ("Hm.", "", [])


def test_strings_stream_while_they_are_written() -> None:
    parser = ChatParser(reasoning="closed", schemas=SCHEMAS, form=GEMMA)
    parser.feed("<|tool_call>call:trip{city:")
    pieces = [parser.feed(piece) for piece in (f"{Q}one ", "two <|", "x<", '|"|>,da')]
    streamed = ["".join(e.json for e in events if isinstance(e, ToolCallArgs)) for events in pieces]
    assert streamed == ['"one ', "two ", "<|x", '",']
    assert parser.in_call


def test_without_tools_or_reasoning_the_tags_are_text() -> None:
    assert read([call("ping")], tools=False) == (call("ping"), "", [])
    thought = CASES["a thought"][0]
    assert read(list(thought), "off") == (thought, "", [])


def test_control_tokens_are_what_tags_begin_with() -> None:
    parser = ChatParser(reasoning="closed", schemas=SCHEMAS, form=GEMMA)
    assert parser.tags == ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", Q)
    parser.mark("<|channel>")
    assert parser.feed("thought\nHm") == [ReasoningDelta("Hm")]


def shown(value: Any) -> str:
    """A value as the template writes it in a call."""
    if isinstance(value, str):
        return f"{Q}{value}{Q}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{shown(v)}" for k, v in value.items()) + "}"
    return f"[{','.join(map(shown, value))}]" if isinstance(value, list) else str(value)


STRINGS = st.text(max_size=8) | st.lists(
    st.sampled_from([*'<|">{}[]:,\\ \n', "<|tool_call>", "<tool_call|>"]), max_size=8
).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | STRINGS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.from_regex(r"[A-Za-z_$][\w.-]{0,6}", fullmatch=True), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(VALUES, st.integers(1, 7))
def test_any_value_survives(value: Any, size: int) -> None:
    if '<|"|' in json.dumps(value).replace('\\"', '"'):
        return
    text = call("free", f"v:{shown(value)},last:1")
    _, _, ((_, arguments),) = read([text[i : i + size] for i in range(0, len(text), size)])
    assert json.loads(arguments) == {"v": value, "last": 1}


FORCED = [
    (f"city:{Q}Rome{Q}", True),
    (f'city:{Q}a}} " < b\n{Q},days:3,units:{Q}c{Q},note:null', True),
    (f'city:{Q}{Q},note:{Q}x{Q},stops:["a","b"],"a key: {{odd}}":true', True),
    ("days:3", False),
    (f"city:{Q}x{Q},", False),
    (f"city:{Q}x{Q},days:{Q}3{Q}", False),
    (f"city:{Q}x{Q},units:{Q}k{Q}", False),
    (f"city:{Q}x{Q},other:1", False),
    (f"days:3,city:{Q}x{Q}", False),
    ("", False),
]


@pytest.mark.parametrize(
    ("name", "inside", "fits"),
    [
        *(("trip", inside, fits) for inside, fits in FORCED),
        ("ping", "", True),
        ("ping", f"more:{Q}x{Q}", False),
        ("free", "", True),
        ("free", f"x:{Q}y{Q}", True),
        ("free", f"x:{Q}y{Q},b_2:{Q}{Q}", True),
        ("code", '"code": "a<|\\"|>"', True),
        ("code", '"code": "A"', False),
        ("none", "", False),
    ],
)
def test_forced_calls_fit_and_are_read_back(name: str, inside: str, fits: bool) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed (extra: grammar)")
    vocabulary = byte_vocabulary()
    matcher = GrammarCompiler(vocabulary, vocabulary.n_vocab).matcher(
        forced_call_grammar(SCHEMAS, "gemma", several=True)
    )
    text = call(name, inside) * 2
    ids = vocabulary.encode(text)
    assert (matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())) == fits
    if fits:
        (one, two) = read(list(text))[2]
        assert one == two and one[0] == name and json.loads(one[1]) is not None


def test_a_strict_tool_binds_behind_its_tag() -> None:
    bound = chat_constraint(SCHEMAS, "auto", "gemma", frozenset(), strict=True)
    assert bound is not None and bound.after == ("<|tool_call>",) and bound.repeat


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(
        vendored("templates/google-gemma-4-31B-it.jinja").read_text(encoding="utf-8"), bos_token="<bos>"
    )


def test_the_template_declares_its_abilities(template: ChatTemplate) -> None:
    assert template.tool_format == "gemma" and template.tags is GEMMA
    assert (
        template.supports_thinking and template.supports_tools and template.end_of_thought == "\n<channel|>"
    )
    ask = normalise_messages([{"role": "user", "content": "x"}])
    assert "<|think|>" in template.render(ask, enable_thinking=True)
    assert template.render(ask, enable_thinking=False).endswith("<|channel>thought\n<channel|>")
    begun = normalise_messages([*ask, {"role": "assistant", "content": "", "reasoning_content": "Hm, so"}])
    text = template.render(begun, continue_final_message=True)
    assert text.endswith("<|turn>model\n<|channel>thought\nHm, so") and "<|think|>" in text


def test_both_templates_show_results_within_the_turn(template: ChatTemplate) -> None:
    """One takes tool messages, the other `tool_responses`: the prompts are the same, but for a line end behind a thought."""
    other = ChatTemplate(
        vendored("templates/google-gemma-4-31B-it-interleaved.jinja").read_text(encoding="utf-8"),
        bos_token="<bos>",
    )
    functions = [{"name": "trip", "arguments": {"city": "Rome"}}, {"name": "ping", "arguments": {}}]
    calls = [{"id": f"c{i}", "function": function} for i, function in enumerate(functions)]
    question = {"role": "user", "content": "x"}
    call = {"role": "assistant", "content": "I look.", "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": f"c{i}", "content": f"result {i}"} for i in (1, 0)]
    again = {"role": "assistant", "content": "", "tool_calls": calls[1:]}
    answered = {"role": "assistant", "content": "So it is."}
    for rows in (
        [question, call, *results],
        [question, call, *results, again, results[0]],
        [question, call, *results, answered, question],
        [question, call, *results, again, results[0], answered, question],
    ):
        mine, its = (
            t.render(normalise_messages(rows), tools=TOOLS, enable_thinking=True) for t in (template, other)
        )
        turns = mine.partition("<|turn>user")[2].replace("\n<channel|>", "<channel|>")
        assert turns == its.partition("<|turn>user")[2]
    going_on = {"tools": TOOLS, "continue_final_message": True}
    text = other.render(normalise_messages([question, call, *results, answered]), **going_on)
    assert text.endswith('response:trip{value:<|"|>result 0<|"|>}<tool_response|>So it is.')
    begun = {"role": "assistant", "content": "", "reasoning_content": "Hm, so"}
    for one in (template, other):
        text = one.render(normalise_messages([question, call, *results, begun]), **going_on)
        assert text.endswith("<tool_response|><|channel>thought\nHm, so")


@settings(max_examples=50, deadline=None)
@given(value=VALUES)
def test_calls_and_results_that_the_template_renders_are_read_back(
    template: ChatTemplate, value: Any
) -> None:
    if '<|"|' in json.dumps(value).replace('\\"', '"'):
        return
    arguments = {"a": 1, "v": value}
    question = {"role": "user", "content": "x"}
    one = {"id": "c1", "function": {"name": "free", "arguments": arguments}}
    call = {"role": "assistant", "content": "I look.", "tool_calls": [one]}
    answered = {"role": "tool", "tool_call_id": "c1", "content": "found"}
    before = template.render(normalise_messages([question]), tools=TOOLS, enable_thinking=True)
    after = template.render(normalise_messages([question, call, answered]), tools=TOOLS, enable_thinking=True)
    assert after.startswith(before)
    result = f"<|tool_response>response:free{{value:{Q}found{Q}}}<tool_response|>"
    assert after.endswith(result)
    text, thought, ((name, read_back),) = read([after[len(before) :].removesuffix(result)])
    assert (text, thought, name) == ("", "I look.", "free") and json.loads(read_back) == arguments
