"""What would take the grammar compiler minutes, gigabytes or its stack is refused before it is compiled."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance", reason="llguidance is not installed")

from dflash_ggml.errors import ConfigError
from dflash_ggml.text.grammar import GrammarCompiler
from dflash_ggml.text.grammar_size import regex_size
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
            {"properties": {f"p{i}": {"type": "string", "pattern": "^a{9000}$"} for i in range(60)}},
            "patterns of more than 500000 parts in all",
        ),
        (
            {"properties": {f"p{i}": {"type": "null"} for i in range(1201)}},
            "1201 properties that may be left",
        ),
        ({"prefixItems": [{"type": "null"}] * 1001}, "1001 places in prefixItems"),
        ({"anyOf": [{"type": "null"}] * 1001}, "1001 schemas in anyOf"),
        ({"const": [[0] * 5000] * 3}, "more than 10000"),
        ({"enum": [{"a": [0] * 20_000}]}, "more than 10000"),
    ],
)
def test_schemas_that_would_explode(schema: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        COMPILER.matcher(json_schema_spec(schema))


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
