"""Tests of grammars as logits processors: exact masks for any order of histories, clear errors."""

from __future__ import annotations

import json
from importlib import metadata
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.fake_engine import byte_vocabulary

pytest.importorskip("llguidance")

from dflash_ggml.errors import ConfigError, DflashError
from dflash_ggml.text.grammar import GrammarCompiler, GrammarProcessor, LlamaGrammar, json_options
from dflash_ggml.text.grammar_spec import GrammarSpec, json_schema_spec, response_format_spec
from dflash_ggml.text.tool_grammar import (
    forced_call_grammar,
    inner_call_grammar,
)
from dflash_ggml.text.tool_schema import ToolSchema

TOKENIZER = byte_vocabulary()
N_VOCAB = TOKENIZER.n_vocab + 3
COMPILER = GrammarCompiler(TOKENIZER, N_VOCAB)
ROW = np.zeros(N_VOCAB, np.float32)
PROMPT = [5, 6, 7]


def allowed(processor: GrammarProcessor, generated: list[int]) -> set[int]:
    return set(np.flatnonzero(np.isfinite(processor(np.array(PROMPT + generated, np.int32), ROW))).tolist())


def texts(ids: set[int]) -> set[str]:
    return {TOKENIZER.decode([i], special=True) for i in ids}


def accepts(spec: GrammarSpec, text: str) -> bool:
    """Whether every token of the text is allowed at its position, and the end after it."""
    processor = COMPILER.processor(spec, len(PROMPT))
    ids = TOKENIZER.encode(text)
    steps = all(ids[i] in allowed(processor, ids[:i]) for i in range(len(ids)))
    return steps and bool(allowed(processor, ids) & TOKENIZER.eog_ids)


def test_all_four_kinds() -> None:
    assert accepts(json_schema_spec({"type": "integer"}), "-12") and not accepts(
        GrammarSpec("json_object"), "12"
    )
    assert accepts(LlamaGrammar.from_regex("[ab]+c").spec, "abac") and not accepts(
        GrammarSpec("regex", "a"), "aa"
    )
    assert accepts(LlamaGrammar.from_string('root ::= "yes" | "no" [0-9]{2}').spec, "no42")
    assert accepts(LlamaGrammar.from_lark('start: "x"+').spec, "xxx")
    assert accepts(GrammarSpec("json_object"), '{"hello": [1, {"é": null}]}')


def test_schemas_are_bounded_on_every_way_to_a_grammar() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for spec in (
        LlamaGrammar.from_json_schema(schema).spec,
        LlamaGrammar.from_json_schema(json.dumps(schema)).spec,
        response_format_spec({"type": "json_object", "schema": schema}),
        forced_call_grammar({"w": ToolSchema(SCHEMA)}, "json", several=False, answer=json.dumps(schema)),
    ):
        assert spec is not None and accepts(spec, '{"a": 1}')
        for text in ('{"a": 1, "b": 2}', '{"a":  1}', '{"a": ' + "1" * 17 + "}"):
            assert not accepts(spec, text)


def test_padding_ids_and_control_tokens_are_never_allowed_inside() -> None:
    ids = allowed(COMPILER.processor(GrammarSpec("regex", "(?s:.*)"), 3), [])
    assert max(ids) < TOKENIZER.n_vocab
    assert TOKENIZER.id_of("<|im_start|>") not in ids and ids & TOKENIZER.eog_ids


def test_only_the_end_is_allowed_when_the_grammar_is_done() -> None:
    processor = COMPILER.processor(GrammarSpec("regex", "ab"), 3)
    assert texts(allowed(processor, TOKENIZER.encode("a"))) == {"b"}
    assert allowed(processor, TOKENIZER.encode("ab")) == TOKENIZER.eog_ids


@pytest.mark.parametrize(
    ("version", "flexible"),
    [("1.5.0", False), ("1.7.6", False), ("1.8.0", True), ("1.9.1rc2", True), ("2.0", True), (None, True)],
)
def test_older_libraries_write_json_without_blanks(
    monkeypatch: pytest.MonkeyPatch, version: str | None, flexible: bool
) -> None:
    def older_version(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", older_version)
    assert json_options() == (
        {"whitespace_pattern": r" |\n( {0,12}|\t{0,6})"} if flexible else {"whitespace_flexible": False}
    )


def test_a_library_that_knows_of_one_end_only() -> None:
    """As older versions, to which guidance is pinned."""
    compiler = GrammarCompiler(TOKENIZER, N_VOCAB)
    library, calls = compiler._library, []

    class Older:
        def __getattr__(self, name: str) -> Any:
            return getattr(library, name)

        def LLTokenizer(self, *arguments: Any, eos_token: Any, **more: Any) -> Any:
            calls.append(eos_token)
            if isinstance(eos_token, list):
                raise TypeError("argument 'eos_token': 'list' object cannot be interpreted as an integer")
            return library.LLTokenizer(*arguments, eos_token=eos_token, **more)

    compiler._library = Older()
    processor = compiler.processor(GrammarSpec("regex", "ab"), len(PROMPT))
    assert calls == [sorted(TOKENIZER.eog_ids), TOKENIZER.eos_id]
    assert texts(allowed(processor, [])) == {"a"}
    assert allowed(processor, TOKENIZER.encode("ab")) == {TOKENIZER.eos_id}


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 24), min_size=1, max_size=12), st.booleans())
def test_state_depends_on_the_history_alone(lengths: list[int], thinking: bool) -> None:
    """Called with longer, shorter and equal histories, the mask is that of a fresh processor."""
    spec = json_schema_spec(
        {"type": "object", "properties": {"hello": {"type": "array"}}, "required": ["hello"]}
    )
    after = ("</think>",) if thinking else ()
    ids = TOKENIZER.encode(('hm {"</think>' if thinking else "") + '{"hello": [1, "in"]}')
    reused = COMPILER.processor(spec, len(PROMPT), after=after)
    for n in lengths:
        fresh = COMPILER.processor(spec, len(PROMPT), after=after)
        assert allowed(reused, ids[:n]) == allowed(fresh, ids[:n])


def test_another_continuation_is_rolled_back() -> None:
    processor = COMPILER.processor(GrammarSpec("regex", "(abc|axy)z"), 3)
    assert texts(allowed(processor, TOKENIZER.encode("abc"))) == {"z"}
    assert texts(allowed(processor, TOKENIZER.encode("ax"))) == {"y"}


def test_thinking_is_free_and_the_answer_is_bound() -> None:
    processor = COMPILER.processor(GrammarSpec("regex", "ok"), 3, after=("</think>",))
    assert len(allowed(processor, TOKENIZER.encode("anything <think"))) == N_VOCAB
    assert texts(allowed(processor, TOKENIZER.encode("anything</think>"))) == {"o"}
    spelt = [TOKENIZER.id_of(c) for c in "x</think>"]
    assert texts(allowed(processor, spelt)) == {"o"}  # type: ignore[arg-type]


def test_the_logits_passed_in_are_not_changed() -> None:
    """The result is another array: its allowed logits are those passed in, the others -inf."""
    logits = np.random.default_rng(0).normal(size=N_VOCAB).astype(np.float32)
    before = logits.copy()
    masked = COMPILER.processor(GrammarSpec("regex", "[ab]"), len(PROMPT))(np.array(PROMPT, np.int32), logits)
    np.testing.assert_array_equal(logits, before)
    assert not np.shares_memory(masked, logits)
    ids = [TOKENIZER.id_of(c) for c in "ab"]
    expected = np.full(N_VOCAB, -np.inf, np.float32)
    expected[ids] = before[ids]
    np.testing.assert_array_equal(masked, expected)


def test_history_that_breaks_the_grammar() -> None:
    processor = COMPILER.processor(GrammarSpec("regex", "ab"), 3)
    with pytest.raises(DflashError, match="does not match"):
        allowed(processor, TOKENIZER.encode("ba"))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (GrammarSpec("regex", "[a"), r"grammar \(regex\)"),
        (GrammarSpec("lark", "start: foo"), "unknown name"),
        (GrammarSpec("gbnf", "root = x"), r"grammar \(gbnf\).*Expected ::="),
        (GrammarSpec("json_schema", '{"type": "strin"}'), "strin"),
    ],
)
def test_bad_grammars_are_one_clear_line(spec: GrammarSpec, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        COMPILER.processor(spec, 0)
    assert "\n" not in str(caught.value)


def test_response_formats() -> None:
    assert response_format_spec(None) is None and response_format_spec({"type": "text"}) is None
    assert response_format_spec({"type": "json_object"}) == GrammarSpec("json_object")
    schema = {"type": "integer"}
    for value in (
        {"type": "json_object", "schema": schema},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    ):
        assert response_format_spec(value) == GrammarSpec("json_schema", json.dumps(schema))
    for bad in ({"type": "yaml"}, {"type": "json_schema"}, {}):
        with pytest.raises(ConfigError, match="response_format"):
            response_format_spec(bad)
    with pytest.raises(ConfigError, match="not valid JSON"):
        json_schema_spec("{")


def test_grammar_files(tmp_path) -> None:
    path = tmp_path / "g.gbnf"
    path.write_text('root ::= "a"')
    assert accepts(LlamaGrammar.from_file(path).spec, "a")
    path.write_text(" ")
    with pytest.raises(ConfigError, match="empty"):
        LlamaGrammar.from_file(path)


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "n": {"$ref": "#/$defs/count"},
        "unit": {"enum": ["c", "f"]},
        "fixed": {"const": "k"},
    },
    "required": ["city", "unit"],
    "$defs": {"count": {"type": "integer", "minimum": 2}},
}
LIMITED = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^[ab]+$"}}, "required": ["a"]}


def block(name: str, *values: tuple[str, str]) -> str:
    parts = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values)
    return f"<tool_call>\n<function={name}>\n{parts}</function>\n</tool_call>"


def test_forced_calls_in_parameter_form() -> None:
    spec = forced_call_grammar({"w": ToolSchema(SCHEMA), "l": ToolSchema(LIMITED)}, "xml", several=False)
    assert accepts(
        spec,
        "\n\n" + block("w", ("city", "a\n<b> </par\n\n</parame"), ("n", "12"), ("unit", "f"), ("fixed", "k")),
    )
    assert accepts(spec, block("w", ("city", ""), ("unit", "c")))
    assert not accepts(spec, block("w", ("city", "x"), ("unit", "k")))
    for inner in ("a</parameter>b", "a\n</function>b", "a</tool_call>", "\n<parameter=unit>"):
        assert not accepts(spec, block("w", ("city", inner), ("unit", "c")))
    assert not accepts(spec, block("w", ("city", "x"), ("n", "1"), ("unit", "c")))
    assert not accepts(spec, block("w", ("unit", "c")))
    assert not accepts(spec, block("other"))
    assert not accepts(spec, block("w", ("city", "x"), ("unit", "c")) * 2)
    # a pattern cannot be held between parameter tags, so that tool is called in the JSON form
    assert ToolSchema(SCHEMA).arguments() and not ToolSchema(LIMITED).arguments()
    assert accepts(spec, '<tool_call>\n{"name": "l", "arguments": {"a": "abba"}}\n</tool_call>')
    assert not accepts(spec, '<tool_call>\n{"name": "l", "arguments": {"a": "abc"}}\n</tool_call>')


def test_forced_calls_in_json_form() -> None:
    spec = forced_call_grammar({"w": ToolSchema(SCHEMA)}, "json", several=True)
    call = '<tool_call>\n{"name": "w", "arguments": {"city": "x", "unit": "c"}}\n</tool_call>'
    assert accepts(spec, call) and accepts(spec, f"{call}\n{call}")
    assert not accepts(spec, "hello")
    for bad in ('"unit": "c", "more": 1}', '"unit":  "c"}'):
        assert not accepts(spec, call.replace('"unit": "c"}', bad))
    number = {"w": ToolSchema({"properties": {"n": {"type": "integer"}}, "required": ["n"]})}
    long = "<tool_call>\n<function=w>\n<parameter=n>\n{}\n</parameter>\n</function>\n</tool_call>"
    spec = forced_call_grammar(number, "xml", several=False)
    assert accepts(spec, long.format("1" * 16)) and not accepts(spec, long.format("1" * 17))


@pytest.mark.parametrize("form", ["xml", "json"])
@pytest.mark.parametrize(
    "odd", [{"required": 0.5}, {"required": [{}]}, {"properties": {"a": {"enum": 5}}}, {"properties": 7}]
)
def test_tools_whose_schemas_make_no_sense_are_one_clear_error(form: Any, odd: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^grammar|^json schema|^tools"):
        COMPILER.matcher(forced_call_grammar({"w": ToolSchema(odd)}, form, several=False))


def test_calls_or_an_answer() -> None:
    spec = forced_call_grammar(
        {"CALL": ToolSchema(SCHEMA)}, "json", several=False, answer='{"type": "integer"}'
    )
    assert accepts(spec, "42") and accepts(spec, "\n\n42") and not accepts(spec, "x")
    assert accepts(
        spec, '<tool_call>\n{"name": "CALL", "arguments": {"city": "x", "unit": "c"}}\n</tool_call>'
    )


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 260), min_size=1, max_size=8))
def test_calls_begun_freely_are_bound_each_time(lengths: list[int]) -> None:
    """Free text, a bound call, free text, a bound call; and again the mask depends on the history alone."""
    spec = inner_call_grammar({"w": ToolSchema(SCHEMA)}, "xml")
    ids = TOKENIZER.encode(
        "hi " + block("w", ("city", "a"), ("unit", "c")) + "\n x" + block("w", ("city", ""), ("unit", "f"))
    )
    reused = COMPILER.processor(spec, len(PROMPT), after=("<tool_call>",), repeat=True)
    for n in lengths:
        fresh = COMPILER.processor(spec, len(PROMPT), after=("<tool_call>",), repeat=True)
        mask = allowed(reused, ids[:n])
        assert mask == allowed(fresh, ids[:n])
        text = TOKENIZER.decode(ids[:n])
        inside = text.count("<tool_call>") > text.count("</tool_call>")
        assert (len(mask) < N_VOCAB) == inside
        assert n >= len(ids) or ids[n] in mask


def test_quotes_in_tool_names_do_not_break_the_grammar() -> None:
    tools = {"a.b-c\\d": ToolSchema({"type": "object", "properties": {}})}
    spec = forced_call_grammar(tools, "xml", several=False)
    assert accepts(spec, block("a.b-c\\d"))
