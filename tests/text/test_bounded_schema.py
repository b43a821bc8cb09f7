"""Tests of bounded schemas: whatever they allow, the original allows, and every answer ends."""

from __future__ import annotations

import contextlib
import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest

pytest.importorskip("llguidance")

import llguidance
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from dflash_ggml.errors import ConfigError
from dflash_ggml.text import schema_size
from dflash_ggml.text.bounded_schema import bounded_schema
from dflash_ggml.text.grammar import JSON_OPTIONS, GrammarCompiler
from dflash_ggml.text.grammar_limits import check_text
from dflash_ggml.text.grammar_spec import GrammarSpec, json_schema_spec
from dflash_ggml.text.schema_reading import SchemaReader
from dflash_ggml.text.tool_grammar import forced_call_grammar
from dflash_ggml.text.tool_schema import ToolSchema
from reference.fake_engine import byte_vocabulary

TOKENIZER = byte_vocabulary()
COMPILER = GrammarCompiler(TOKENIZER, TOKENIZER.n_vocab)
CLOSERS = {TOKENIZER.id_of(c) for c in '"}]'}
PRINTABLE = {TOKENIZER.id_of(c) for c in map(chr, range(0x21, 0x7F)) if c != "\\"}
PRINTABLE |= {TOKENIZER.encode(c)[0] for c in " \n"}


def allowed(matcher: Any) -> set[int]:
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return set(np.flatnonzero(np.unpackbits(bits, bitorder="little", count=TOKENIZER.n_vocab)).tolist())


def accepts(schema: Any, text: str) -> bool:
    matcher = COMPILER.matcher(json_schema_spec(schema))
    ids = [TOKENIZER.encode(c)[0] for c in text]
    return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())


class NoEnd(AssertionError):
    """An answer that does not end."""


def answer(schema: Any, seed: int) -> str:
    """A random answer that the grammar allows."""
    matcher, rng, ids = COMPILER.matcher(json_schema_spec(schema)), random.Random(seed), []
    for step in range(3000):
        may = allowed(matcher)
        assert not matcher.is_error(), matcher.get_error()
        if may & TOKENIZER.eog_ids and (rng.random() < 0.5 or may <= TOKENIZER.eog_ids):
            return TOKENIZER.decode(ids)
        ends = may & CLOSERS
        pool = ends if ends and (step > 300 or rng.random() < 0.3) else may & PRINTABLE or may
        token = rng.choice(sorted(pool - TOKENIZER.eog_ids))
        assert matcher.consume_token(token)
        ids.append(token)
    raise NoEnd(f"no end: {TOKENIZER.decode(ids)[:200]}")


# --- what is bounded


def test_blanks_are_a_space_or_a_line_with_its_indent() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "null"}}}}
    for text in ('{"a":[null,null]}', '{ "a": [ null , null ] }', json.dumps({"a": [None, None]}, indent=4)):
        assert accepts(schema, text)
    for text in (
        '{"a":  []}',
        '{"a":\n\n[]}',
        '{"a":\n' + " " * 13 + "[]}",
        ' {"a":[]}',
        '{"a":[]} ',
        '{"a":\t[]}',
    ):
        assert not accepts(schema, text)
    assert accepts({"type": "object"}, '{"a": {"b": [1.5]}}') and not accepts({"type": "object"}, '{"a":  1}')
    matcher = COMPILER.matcher(GrammarSpec("json_object"))
    assert matcher.try_consume_tokens([TOKENIZER.encode(c)[0] for c in '{"a":  1}']) == 6


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer"}, ["0", "-7", "8" * 16, "-" + "8" * 16], ["1" + "0" * 16, "1.0", "1e3"]),
        ({"type": "integer", "minimum": 3}, ["3", "8" * 16], ["2", "1" * 17]),
        ({"type": "integer", "maximum": 3}, ["3", "-" + "8" * 16], ["4", "-" + "1" * 17]),
        ({"type": "integer", "minimum": 10**17}, ["1" + "0" * 17], ["8" * 16, "1" + "0" * 19]),
        ({"type": "integer", "exclusiveMinimum": 2, "exclusiveMaximum": 5}, ["3", "4"], ["2", "5"]),
        ({"type": "integer", "multipleOf": 7}, ["14", "0"], ["15", "7" * 17]),
        ({"type": "number"}, ["0.5", "-3.25", "1" * 16, "0.01234567"], ["1" * 17, "0." + "1" * 9, "1e9"]),
        ({"type": "number", "minimum": 0}, ["0.5", "1" * 16], ["-1", "1" * 17, "0." + "1" * 9]),
        ({"type": "number", "maximum": 1e300}, ["12"], ["1" * 20]),
        ({"type": "number", "multipleOf": 0.01}, ["1.25"], ["1.255", "1" * 17]),
        ({"type": ["number", "null"]}, ["null", "1.5"], ["1" * 17]),
        ({"const": 10**17}, ["1" + "0" * 17], ["1"]),
        ({"enum": [10**17, "a"]}, ["1" + "0" * 17, '"a"'], ["1"]),
        (True, ["[1.5, {}]", "null"], ["1" * 17, "[0." + "1" * 9 + "]", '{"a": 1e9}']),
        ({"description": "anything"}, ['{"a": [true]}'], ["[" + "1" * 17]),
        ({"type": "array"}, ["[1, [2.5]]"], ["[" + "1" * 17 + "]"]),
        ({"minimum": 2}, ["2", "[1]", '"a"'], ["1", "1" * 17, "[" + "1" * 17 + "]"]),
        ({"type": "array", "items": {"type": "null"}, "maxItems": 10**9}, ["[null]"], ["[1]"]),
    ],
)
def test_numbers_and_open_schemas_are_bounded(schema: Any, good: list[str], bad: list[str]) -> None:
    for text in good:
        assert accepts(schema, text), text
        jsonschema.validate(json.loads(text), schema)
    for text in bad:
        assert not accepts(schema, text), text


INNER = {"type": "object", "properties": {"x": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (INNER, ["{}", '{"x":1}'], ['{"y":1}', '{"x":1,"y":1}']),
        ({**INNER, "additionalProperties": True}, ['{"x":1,"y":[1]}'], ['{"x":"1"}']),
        ({**INNER, "additionalProperties": {"type": "null"}}, ['{"y":null}'], ['{"y":1}']),
        ({"type": "object"}, ['{"y":1}'], []),
        ({"type": "object", "properties": {}}, ["{}"], ['{"y":1}']),
        ({**INNER, "required": ["z"]}, ['{"z":[1]}', '{"x":1,"z":1}'], ["{}", '{"z":1,"y":1}']),
        (
            {**INNER, "patternProperties": {"^k": {"type": "null"}}},
            ['{"x":1,"k1":null}'],
            ['{"k1":1}', '{"y":1}'],
        ),
        ({"type": "array", "items": INNER}, ['[{"x":1}]'], ['[{"y":1}]']),
        ({"type": "array", "prefixItems": [INNER]}, ['[{"x":1},{"y":1}]'], ['[{"y":1}]']),
        ({"anyOf": [INNER, {"type": "null"}]}, ['{"x":1}', "null"], ['{"y":1}']),
        ({"additionalProperties": INNER, "type": "object"}, ['{"q":{"x":1}}'], ['{"q":{"y":1}}']),
        ({"$ref": "#/$defs/i", "$defs": {"i": INNER}}, ['{"x":1}'], ['{"y":1}']),
        ({"$ref": "#/definitions/a~1b%20c", "definitions": {"a/b c": INNER}}, ['{"x":1}'], ['{"y":1}']),
        ({"$id": "urn:s", "$ref": "urn:s#/$defs/i", "$defs": {"i": INNER}}, ['{"x":1}'], ['{"y":1}']),
        ({"$ref": "#name", "$defs": {"i": {**INNER, "$anchor": "name"}}}, ['{"x":1}'], ['{"y":1}']),
        # schemas that hold together are closed over the names of all of them
        (
            {
                "allOf": [{"$ref": "#/$defs/i"}, {"properties": {"b": {"type": "null"}}}],
                "$defs": {"i": INNER},
                "type": "object",
            },
            ["{}", '{"x":1,"b":null}'],
            ['{"y":1}', '{"b":1}', '{"x":1,"y":1}'],
        ),
        (
            {
                **INNER,
                "allOf": [
                    {"properties": {"k": INNER}},
                    {"properties": {"k": {"properties": {"w": {"type": "null"}}}}},
                ],
            },
            ['{"k":{"x":1,"w":null}}'],
            ['{"k":{"y":1}}', '{"k":{"w":1}}'],
        ),
        (
            {
                **INNER,
                "anyOf": [{"properties": {"b": {"type": "null"}}, "required": ["b"]}, {"required": ["x"]}],
            },
            ['{"b":null}', '{"x":1,"b":null}', '{"x":1}'],
            ["{}", '{"x":1,"b":2}', '{"x":1,"y":2}'],
        ),
        ({"allOf": [INNER, {"type": "object", "additionalProperties": True}]}, ['{"y":1}'], ['{"x":"a"}']),
        ({"type": "object", "unevaluatedProperties": False, "allOf": [INNER]}, ['{"x":1}'], ['{"y":1}']),
        (
            {
                "$ref": "#/$defs/n",
                "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}},
            },
            ['{"n":{"n":{}}}'],
            ['{"n":{"m":{}}}'],
        ),
        # as pydantic writes tagged unions
        (
            {
                "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
                "discriminator": {"propertyName": "k"},
                "$defs": {
                    "a": {
                        "type": "object",
                        "properties": {"k": {"const": "a"}, **INNER["properties"]},
                        "required": ["k"],
                    },
                    "b": {"type": "object", "properties": {"k": {"const": "b"}}, "required": ["k"]},
                },
            },
            ['{"k":"a","x":1}', '{"k":"b"}'],
            ['{"k":"b","x":1}', '{"x":1}'],
        ),
        ({"type": "string", "format": "binary"}, ['"a"'], ["1"]),
    ],
)
def test_declared_keys_only(schema: Any, good: list[str], bad: list[str]) -> None:
    for text in good:
        assert accepts(schema, text), text
        jsonschema.validate(json.loads(text), schema)
    for text in bad:
        assert not accepts(schema, text), text


# --- what it allows, the original allows

NAMES = st.sampled_from("abz")
SMALL = st.integers(-20, 20)


def picked(**options: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=options)


def leaves(*names: str) -> st.SearchStrategy[Any]:
    """Schemas without others in them, and references to `names`."""
    return st.one_of(
        st.just({"type": "integer"}),
        st.just({"type": "number"}),
        st.just({"type": ["integer", "string"]}),
        st.builds(
            lambda a, b: {"type": "integer", **a, "maximum": b},
            picked(multipleOf=st.integers(1, 9)),
            st.integers(0, 50),
        ),
        st.builds(lambda a: {"type": "number", **a}, picked(minimum=SMALL, exclusiveMinimum=SMALL)),
        st.builds(
            lambda a: {"type": "string", **a},
            picked(minLength=st.integers(0, 2), maxLength=st.integers(2, 5)),
        ),
        st.sampled_from(
            [True, {}, {"type": "boolean"}, {"type": "null"}, {"const": 3}, {"enum": ["a", 2, None]}]
        ),
        st.sampled_from([{"type": "object"}, {"type": "array"}]),
        st.sampled_from([{"type": "object", "properties": {"q": {"$ref": "#/$defs/Q"}}}]),
        *(st.just({"$ref": f"#/$defs/{name}"}) for name in names),
    )


def deeper(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = picked(
        properties=st.dictionaries(NAMES, inner, max_size=3),
        required=st.lists(NAMES, unique=True, max_size=2),
        additionalProperties=st.booleans() | inner,
        patternProperties=st.dictionaries(st.just("^x"), inner, max_size=1),
    ).map(lambda s: {"type": "object", **s})
    arrays = st.builds(
        lambda items, options: {"type": "array", **items, **options},
        picked(items=inner, prefixItems=st.lists(inner, min_size=1, max_size=2)),
        st.sampled_from([{}, {"maxItems": 3}, {"minItems": 1, "maxItems": 2}]),
    )
    several = st.lists(inner, min_size=1, max_size=3)
    joined = st.builds(
        lambda base, key, subs: (
            {**base, key: subs} if isinstance(base, dict) and "$ref" not in base else {key: subs}
        ),
        objects | st.just({}),
        st.sampled_from(["anyOf", "allOf", "oneOf"]),
        several,
    )
    return objects | objects | arrays | joined


SCHEMAS, Q, P = (st.recursive(leaves(*names), deeper, max_leaves=8) for names in (("P", "Q"), ("P",), ()))


def plain_compiles(schema: Any) -> bool:
    """Whether the compiler takes the schema as it is."""
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=JSON_OPTIONS)
    return not llguidance.LLMatcher(COMPILER._tokens(), grammar, log_level=0).is_error()


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(SCHEMAS.filter(lambda s: isinstance(s, dict)), P, Q, st.integers(0, 1 << 20))
def test_every_answer_is_valid_for_the_schema_as_it_was(root: Any, p: Any, q: Any, seed: int) -> None:
    schema = {**root, "$defs": {"P": p, "Q": q}}
    assume(plain_compiles(schema))
    # a definition that nothing can meet is refused by name, though the compiler may never come to it
    assume(all(plain_compiles({"$ref": f"#/$defs/{name}", "$defs": schema["$defs"]}) for name in "PQ"))
    text = answer(schema, seed)
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    outside = re.sub(r'"[^"\\]*(?:\\.[^"\\]*)*"', '""', text)
    assert not re.search(r"\d{17}|\.\d{9}|[ \t]{14}|\n\n|\S {2}", outside), text


def test_a_definition_that_nothing_can_meet_is_refused_by_name() -> None:
    """Also where a value need not have it: definitions are compiled one by one."""
    impossible = {"type": "object", "anyOf": [{"type": "integer"}]}
    schema = {"type": "object", "properties": {"q": {"$ref": "#/$defs/Q"}}, "$defs": {"Q": impossible}}
    with pytest.raises(ConfigError, match=r"Unsatisfiable schema: .*#/\$defs/"):
        answer(schema, 0)


# --- limits


def nested(kind: str, n: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(n):
        if kind == "properties":
            schema = {"type": "object", "properties": {"a": schema}}
        elif kind == "items":
            schema = {"type": "array", "items": schema}
        else:
            schema = {kind: [schema, {"type": "integer"}]}
    return schema


def chained(n: int, link: Any) -> dict[str, Any]:
    """A schema whose references follow each other; link: what a definition is, given the next one's reference."""
    defs = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(n)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{n}": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (
            chained(2500, lambda ref: {"type": "object", "properties": {"a": ref}}),
            "more than 200 schemas deep",
        ),
        (chained(2500, lambda ref: {"type": "array", "items": ref}), "more than 200 schemas deep"),
        (chained(2500, lambda ref: {"anyOf": [ref, {"type": "null"}]}), "more than 200 schemas deep"),
        (nested("properties", 100), "nested deeper than 60"),
        (nested("items", 100), "nested deeper than 60"),
        (nested("anyOf", 100), "nested deeper than 60"),
        (nested("allOf", 100), "nested deeper than 60"),
        ({"type": "object", "properties": {str(i): {} for i in range(11_000)}}, "more than 10000 schemas"),
        ({"enum": list(range(10_001))}, "more than 10000 schemas"),
        ({"type": "object", "required": [str(i) for i in range(10_001)]}, "more than 10000 schemas"),
        ({"type": "integer", "allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}, "multipleOf"),
        ({"type": "integer", "multipleOf": 99_999_989}, "multipleOf"),
        (
            {"type": "array", "prefixItems": [{"type": "integer", "multipleOf": 3000 + i} for i in range(9)]},
            "in all",
        ),
        (
            {"allOf": [{"type": "string", "pattern": f".*[a-m].{{{i}}}z"} for i in range(9)]},
            "more than 3 patterns",
        ),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "use anyOf"),
        ({"type": "array", "minItems": 10**9}, "minItems 1000000000 is above 4096"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "names no schema"),
        ({"$ref": "#/$defs/b"}, "names no schema; it is looked for within the schema"),
        ({"$ref": "https://example.com/x.json"}, "names no schema"),
        ({"properties": {"a": 3}}, "expected an object or a boolean as a schema"),
        ({"description": "x" * (1 << 19)}, "characters, at most 524288 are allowed"),
    ],
)
def test_what_is_too_much_is_refused_before_it_is_compiled(schema: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        COMPILER.matcher(json_schema_spec(schema))
    assert len(str(caught.value)) < 200


def test_a_text_nested_without_end_is_refused() -> None:
    for text in ('{"items":' * 2000 + "{}" + "}" * 2000, "[" * 5000):
        with pytest.raises(ConfigError, match="nested too deep|not valid JSON"):
            COMPILER.matcher(GrammarSpec("json_schema", text))


def test_chains_of_references_alone_are_followed() -> None:
    assert accepts(chained(2500, lambda ref: ref), "12")
    assert accepts(chained(150, lambda ref: {"type": "object", "properties": {"a": ref}}), '{"a":{"a":{}}}')


def test_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_size, "NODES", 3)
    monkeypatch.setattr(schema_size, "NESTING", 2)
    assert bounded_schema({"type": "array", "items": {"type": "null"}})
    with pytest.raises(ConfigError, match="more than 3 schemas"):
        bounded_schema({"enum": [1, 2, 3]})
    monkeypatch.setattr(schema_size, "NODES", 10)
    with pytest.raises(ConfigError, match="nested deeper than 2"):
        bounded_schema(nested("items", 3))


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (
            "gbnf",
            'root ::= r0\nr9000 ::= "x"\n' + "".join(f"r{i} ::= r{i + 1}\n" for i in range(9000)),
            "9002 rules",
        ),
        (
            "gbnf",
            'root ::= r0\nr900 ::= "x"\n' + "".join(f"r{i} ::= r{i + 1}\n" for i in range(900)),
            "200 deep",
        ),
        ("lark", 'start: r0\nr3000: "x"\n' + "".join(f"r{i}: r{i + 1}\n" for i in range(3000)), "200 deep"),
        ("lark", 'start: R0\nR900: "x"\n' + "".join(f"R{i}: R{i + 1}\n" for i in range(900)), "200 deep"),
        ("regex", "a" * (1 << 20), "1048576 characters"),
    ],
)
def test_grammars_of_too_many_rules_are_refused(kind: Any, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        COMPILER.matcher(GrammarSpec(kind, text))


@pytest.mark.parametrize(
    ("kind", "defines", "quoted"),
    [
        ("gbnf", "::=", '"{}"'),
        ("gbnf", "::=", "[{}]"),
        ("gbnf", "::=", "# {}"),
        ("lark", ":", '"{}"'),
        ("lark", ":", "/{}/"),
        ("lark", ":", "// {}"),
    ],
)
def test_quoted_names_are_no_references(kind: Any, defines: str, quoted: str) -> None:
    """Names of rules in strings, patterns, classes and comments make no chain; bare ones do."""

    def grammar(reference: str) -> str:
        return "\n".join(f"r{i} {defines} {reference.format(f'r{i + 1}')}" for i in range(1000))

    check_text(kind, grammar(quoted))
    with pytest.raises(ConfigError, match="200 deep"):
        check_text(kind, grammar("{}"))


def test_a_text_without_rules_is_left_to_the_compiler() -> None:
    check_text("lark", "no rules at all")
    with pytest.raises(ConfigError, match="grammar .lark.: "):
        COMPILER.matcher(GrammarSpec("lark", "no rules at all"))


def test_compiled_grammars_are_kept_and_the_last_ones_only() -> None:
    made: list[GrammarSpec] = []
    compiler = GrammarCompiler(TOKENIZER, TOKENIZER.n_vocab, vet=made.append)
    first, *others = (GrammarSpec("regex", f"a{i}b") for i in range(17))
    one = compiler.matcher(first)
    assert one.consume_token(TOKENIZER.encode("a")[0])
    assert allowed(compiler.matcher(first)) == {TOKENIZER.encode("a")[0]}  # a copy, at its start
    assert made == [first]
    for spec in others:
        compiler.matcher(spec)
    compiler.matcher(first)
    assert made == [first, *others, first]


def test_a_thousand_fields_may_be_left_out() -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}
    assert accepts(schema, '{"p7":"x","p900":""}') and not accepts(schema, '{"p900":"","p7":"x"}')
    assert allowed(COMPILER.matcher(json_schema_spec(schema)))
    assert answer(schema, 0)


KEYWORDS = """type properties required items prefixItems additionalProperties patternProperties anyOf oneOf allOf $ref
$defs $id $anchor const enum minimum maximum exclusiveMinimum multipleOf minLength maxLength pattern format minItems
maxItems unevaluatedProperties not additionalItems a"""
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([10**30, "#", "#/$defs/a", "a", "object", "number"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS.split()), inner, max_size=4)
    ),
    max_leaves=12,
)


# schemas that make sense but for a keyword
BENT = st.builds(
    lambda schema, keyword, value: {**schema, keyword: value},
    P.filter(lambda schema: isinstance(schema, dict)),
    st.sampled_from(KEYWORDS.split()),
    ANYTHING,
)


@settings(max_examples=200)
@given(ANYTHING | BENT, st.integers(0, 99))
@example({"anyOf": [{"type": "object", "properties": {"a": {}}}], "properties": None}, 0)
@example({"anyOf": [{"patternProperties": {"a": {}}, "properties": {}}], "patternProperties": []}, 0)
@example({"pattern": "#"}, 4)
@example({"pattern": "#/$defs/a"}, 0)
def test_any_schema_binds_or_is_an_error_by_name(schema: Any, seed: int) -> None:
    """Whatever it is: ConfigError and nothing else, or a grammar whose answers end and fit the schema where it is a valid one."""
    try:
        text = answer(schema, seed)
    except ConfigError:
        return
    except NoEnd:  # a string without maxLength may continue, and what a pattern wants is not met by chance
        assert "pattern" in json.dumps(schema)
        return
    value = json.loads(text)
    if SchemaReader(schema).left_out(schema):
        return
    with contextlib.suppress(jsonschema.SchemaError):
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.Draft202012Validator(schema).validate(value)


@settings(max_examples=100)
@given(ANYTHING, st.sampled_from(["json", "xml", "keys"]))
def test_any_parameters_of_a_tool_bind_or_are_an_error_by_name(properties: Any, form: Any) -> None:
    with contextlib.suppress(ConfigError):
        spec = forced_call_grammar({"f": ToolSchema({"properties": properties})}, form, several=False)
        assert allowed(COMPILER.matcher(spec))


def test_numbers_of_too_many_digits_are_errors_by_name() -> None:
    for keyword in ("multipleOf", "minimum", "const", "maxLength"):
        with pytest.raises(ConfigError, match="multipleOf|too many digits"):
            COMPILER.matcher(json_schema_spec({keyword: 10**5000}))
        with pytest.raises(ConfigError, match="multipleOf|too many digits"):
            COMPILER.matcher(GrammarSpec("json_schema", f'{{"{keyword}": 1{"0" * 5000}}}'))
