"""Tests that grammars which would take the compiler minutes, gigabytes or its stack are refused before compiling."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance", reason="llguidance is not installed")

from dflash_ggml.errors import ConfigError
from dflash_ggml.text.grammar import GrammarCompiler
from dflash_ggml.text.grammar_limits import check_text, regex_size
from dflash_ggml.text.grammar_spec import GrammarSpec, json_schema_spec
from reference.fake_engine import byte_vocabulary

TOKENIZER = byte_vocabulary()
COMPILER = GrammarCompiler(TOKENIZER, TOKENIZER.n_vocab)
COUNTED = "counted repetitions of more than 10000 parts"
PRODUCT = {"type": "integer", "allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}


def in_lark(schema: Any) -> str:
    return f"start: j\nj: %json {json.dumps(schema)}"


def chain(n: int) -> dict[str, Any]:
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(n)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{n}": {"type": "string"}}}


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("abc", 3),
        ("a{3}", 3),
        ("(ab){2,5}", 10),
        ("(a{10}){10}b", 101),
        ("(a|[^]b{9}]){7}", 14),
        (r"\p{L}{4}\{9\}[\]{8}]", 8),
        ("a{,3}b{2,}", 5),
        ("(?:a?)*+{2}", 1),
        ("((((", 0),
        ("a{x}", 4),
        (")a{9999999999999999999}", 10**9),
        ("a~99[(]{2}", 6),
        (r"(?:(?<n>a){2}b){3}\(c{4}", 14),
        ("(?P<n>a{9}){3}(?i)b", 28),
        ("(a{ 3 }[[b](]){2}", 8),
        ("a{2})){3}", 6),
    ],
)
def test_size_of_an_expression(pattern: str, size: int) -> None:
    assert regex_size(pattern) == size


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("regex", "(a{1000}){1000}", COUNTED),
        ("regex", "(((((a{10}){10}){10}){10}){10}){10}", COUNTED),
        ("regex", "a{4000000000}", COUNTED),
        ("regex", "(?P<n>a{1000}){1000}", COUNTED),
        ("regex", "(?x)(a{ 1000 }){ 1000 }", COUNTED),
        ("lark", 'start: T\nT: A{ 100 }\nA: B ~ 100\nB: "a"{ 100 }', COUNTED),
        ("lark", "start: T\nT: /(a{1000}){1000}/", COUNTED),
        ("lark", 'start: T\nT: ("a"~1000)~1..1000', COUNTED),
        ("lark", 'start: T\nT: A{100}\nA: B~100\nB: "a"{100}', COUNTED),
        (
            "lark",
            "start: R0\n" + "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(40)) + '\nR40: "a"',
            COUNTED,
        ),
        ("lark", in_lark(PRODUCT), "multipleOf"),
        ("gbnf", in_lark(PRODUCT), "multipleOf"),
        ("lark", json.dumps({"grammars": [{"json_schema": PRODUCT}]}), "begins as JSON"),
        ("gbnf", "start: T\nT: /(a{1000}){1000}/", COUNTED),
        ("lark", in_lark({"required": [f"p{i}" for i in range(9999)]}), "9999 required names, at most 5000"),
        ("lark", in_lark("no schema"), "expected an object or a boolean"),
    ],
)
def test_grammars_that_would_explode(kind: Any, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        COMPILER.matcher(GrammarSpec(kind, text))


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "string", "pattern": "^(a{1000}){1000}$"}, COUNTED),
        ({"patternProperties": {"^(a{1000}){1000}$": True}}, COUNTED),
        (
            {"properties": {f"p{i}": {"type": "null"} for i in range(1201)}},
            "1201 properties that may be left",
        ),
        ({"prefixItems": [{"type": "null"}] * 1001}, "1001 schemas in prefixItems"),
        ({"anyOf": [{"type": "null"}] * 1001}, "1001 schemas in anyOf"),
        ({"const": [[0] * 5000] * 3}, "more than 10000"),
        ({"enum": [{"a": [0] * 20_000}]}, "more than 10000"),
    ],
)
def test_schemas_that_would_explode(schema: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        COMPILER.matcher(json_schema_spec(schema))


@pytest.mark.parametrize(
    "body",
    ["{0}", "[{0}]", '"a" ["b" {0}] "c"', "({0})*", '"x" | {0}~2', "[[{0}]]", "{0}?", '/a/ "[" {0} // {0}'],
)
@pytest.mark.parametrize("name", ["r", "T"])
@pytest.mark.parametrize("head", ["{}", "!{}", "?{}", "{}.3", "{}[max_tokens=9]", "{} "])
def test_rules_are_followed_wherever_they_are_named(name: str, body: str, head: str) -> None:
    """Where it is not, the compiler's native stack ends, and the process with it."""

    def grammar(n: int) -> str:
        rules = [f"{head.format(f'{name}{i}')}: {body.format(f'{name}{i + 1}')}" for i in range(n)]
        return "\n".join([f"start: {name}0", *rules, f'{name}{n}: "z"'])

    if name == "r":  # a terminal is put into every one that names it, which is too much soon
        check_text("lark", grammar(190))
    with pytest.raises(ConfigError, match="200 deep"):
        check_text("lark", grammar(3000))


@pytest.mark.parametrize(
    ("kind", "piece"),
    [
        *(("regex", piece) for piece in ("[", "\\p{", "{", "{ ", "(?<a")),
        *(("gbnf", piece) for piece in ('"\\', '\\"', "[", " ")),
        *(("lark", piece) for piece in ('"\\', '\\"', "/\\", "a[", 'a["', " ", "\r", "~ ")),
    ],
)
def test_the_check_itself_takes_linear_time(kind: str, piece: str) -> None:
    """A pattern that tries its parts anew at each position would take hours here."""
    with contextlib.suppress(ConfigError):
        check_text(kind, "a" + piece * ((1 << 19) // len(piece) - 1))


def test_terminals_that_name_each_other_are_written_out() -> None:
    for body in ("T{0} T{0}", "[T{0}] T{0}", "(T{0} | T{0})", "T{0}~2", "(T{0}){{2}}"):
        rules = [f"T{i}: {body.format(i + 1)}" for i in range(30)]
        with pytest.raises(ConfigError, match=COUNTED):
            check_text("lark", "\n".join(["start: T0", *rules, 'T30: "z"']))
    check_text("lark", "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(30)))
    check_text("lark", "start: T\nT: T~9999")  # refused by the compiler


def test_many_counted_patterns_compile() -> None:
    schema = {"properties": {f"p{i}": {"type": "string", "pattern": "^a{9000}$"} for i in range(60)}}
    assert not COMPILER.matcher(json_schema_spec(schema)).is_error()


def test_a_grammar_that_outgrows_the_parser_is_an_error_of_the_request() -> None:
    processor = COMPILER.processor(GrammarSpec("gbnf", 'root ::= "a"{1000000000}'), 0)
    with pytest.raises(ConfigError, match="^grammar: it is too large: .*Too many items"):
        for n in range(2):
            processor(np.full(n, TOKENIZER.encode("a")[0], np.int32), np.zeros(TOKENIZER.n_vocab, np.float32))


def test_schemas_in_lark_are_bounded_and_all_else_stays() -> None:
    for text in (
        in_lark(chain(2500)),
        in_lark({"type": "object", "properties": {"a": {"type": "integer"}}}) + '\nk: "%json"',
        'start: a | B\na: "x"~5 b?\nb: /[a-z]{1,200}/\nB: C{3} /z+/\nC: "c" | /d/',
        in_lark(True),
    ):
        assert not COMPILER.matcher(GrammarSpec("lark", text)).is_error()
    matcher = COMPILER.matcher(
        GrammarSpec("lark", in_lark({"type": "object", "properties": {"a": {"type": "null"}}}))
    )
    assert matcher.try_consume_tokens(TOKENIZER.encode('{"a": null')) and not matcher.try_consume_tokens(
        TOKENIZER.encode(', "b"')
    )
