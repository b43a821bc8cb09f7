"""Tests of harmony, the format of gpt-oss: parsed and rendered as by OpenAI's own package, token by token. 15 seconds."""

from __future__ import annotations

import json
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_real_templates import CONVERSATIONS, OPTIONS

from dflash_ggml.errors import ConfigError
from dflash_ggml.text.constraints import special_tags
from dflash_ggml.text.deltas import ReasoningDelta, TextDelta, ToolCallArgs, ToolCallBegin, ToolCallEnd
from dflash_ggml.text.grammar import GrammarCompiler
from dflash_ggml.text.harmony import HarmonyParser, prepared, reasoning_at_start
from dflash_ggml.text.stopping import StopStrings
from dflash_ggml.text.template import ChatTemplate, normalise_messages
from dflash_ggml.text.tool_grammar import harmony_grammar
from dflash_ggml.text.tool_schema import ToolSchema
from reference import o200k
from reference.vendored import vendored

harmony = pytest.importorskip("openai_harmony", reason="openai-harmony is not installed (extra: test)")

NAME = "openai-gpt-oss-120b"
SCHEMAS = {"weather": ToolSchema({"type": "object", "properties": {"city": {"type": "string"}}})}
OPEN = "<|start|>user<|message|>Hi<|end|><|start|>assistant"


@pytest.fixture(scope="module")
def encoding(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return o200k.encoding(tmp_path_factory.mktemp("o200k"))


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(vendored(f"templates/{NAME}.jinja").read_text(encoding="utf-8"))


def parse(tokens: list[int], prompt: str = OPEN, cut: bool = False, **options: Any) -> dict[str, Any]:
    """Feed tokens as a session does, and add the events up."""
    options = {"split": True, "schemas": SCHEMAS, "new_id": lambda i, name: f"id{i}"} | options
    vocabulary, parser, events = o200k.tokenizer(), HarmonyParser(prompt, **options), []
    decoder = vocabulary.stream()
    for token in tokens:
        tag = vocabulary.tokens[token]
        if tag in parser.tags:
            events += parser.feed(decoder.flush()) + parser.mark(tag)
        else:
            events += parser.feed(decoder.feed([token]))
    events += parser.feed(decoder.flush()) + parser.flush(cut)
    found: dict[str, Any] = {"text": "", "reasoning": "", "calls": []}
    for event in events:
        if isinstance(event, ToolCallBegin):
            assert event.index == len(found["calls"]) and event.id == f"id{event.index}"
            found["calls"].append([event.name, "", False])
        elif isinstance(event, ToolCallArgs):
            found["calls"][event.index][1] += event.json
        elif isinstance(event, ToolCallEnd):
            found["calls"][event.index][2] = True
        elif isinstance(event, TextDelta):
            found["text"] += event.text
        elif isinstance(event, ReasoningDelta):
            found["reasoning"] += event.text
    found["stopped"] = parser.stopped
    return found


def parsed(text: str, prompt: str = OPEN, cut: bool = False, **options: Any) -> dict[str, Any]:
    return parse(o200k.tokenizer().encode(text), prompt, cut, **options)


def expected(encoding: Any, tokens: list[int]) -> dict[str, Any]:
    """What OpenAI's parser makes of a turn, each kind of message joined as paragraphs."""
    parser = harmony.StreamableParser(encoding, harmony.Role.ASSISTANT)
    for token in tokens:
        parser.process(token)
    parts: dict[str, list[str]] = {"text": [], "reasoning": []}
    calls = []
    for message in parser.messages:
        words = "".join(content.text for content in message.content)
        if message.recipient:
            calls.append([message.recipient.removeprefix("functions."), words, True])
        else:
            parts["reasoning" if message.channel == "analysis" else "text"].append(words)
    return {"calls": calls, **{kind: "\n\n".join(texts) for kind, texts in parts.items()}}


WORDS = st.text(st.characters(exclude_categories=("Cs", "Cc")) | st.just("\n"), max_size=40).map(
    lambda text: f"a{text}z"  # blanks around a message are left out here, and kept there
)
ARGUMENTS = st.dictionaries(st.text(max_size=8), st.text(max_size=20) | st.integers() | st.none(), max_size=3)
MESSAGES = st.one_of(
    st.tuples(st.just("analysis"), st.none(), WORDS),
    st.tuples(st.just("commentary"), st.none(), WORDS),
    st.tuples(st.just("commentary"), st.sampled_from(["weather", "ping"]), ARGUMENTS.map(json.dumps)),
    st.tuples(st.just("final"), st.none(), WORDS),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(messages=st.lists(MESSAGES, min_size=1, max_size=5))
def test_turns_are_read_as_openai_reads_them(
    encoding: Any, messages: list[tuple[str, str | None, str]]
) -> None:
    """Written by its own package, whatever the channels, to the tools or to the user."""
    made = []
    for channel, tool, words in messages:
        message = harmony.Message.from_role_and_content(harmony.Role.ASSISTANT, words).with_channel(channel)
        if tool:
            message = message.with_recipient(f"functions.{tool}").with_content_type("<|constrain|>json")
        made.append(message)
    tokens = encoding.render_conversation(harmony.Conversation.from_messages(made))
    opening = encoding.encode("<|start|>assistant", allowed_special="all")
    if tokens[: len(opening)] == opening:
        tokens = tokens[len(opening) :]
    found, wanted = parse(tokens), expected(encoding, tokens)
    assert {kind: found[kind] for kind in wanted} == wanted


@pytest.mark.parametrize(
    "head",
    [
        "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.weather json<|message|>",
        " to=functions.weather<|channel|>commentary json<|message|>",
        " to=functions.weather<|channel|>commentary<|message|>",
        "<|channel|>analysis to=functions.weather code<|message|>",
        "<|channel|>commentary to=weather<|message|>",
    ],
)
@pytest.mark.parametrize(
    "end", ["<|call|>", "", "<|end|><|start|>assistant<|channel|>final<|message|>ok<|return|>"]
)
def test_heads_of_calls(head: str, end: str) -> None:
    found = parsed(
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" + head + '{"city": "Rome"}' + end
    )
    assert found["calls"] == [["weather", '{"city": "Rome"}', True]]
    assert (found["reasoning"], found["text"]) == ("Hm.", "ok" if "ok" in end else "")


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("{'city': True}", '{"city": true}'),
        ('"{\\"city\\": 1}"', '{"city": 1}'),
        ("print(1)", '{"input": "print(1)"}'),
        ("", "{}"),
        ('  {"a": "<|end|>"} ', '{"a": "<|end|>"}'),
    ],
)
def test_arguments_become_an_object(written: str, arguments: str) -> None:
    vocabulary = o200k.tokenizer()
    head = vocabulary.encode("<|channel|>commentary to=functions.weather<|message|>")
    found = parse([*head, *vocabulary.encode(written, special=False)])
    assert found["calls"] == [["weather", arguments, True]]


def test_names_of_marks_in_a_text_are_text() -> None:
    vocabulary = o200k.tokenizer()
    words = "<|end|> ends, <|channel|>analysis<|message|> does not begin"
    tokens = vocabulary.encode("<|channel|>final<|message|>") + vocabulary.encode(words, special=False)
    assert parse(tokens)["text"] == words


def test_an_answer_that_was_cut() -> None:
    thought = "<|channel|>analysis<|message|>Hm"
    assert parsed(thought, cut=True)["reasoning"] == "Hm"
    for head in (
        "<|channel|>",
        "<|channel|>comm",
        " to=functions.wea",
        "<|channel|>commentary to=functions.w",
    ):
        found = parsed(thought + "<|end|><|start|>assistant" + head, cut=True)
        assert (found["text"], found["calls"]) == ("", [])
    found = parsed('<|channel|>commentary to=functions.weather<|message|>{"city": "Ro', cut=True)
    assert found["calls"] == [["weather", '{"city": "Ro', True]]


def test_a_model_that_does_not_keep_to_the_form() -> None:
    assert parsed("Hello")["text"] == "Hello"
    assert parsed("Hello " * 60)["text"].strip() == ("Hello " * 60).strip()
    assert parsed("<|channel|>final<|message|>a<|channel|>analysis<|message|>b")["reasoning"] == "b"
    assert parsed("<|channel|>final<|message|>a<|message|>b<|constrain|>c")["text"] == "abc"


def test_without_tools_a_call_is_text() -> None:
    text = "<|channel|>commentary to=browser.search code<|message|>{}<|call|>"
    assert parsed(text, schemas=None)["text"] == "{}" and not parsed(text, schemas=None)["calls"]


def test_reasoning_that_stays_in_the_text() -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|>"
    found = parsed(text + "<|start|>assistant<|channel|>final<|message|>Yes", split=False)
    assert (found["text"], found["reasoning"]) == (text + "\n\nYes", "")


def test_stop_strings_match_what_is_visible() -> None:
    text = "<|channel|>analysis<|message|>END<|end|><|start|>assistant<|channel|>final<|message|>ab END c"
    found = parsed(text, stops=StopStrings(["END"]))
    assert (found["reasoning"], found["text"].strip(), found["stopped"]) == ("END", "ab", True)


@pytest.mark.parametrize(
    ("tail", "mode", "text", "reasoning"),
    [
        ("", "open", "", "more"),
        ("<|channel|>final<|message|>Done<|end|>", "open", "", "more"),
        ("<|channel|>final<|message|>It is", "closed", " more", ""),
        ("<|channel|>analysis<|message|>Hm", "begun", "", " more"),
    ],
)
def test_the_prompt_determines_where_output_begins(tail: str, mode: str, text: str, reasoning: str) -> None:
    assert reasoning_at_start(OPEN + tail) == mode
    start = "<|start|>assistant" if tail.endswith("<|end|>") else ""
    written = f"{start}<|channel|>analysis<|message|>more" if mode == "open" else " more"
    found = parsed(written, OPEN + tail)
    assert (found["text"], found["reasoning"]) == (text, reasoning)


# ---- rendering

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "What it is like",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Where"},
                "days": {"type": "integer"},
                "units": {"type": "string", "enum": ["c", "f"]},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["city"],
        },
    },
}


def rendered(encoding: Any, rows: list[dict[str, Any]], effort: str, tools: bool) -> str:
    """The prompt that OpenAI's package makes of a conversation; results of tools as JSON, as the template has them."""
    level = getattr(harmony.ReasoningEffort, effort.upper())
    system = harmony.SystemContent.new().with_reasoning_effort(level)
    system = system.with_conversation_start_date(date.today().isoformat())
    made = [harmony.Message.from_role_and_content(harmony.Role.SYSTEM, system)]
    developer = harmony.DeveloperContent.new()
    if rows[0]["role"] == "system":
        developer = developer.with_instructions(rows[0]["content"])
    if tools:
        f = TOOL["function"]
        tool = harmony.ToolDescription.new(f["name"], f["description"], parameters=f["parameters"])
        developer = developer.with_function_tools([tool])
    if tools or rows[0]["role"] == "system":
        made.append(harmony.Message.from_role_and_content(harmony.Role.DEVELOPER, developer))
    for row in rows:
        role = harmony.Role.USER if row["role"] == "user" else harmony.Role.ASSISTANT
        message = harmony.Message.from_role_and_content(role, row["content"])
        if row["role"] == "user":
            made.append(message)
        elif row["role"] == "tool":
            author = harmony.Author.new(harmony.Role.TOOL, "functions.weather")
            result = harmony.Message.from_author_and_content(author, json.dumps(row["content"]))
            made.append(result.with_channel("commentary").with_recipient("assistant"))
        elif row["role"] == "assistant" and "tool_calls" in row:
            thought = row.get("reasoning_content")
            if thought:
                made.append(harmony.Message.from_role_and_content(role, thought).with_channel("analysis"))
            arguments = json.dumps(row["tool_calls"][0]["function"]["arguments"])
            call = harmony.Message.from_role_and_content(role, arguments).with_channel("commentary")
            made.append(call.with_recipient("functions.weather").with_content_type("json"))
        elif row["role"] == "assistant":
            made.append(message.with_channel("final"))
    conversation = harmony.Conversation.from_messages(made)
    return encoding.decode(encoding.render_conversation_for_completion(conversation, harmony.Role.ASSISTANT))


CALL = {"type": "function", "id": "c1", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
ROWS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho", "reasoning_content": "Left out of the next prompt"},
        {"role": "user", "content": "Why?"},
    ],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "reasoning_content": "I ask.", "tool_calls": [CALL]},
        {"role": "tool", "content": "sun", "tool_call_id": "c1"},
    ],
]


@pytest.mark.parametrize("effort", ["low", "medium", "high"])
@pytest.mark.parametrize("tools", [False, True])
def test_prompts_are_those_of_openai(encoding: Any, template: ChatTemplate, effort: str, tools: bool) -> None:
    for rows in ROWS:
        offered = [TOOL] if tools else []
        ours = template.render(normalise_messages(rows), tools=offered, reasoning_effort=effort)
        theirs = rendered(encoding, normalise_messages(rows), effort, tools)
        assert (
            ours.replace("Be brief.\n\n<|end|>", "Be brief.<|end|>") == theirs
        )  # the template leaves a blank line


def test_rendering_is_that_of_transformers(template: ChatTemplate) -> None:
    """Of messages as the template wants them, which has neither two calls at once nor reasoning under our name."""
    reference = pytest.importorskip("transformers.utils.chat_template_utils")
    n_texts = 0
    for title, messages in CONVERSATIONS.items():
        for options in OPTIONS:
            if options.get("continue_final_message") and messages[-1]["role"] != "assistant":
                continue
            options = {k: v for k, v in options.items() if v is not None}
            rows = prepared(normalise_messages(messages))
            if options.get("continue_final_message") and (
                "tool_calls" in rows[-1] or not rows[-1]["content"]
            ):
                continue
            try:
                ours = template.render(normalise_messages(messages), **options)
            except ConfigError:
                ours = None
            try:
                (theirs,), _ = reference.render_jinja_template(
                    [rows], chat_template=template.source, bos_token="", eos_token="",
                    **{**options, "tools": options["tools"] or None},
                )  # fmt: skip
            except Exception:  # noqa: BLE001 - the template's own refusals
                theirs = None
            assert ours == theirs, f"{title}, {options}"
            n_texts += ours is not None
    assert n_texts >= 100


def test_several_calls_become_turns_with_their_results() -> None:
    calls = [{**CALL, "id": f"c{i}"} for i in range(3)]
    results = [{"role": "tool", "content": str(i), "tool_call_id": f"c{i}"} for i in (2, 0, 1)]
    words = {"role": "assistant", "content": "See:", "reasoning_content": "Hm.", "tool_calls": calls}
    rows = prepared([words, *results, {"role": "user", "content": "x"}])
    assert [row["role"] for row in rows] == ["assistant", "tool"] * 3 + ["user"]
    assert [row["content"] for row in rows] == ["", "0", "", "1", "", "2", "x"]
    assert rows[0]["thinking"] == "Hm.\n\nSee:" and "thinking" not in rows[2]
    assert all(len(row["tool_calls"]) == 1 for row in rows[:6:2])
    nameless = [{k: v for k, v in row.items() if k != "tool_call_id"} for row in results]
    assert [row["content"] for row in prepared([words, *nameless])[1::2]] == ["2", "0", "1"]


def test_the_template_declares_its_abilities(template: ChatTemplate, tmp_path: Path) -> None:
    assert template.is_harmony and template.tool_format == "harmony" and template.supports_tools
    assert not template.renders.system_later and template.renders.system
    bare = {"type": "function", "function": {"name": "ping"}}
    assert "// \ntype ping = () => any;" in template.render(normalise_messages(ROWS[0]), tools=[bare])


# ---- grammars, over the vocabulary of gpt-oss itself

ANALYSIS = "<|channel|>analysis<|message|>Let's see: {} <b>\n\n.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant"
WEATHER = '<|message|>{"city": "Rome"}'
HEADS = [
    "<|channel|>commentary to=functions.weather <|constrain|>json",
    "<|channel|>commentary to=functions.weather json",
    " to=functions.weather<|channel|>commentary json",
]
ANSWER = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})


@pytest.mark.parametrize(
    ("answer", "written", "fits"),
    [
        *((None, ANALYSIS + PREAMBLE + head + WEATHER, True) for head in HEADS),
        (None, HEADS[0] + WEATHER, True),
        (None, "<|channel|>final<|message|>No.", False),
        (None, HEADS[0].replace("weather", "other") + WEATHER, False),
        (None, HEADS[0] + '<|message|>{"city": 3}', False),
        ("", ANALYSIS + "<|channel|>final<|message|>No, {} words.\n", True),
        ("", ANALYSIS + HEADS[2] + WEATHER, True),
        ("", ANALYSIS + HEADS[2] + '<|message|>{"city": 3}', False),
        (ANSWER, ANALYSIS + '<|channel|>final <|constrain|>json<|message|>{"a": 3}', True),
        (ANSWER, '<|channel|>final<|message|>{"a": 3}', True),
        (ANSWER, HEADS[0] + WEATHER, True),
        (ANSWER, "<|channel|>final<|message|>No.", False),
    ],
)
def test_grammars_let_through_what_fits(answer: str | None, written: str, fits: bool) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed (extra: grammar)")
    vocabulary = o200k.tokenizer()
    spec = harmony_grammar(SCHEMAS, answer, special_tags(vocabulary))
    matcher = compiler().matcher(spec)
    taken = [matcher.consume_token(token) for token in vocabulary.encode(written)]
    assert all(taken) == fits
    if fits:
        assert matcher.is_accepting()


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(o200k.tokenizer(), o200k.N_VOCAB)
