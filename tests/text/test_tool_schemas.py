"""Tests of tool schemas in every form that JSON Schema has for an argument: parsed, constrained and read back alike."""

from __future__ import annotations

import contextlib
import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("llguidance", reason="the grammar extra is not installed")

from dflash_ggml.errors import ConfigError
from dflash_ggml.text.chat_parser import ChatParser
from dflash_ggml.text.deltas import ToolCallArgs, ToolCallBegin
from dflash_ggml.text.grammar import GrammarCompiler
from dflash_ggml.text.grammar_spec import json_schema_spec
from dflash_ggml.text.schema_fault import find_fault
from dflash_ggml.text.schema_reading import SchemaReader, is_regex
from dflash_ggml.text.tool_grammar import forced_call_grammar, inner_call_grammar
from dflash_ggml.text.tool_schema import ToolSchema
from dflash_ggml.text.tools import check_tools
from reference.fake_engine import byte_vocabulary

TOKENIZER = byte_vocabulary()
COMPILER = GrammarCompiler(TOKENIZER, TOKENIZER.n_vocab)
FORMS = ("xml", "keys", "json")
INTEGER, STRING = {"type": "integer"}, {"type": "string"}
N = {"type": "object", "properties": {"n": INTEGER}, "required": ["n"]}


def checked(parameters: Any, name: str = "f") -> dict[str, ToolSchema]:
    return check_tools([{"type": "function", "function": {"name": name, "parameters": parameters}}])


def written(form: str, *arguments: tuple[str, str], name: str = "f") -> str:
    """A call as a model writes it, in a form with tags."""
    if form == "keys":
        inner = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments)
        return f"<tool_call>{name}\n{inner}</tool_call>"
    inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def read(text: str, schemas: dict[str, ToolSchema]) -> list[Any]:
    """The arguments of the calls in a text."""
    parser, calls = ChatParser(reasoning="closed", schemas=schemas), []
    for event in parser.feed(text) + parser.flush():
        if isinstance(event, ToolCallBegin):
            calls.append("")
        elif isinstance(event, ToolCallArgs):
            calls[event.index] += event.json
    return [json.loads(call) for call in calls]


def accepts(spec: Any, text: str) -> bool:
    matcher = COMPILER.matcher(spec)
    ids = TOKENIZER.encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())


# schema -> what is written for an argument, and its value
READ: dict[str, tuple[Any, str, str, Any]] = {
    "a bare root reference": ({"$ref": "#/$defs/N", "$defs": {"N": N}}, "n", "20", 20),
    "definitions": ({"$ref": "#/definitions/N", "definitions": {"N": N}}, "n", "20", 20),
    "an anchor": ({"$ref": "#n", "$defs": {"N": {**N, "$anchor": "n"}}}, "n", "20", 20),
    "a reference to the id": ({"$id": "urn:x", "$ref": "urn:x#/$defs/N", "$defs": {"N": N}}, "n", "20", 20),
    "a dynamic reference": ({"$dynamicRef": "#n", "$defs": {"N": {**N, "$dynamicAnchor": "n"}}}, "n", "20", 20),
    "references to references": (
        {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"allOf": [{"$ref": "#/$defs/N"}]}, "N": N}},
        "n",
        "20",
        20,
    ),
    "a recursive model": (
        {
            "$ref": "#/$defs/T",
            "$defs": {"T": {"properties": {"n": INTEGER, "next": {"anyOf": [{"$ref": "#/$defs/T"}, {"type": "null"}]}}}},
        },
        "next",
        '{"n": 2, "next": null}',
        {"n": 2, "next": None},
    ),
    "allOf": ({"allOf": [{"properties": {"s": STRING}}, N]}, "n", "20", 20),
    "anyOf": ({"anyOf": [{"properties": {"s": STRING}}, N]}, "n", "20", 20),
    "oneOf": ({"oneOf": [{"properties": {"s": STRING}}, {"allOf": [N]}]}, "n", "20", 20),
    "branches that differ": (
        {"anyOf": [{"properties": {"v": INTEGER}}, {"properties": {"v": {"type": "boolean"}}}]}, "v", "true", True,
    ),
    "types that exclude each other": (
        {"properties": {"v": {"enum": ["a"], "allOf": [{"allOf": [INTEGER, STRING]}]}}}, "v", "b", "b",
    ),
    "a branch that nothing fits": (
        {"properties": {"v": {"anyOf": [INTEGER, {"allOf": [STRING, INTEGER]}]}}}, "v", "3", 3,
    ),
    "a condition": ({"if": {"required": ["s"]}, "then": N, "else": {}}, "n", "20", 20),
    "a schema that depends": ({"dependentSchemas": {"s": N}}, "n", "20", 20),
    "beside a reference": ({"properties": {"s": STRING}, "$ref": "#/$defs/N", "$defs": {"N": N}}, "n", "20", 20),
    "additional ones": ({"additionalProperties": INTEGER}, "anything", "20", 20),
    "unevaluated ones": ({"unevaluatedProperties": INTEGER}, "anything", "20", 20),
    "by pattern": (
        {"patternProperties": {"^n_": INTEGER, "^b_": {"type": "boolean"}, "^(?!x)": STRING}}, "n_1", "x20", "x20",
    ),
    "by one pattern": ({"patternProperties": {"^n_": INTEGER, "^b_": STRING}}, "n_1", "20", 20),
    "an argument by reference": (
        {"properties": {"v": {"$ref": "#/$defs/V"}}, "$defs": {"V": {"$ref": "#/$defs/W"}, "W": {"type": "array"}}},
        "v", "[1]", [1],
    ),
    "a reference with a description": (
        {"properties": {"v": {"allOf": [{"$ref": "#/$defs/V"}], "description": "d"}}, "$defs": {"V": INTEGER}},
        "v", "20", 20,
    ),
    "a reference into properties": ({"properties": {"a": INTEGER, "v": {"$ref": "#/properties/a"}}}, "v", "20", 20),
    "a list of types": ({"properties": {"v": {"type": ["integer", "null"]}}}, "v", "null", None),
    "a list of types with text": ({"properties": {"v": {"type": ["integer", "string"]}}}, "v", "20", "20"),
    "both of two types": (
        {"properties": {"v": {"allOf": [{"type": ["integer", "string"]}, {"type": "number"}]}}}, "v", "20", 20,
    ),
    "const": ({"properties": {"v": {"const": 3}}}, "v", "3", 3),
    "enum of numbers": ({"properties": {"v": {"enum": [1, 2.5]}}}, "v", "2.5", 2.5),
    "enum of words and numbers": ({"properties": {"v": {"enum": ["auto", 1, True]}}}, "v", "1", 1),
    "enum of words and booleans": ({"properties": {"v": {"enum": ["auto", 1, True]}}}, "v", "true", True),
    "enum of digits": ({"properties": {"v": {"enum": ["1", "2"]}}}, "v", "1", "1"),
    "enum with a type": ({"properties": {"v": {"type": "integer", "enum": [1, 2]}}}, "v", "1", 1),
    "a word beside numbers": ({"properties": {"v": {"anyOf": [{"const": "all"}, {"enum": [1, 2]}]}}}, "v", "2", 2),
    "constants in a union": ({"properties": {"v": {"anyOf": [{"const": 1}, {"const": "a"}]}}}, "v", "1", 1),
    "told by its bounds": ({"properties": {"v": {"minimum": 3}}}, "v", "20", 20),
    "told by its items": ({"properties": {"v": {"items": {}}}}, "v", "[1]", [1]),
    "told by its properties": ({"properties": {"v": {"properties": {"a": {}}}}}, "v", '{"a": 1}', {"a": 1}),
    "told by its length": ({"properties": {"v": {"minLength": 1}}}, "v", "20", "20"),
    "nullable": ({"properties": {"v": {"type": "integer", "nullable": True}}}, "v", "null", None),
    "nullable by reference": (
        {"properties": {"v": {"allOf": [{"$ref": "#/$defs/V"}], "nullable": True}}, "$defs": {"V": INTEGER}},
        "v", "null", None,
    ),
    "another name of a type": ({"properties": {"v": {"type": "Float"}}}, "v", "2.5", 2.5),
    "any type": ({"properties": {"v": {"type": "any"}}}, "v", "20", "20"),
    "nothing said": ({"properties": {"v": {}}}, "v", "20", "20"),
    "null for what is left out": ({"properties": {"v": {"type": "integer", "enum": None, "$ref": None}}}, "v", "20", 20),
    "names of a kind": (
        {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INTEGER}, "a", "20", 20,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_an_argument_has_the_type_that_its_schema_gives_it(name: str) -> None:
    parameters, key, text, value = READ[name]
    schemas = checked({"type": "object", **parameters})
    for form in ("xml", "keys"):
        found = read(written(form, (key, text)), schemas)
        assert found == [{key: value}] and type(found[0][key]) is type(value)


# schema -> the arguments of a call that it allows (None: as tags cannot hold it to the schema, JSON is written), and one
# that it does not
BOUND: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "a bare root reference": ({"$ref": "#/$defs/N", "$defs": {"N": N}}, {"n": 20}, {}),
    "allOf": ({"allOf": [{"properties": {"s": STRING}, "required": ["s"]}, N]}, {"s": "x", "n": 2}, {"n": 2}),
    "beside a reference": (
        {"properties": {"s": STRING}, "required": ["s"], "$ref": "#/$defs/N", "$defs": {"N": N}},
        {"s": "x", "n": 1},
        {"s": "x"},
    ),
    "additional ones": ({"additionalProperties": INTEGER}, {"a": 1, "b b": 2}, {"a": "x"}),
    "additional ones beside others": (
        {"properties": {"s.x": STRING}, "additionalProperties": INTEGER},
        {"s.x": "1", "sax": 2},
        {"s": "x"},
    ),
    "any": ({"type": "object"}, {"a": "x"}, {"a<": "x"}),
    "none": ({"type": "object", "properties": {}}, {}, {"a": "x"}),
    "no more than those": ({**N, "additionalProperties": False}, {"n": 1}, {"n": 1, "m": 2}),
    "a name that is only required": ({"required": ["s"], "properties": {}}, {"s": "x"}, {}),
    "enum of words and numbers": (
        {"properties": {"v": {"enum": ["auto", 1, None]}}, "required": ["v"]},
        {"v": 1},
        {"v": 2},
    ),
    "words or null": (
        {"properties": {"v": {"anyOf": [{"enum": ["a"]}, {"type": "null"}]}}, "required": ["v"]},
        {"v": None},
        {"v": "b"},
    ),
    "words by reference": (
        {"properties": {"v": {"$ref": "#/$defs/V"}}, "$defs": {"V": {"type": "string", "enum": ["a"]}}},
        {"v": "a"},
        {"v": "b"},
    ),
    "nothing said": ({"properties": {"v": {"description": "d"}}, "required": ["v"]}, {"v": "x"}, {}),
}


@pytest.mark.parametrize("name", BOUND)
@pytest.mark.parametrize("form", ["xml", "keys"])
def test_calls_between_tags_are_held_to_the_schema(name: str, form: Any) -> None:
    parameters, good, bad = BOUND[name]
    schemas = checked(parameters)
    spec = forced_call_grammar(schemas, form, several=False)

    def text(arguments: dict[str, Any]) -> str:
        values = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
        return written(form, *values.items())

    assert accepts(spec, text(good)) and read(text(good), schemas) == [good]
    jsonschema.validate(good, parameters)
    assert not accepts(spec, text(bad))


# what text between tags cannot express or be constrained to: such tools are called by JSON
@pytest.mark.parametrize(
    ("parameters", "good", "bad"),
    [
        (
            {"properties": {"v": {"$ref": "#/$defs/V"}}, "$defs": {"V": {"type": "string", "pattern": "^a+$"}}},
            '{"v": "aa"}', '{"v": "b"}',
        ),
        ({"properties": {"v": {"anyOf": [{"type": "string", "maxLength": 1}, INTEGER]}}}, '{"v": "a"}', '{"v": "ab"}'),
        ({"properties": {"v": {"anyOf": [{"const": "a"}, INTEGER]}}}, '{"v": 2}', '{"v": "b"}'),
        ({"properties": {"v": {"anyOf": [STRING, {"type": "array", "items": INTEGER}]}}}, '{"v": [1]}', '{"v": ["a"]}'),
        ({"properties": {"v": {"enum": ["a", "abc"], "maxLength": 2}}}, '{"v": "a"}', '{"v": "abc"}'),
        ({"properties": {"v": {"enum": ["</parameter>", "a"]}}}, '{"v": "a"}', '{"v": "b"}'),
        ({"anyOf": [N, {"properties": {"s": STRING}, "required": ["s"]}]}, '{"s": "x"}', "{}"),
        ({"patternProperties": {"^n": INTEGER}, "additionalProperties": False}, '{"n1": 1}', '{"m": 1}'),
        ({"propertyNames": {"pattern": "^n"}, "additionalProperties": INTEGER}, '{"n1": 1}', '{"m": 1}'),
        ({"additionalProperties": INTEGER, "minProperties": 1}, '{"a": 1}', "{}"),
        ({"properties": {"v": False, "w": INTEGER}}, '{"w": 1}', '{"v": 1}'),
        ({"allOf": [{**N, "additionalProperties": INTEGER}, {"properties": {"m": STRING}}]}, '{"n": 1}', '{"n": "x"}'),
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", FORMS)
def test_other_calls_are_written_as_json(parameters: Any, good: str, bad: str, form: Any) -> None:
    schemas = checked(parameters)
    spec = forced_call_grammar(schemas, form, several=False)
    line = "" if form == "keys" else "\n"
    text = f'<tool_call>{line}{{"name": "f", "arguments": {{}}}}{line}</tool_call>'
    assert accepts(spec, text.replace("{}", good)) and read(text.replace("{}", good), schemas) == [
        json.loads(good)
    ]
    jsonschema.validate(json.loads(good), parameters)
    assert not accepts(spec, text.replace("{}", bad))


ARGUMENT = st.deferred(
    lambda: st.one_of(
        st.sampled_from(
            [INTEGER, STRING, {"type": "boolean"}, {"type": ["integer", "null"]}, {"type": ["string", "null"]}, {}, True,
             {"enum": ["a", "b c"]}, {"enum": ["a", 1, None]}, {"enum": [1, 2.5]}, {"const": "k"}, {"const": {"a": 1}},
             {"type": "string", "maxLength": 2}, {"type": "array", "items": INTEGER, "maxItems": 2}, {"$ref": "#/$defs/E"},
             {"$ref": "#/$defs/L"}, {"type": "object", "properties": {"q": INTEGER}}, {"type": "number", "maximum": 3}]
        ),
        st.lists(ARGUMENT, min_size=1, max_size=2).flatmap(
            lambda subs: st.sampled_from([{"anyOf": subs}, {"allOf": subs}])
        ),
    )
)  # fmt: skip
NAMES = st.sampled_from(["a", "b", "c d", "e.f"])
OBJECT = st.fixed_dictionaries(
    {},
    optional={
        "properties": st.dictionaries(NAMES, ARGUMENT, max_size=3),
        "required": st.lists(NAMES, unique=True, max_size=2),
        "additionalProperties": st.booleans() | ARGUMENT,
        "propertyNames": st.sampled_from([STRING, {"enum": ["a", "b"]}, {"pattern": "^a"}]),
    },
)
DEFS = {"E": {"type": "string", "enum": ["x", "y"]}, "L": {"anyOf": [STRING, INTEGER]}, "N": N}
PARAMETERS = st.one_of(
    OBJECT,
    OBJECT,
    st.builds(lambda a, b: {**a, "allOf": [b, {"$ref": "#/$defs/N"}]}, OBJECT, OBJECT),
    st.builds(lambda a, b: {**a, "anyOf": [b, {"$ref": "#/$defs/N"}]}, OBJECT, OBJECT),
    st.just({"$ref": "#/$defs/N"}),
)
ENDINGS = {"xml": ["\n</parameter>\n", "</function>"], "keys": ["</arg_value>", "</arg_key>"], "json": []}
PRINTABLE = {TOKENIZER.id_of(c) for c in map(chr, range(0x21, 0x7F)) if c != "\\"}
PRINTABLE |= {TOKENIZER.encode(c)[0] for c in " \n"}


def may_come(matcher: Any) -> set[int]:
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return set(np.flatnonzero(np.unpackbits(bits, bitorder="little", count=TOKENIZER.n_vocab)).tolist())


def random_call(spec: Any, form: str, seed: int) -> str:
    """A random text that a grammar of calls allows; soon it closes whatever is open."""
    matcher, rng, ids = COMPILER.matcher(spec), random.Random(seed), []
    for step in range(1000):
        may = may_come(matcher)
        if may & TOKENIZER.eog_ids and (step > 100 or rng.random() < 0.5 or may <= TOKENIZER.eog_ids):
            return TOKENIZER.decode(ids, special=True)
        tokens = [rng.choice(sorted(may & PRINTABLE or may - TOKENIZER.eog_ids))]
        if step > 60 or rng.random() < 0.3:
            ends = map(TOKENIZER.encode, (*ENDINGS[form], *'"}]>', "\n</tool_call>", "</tool_call>"))
            tokens = rng.choice(
                [e for e in ends if matcher.deep_copy().try_consume_tokens(e) == len(e)] or [tokens]
            )
        assert matcher.try_consume_tokens(tokens) == len(tokens)
        ids += tokens
    raise AssertionError(f"no end: {TOKENIZER.decode(ids)[:300]}")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(PARAMETERS, st.sampled_from(FORMS), st.integers(0, 1 << 20))
def test_every_forced_call_reads_back_as_arguments_that_fit(parameters: Any, form: Any, seed: int) -> None:
    """Whatever the schema and the form: the grammar's calls end, and are valid for the schema as it was."""
    schema = {"type": "object", **parameters, "$defs": DEFS}
    schemas = checked(schema)
    spec = forced_call_grammar(schemas, form, several=False)
    try:
        COMPILER.matcher(spec)
    except ConfigError as error:
        assert "nsatisfiable" in str(error)
        return
    text = random_call(spec, form, seed)
    calls = read(text, schemas)
    assert len(calls) == 1, text
    if not SchemaReader(schema).left_out(schema):
        jsonschema.Draft202012Validator(schema).validate(calls[0])


@pytest.mark.parametrize(
    "where",
    [
        {"$ref": "#/$defs/x"},
        {"properties": {"n": {"$ref": "#/$defs/x"}}},
        {"properties": {"n": {"type": "array", "items": {"$ref": "https://example.com/x.json"}}}},
        {"anyOf": [{"properties": {"n": {"$ref": "#x"}}}]},
        {"allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": {"additionalProperties": {"$ref": "#/$defs/x"}}}},
        {"not": {"$ref": "#/$defs/x"}},
        {"properties": {"n": {"contains": {"$ref": "#/$defs/x"}}}},
    ],
)
def test_a_reference_that_names_nothing_is_refused_by_tool_and_argument(where: Any) -> None:
    """Whether the schema binds anything or not."""
    named = "f: n.*names no schema" if "properties" in where else "f: .*names no schema"
    with pytest.raises(ConfigError, match=rf"^tools\[0\].function.parameters: {named}"):
        checked(where)
    # an unreferenced definition is not checked
    checked({"type": "object", "$defs": {"unused": where}})
    checked({"type": "object", "properties": {"n": {"default": {"$ref": "#/$defs/x"}}}})


# --- keywords without effect, and unsupported ones

ARRAY = {"type": "array", "items": INTEGER}


@pytest.mark.parametrize(
    ("schema", "left_out"),
    [
        # has no effect
        ({"type": "object", "propertyNames": STRING, "additionalProperties": INTEGER}, []),
        ({"propertyNames": {"type": "any"}}, []),
        ({"propertyNames": {"$ref": "#/$defs/S"}, "$defs": {"S": STRING}}, []),
        ({"type": "any"}, []),
        ({"type": ["any", "null"]}, []),
        ({**ARRAY, "uniqueItems": False}, []),
        ({**ARRAY, "minContains": 1}, []),
        ({"then": INTEGER, "else": STRING}, []),
        ({"if": INTEGER}, []),
        ({"not": False}, []),
        ({"not": {}}, []),  # allows nothing
        ({"dependentRequired": {}, "dependentSchemas": {}, "dependencies": {}}, []),
        ({"type": "string", "pattern": None, "format": None, "enum": None}, []),
        ({"properties": {"a": {"type": "string", "required": True}}}, []),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": False}, []),
        # another keyword covers it
        ({"propertyNames": {"enum": ["a"]}, "additionalProperties": INTEGER}, []),
        ({"propertyNames": {"type": "string", "pattern": "^a"}}, []),
        ({"unevaluatedProperties": INTEGER}, []),
        ({"prefixItems": [STRING], "unevaluatedItems": False}, []),
        ({"$recursiveRef": "#"}, []),
        # nothing does
        ({"properties": {"a": {**ARRAY, "uniqueItems": True}}}, ["a: uniqueItems"]),
        ({"properties": {"a": {"type": "string", "pattern": "^(?=.*x).*$"}}}, ["a: pattern"]),
        ({"items": {"type": "string", "pattern": r"(a)\1"}}, ["[]: pattern"]),
        ({"patternProperties": {"^(?!_)": INTEGER, "^b": STRING}}, ["patternProperties"]),
        ({"propertyNames": {"minLength": 2}}, ["propertyNames"]),
        ({"propertyNames": {"enum": ["a", "bc"], "minLength": 2}}, ["propertyNames"]),
        ({"not": STRING}, ["not"]),
        ({"if": N, "then": INTEGER}, ["if, then"]),
        ({"properties": {"a": {"contains": INTEGER, "minContains": 2}}}, ["a: contains, minContains"]),
        ({"dependentRequired": {"a": ["b"]}}, ["dependentRequired"]),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"x": {"$ref": "#/$defs/b"}}}, "b": {"not": STRING}}},
            ["x: not"],
        ),
        (
            {"allOf": [N, {"unevaluatedProperties": False, "$ref": "#/$defs/N"}], "$defs": {"N": N}},
            ["allOf[1]: unevaluatedProperties"],
        ),
    ],
)  # fmt: skip
def test_empty_keywords_are_dropped_and_unsupported_ones_named(schema: Any, left_out: list[str]) -> None:
    assert SchemaReader(schema).left_out(schema) == left_out
    assert COMPILER.refusal(schema) == "" or schema in ({"not": {}}, {"$recursiveRef": "#"})


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "object", "propertyNames": STRING, "additionalProperties": INTEGER}, '{"a": 1}', '{"a": "x"}'),
        ({"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INTEGER}, '{"a": 1}', '{"c": 1}'),
        (
            {"type": "object", "propertyNames": {"$ref": "#/$defs/K"}, "$defs": {"K": {"enum": ["a"]}}},
            '{"a": [1]}', '{"c": 1}',
        ),
        ({"type": "object", "propertyNames": {"pattern": "^a"}, "additionalProperties": INTEGER}, '{"ab": 1}', '{"b": 1}'),
        ({"type": "string", "pattern": "^(?=.*x).*$", "maxLength": 3}, '"abc"', '"abcd"'),
        ({"type": "array", "items": INTEGER, "uniqueItems": True}, "[1, 1]", '["a"]'),
        ({"type": "array", "prefixItems": [STRING], "unevaluatedItems": False}, '["a"]', '["a", 1]'),
        ({"type": "object", "properties": {"a": {"not": {}}, "b": INTEGER}}, '{"b": 1}', '{"a": 1}'),
        ({"type": "object", "properties": []}, "{}", '{"a": 1}'),
        ({"type": "float", "minimum": 3, "exclusiveMinimum": True}, "3.5", "3"),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": False}, "3", "2"),
        ({"type": "string", "minLength": 2.0, "maxLength": 3.0}, '"abc"', '"a"'),
        ({"$schema": "https://example.com/dialect", "type": "integer"}, "3", '"a"'),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": [INTEGER]}, "[3]", '["a"]'),
    ],
)  # fmt: skip
def test_the_rest_binds(schema: Any, good: str, bad: str) -> None:
    assert accepts(json_schema_spec(schema), good) and not accepts(json_schema_spec(schema), bad)


def test_names_of_types_become_those_of_json_schema() -> None:
    """Only where a type is named: data and arguments called `type` stay as they are."""
    schema = {
        "type": "dict",
        "properties": {
            "type": {"type": ["str", "null"]},
            "default": {"type": "FLOAT", "default": {"type": "float"}, "enum": [{"type": "float"}, 2.5]},
            "rows": {"type": "list", "items": {"type": "int"}},
        },
    }
    declared = {path: declared for path, declared, _ in SchemaReader(schema).walk(schema)}
    kinds = {path: one.get("type") for path, one in declared.items()}
    assert kinds == {
        "": "object",
        "type": ["string", "null"],
        "default": "number",
        "rows": "array",
        "rows[]": "integer",
    }
    assert declared["default"]["enum"] == [{"type": "float"}, 2.5]


# --- refusals


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"n": {"type": "integer", "minimum": 5, "maximum": 3}}, "required": ["n"]}, "^tools: f: n: .*minimum"),
        ({"properties": {"n": {"type": "integer", "minimum": 5, "maximum": 3}}}, "^tools: f: n: .*minimum"),
        ({"properties": {"n": {"type": "strin"}}}, "^tools: f: n: .*strin"),
        (
            {"properties": {"a": {"items": {"properties": {"n": {"oneOf": [INTEGER, {"type": "number"}]}}}}}},
            r"^tools: f: a\[\].n: oneOf",
        ),
        ({"$ref": "#/$defs/N", "$defs": {"N": {"properties": {"n": {"enum": 3}}}}}, "^tools: f: n: .*enum"),
        ({"properties": {"n": {"minItems": 10**9}}}, "^tools: f: n: minItems 1000000000 is above"),
        ({"required": "n"}, "^tools: f: .*required"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", FORMS)
def test_a_refusal_names_the_tool_and_the_argument(schema: Any, words: str, form: Any) -> None:
    fault = find_fault({"tools: g": N, "tools: f": {"type": "object", **schema}}, COMPILER.refusal)
    assert fault is not None and re.search(words, fault), fault
    assert "%json" not in fault and " | " not in fault


def test_there_is_no_fault_in_what_compiles() -> None:
    recursive = {"$ref": "#/$defs/T", "$defs": {"T": {"properties": {"next": {"$ref": "#/$defs/T"}}}}}
    assert find_fault({"tools: f": N, "tools: g": recursive}, COMPILER.refusal) is None
    assert find_fault({}, COMPILER.refusal) is None


# --- the end


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("answer", [None, '{"type": "integer"}'])
def test_whatever_follows_the_last_call_it_may_end_there(form: Any, answer: str | None) -> None:
    schemas = checked(N)
    spec = forced_call_grammar(schemas, form, several=True, answer=answer)
    call = written(form, ("n", "3"))
    if form == "json":
        call = '<tool_call>\n{"name": "f", "arguments": {"n": 3}}\n</tool_call>'
    for n in (1, 2):
        matcher = COMPILER.matcher(spec)
        ids = TOKENIZER.encode("\n".join([call] * n))
        assert matcher.try_consume_tokens(ids) == len(ids)
        for step in range(12):
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            may = set(
                np.flatnonzero(np.unpackbits(bits, bitorder="little", count=TOKENIZER.n_vocab)).tolist()
            )
            assert may & TOKENIZER.eog_ids
            blanks = [i for i in may - TOKENIZER.eog_ids if not TOKENIZER.decode([i], special=True).strip()]
            if not blanks:
                break
            assert matcher.consume_token(blanks[step % len(blanks)])
        assert 2 <= step < 12  # some blanks, but not for ever
    for behind in ("\n", "\n\n", " \n", "\r\n"):
        assert accepts(spec, call + behind) and accepts(spec, call + behind + call)
    # one call alone ends with itself
    once = forced_call_grammar(schemas, form, several=False)
    assert accepts(once, call) and not accepts(once, call + "\n")


@pytest.mark.parametrize("form", FORMS)
def test_a_strict_call_ends_where_the_model_closes_it(form: Any) -> None:
    matcher = COMPILER.matcher(inner_call_grammar(checked(N), form))
    call = (
        '<tool_call>\n{"name": "f", "arguments": {"n": 3}}\n</tool_call>'
        if form == "json"
        else written(form, ("n", "3"))
    )
    ids = TOKENIZER.encode(call)[1:]
    assert matcher.try_consume_tokens(ids) == len(ids) and matcher.is_stopped()


KEYWORDS = """type properties required items additionalProperties patternProperties anyOf allOf $ref $defs const enum
pattern propertyNames not if then dependentSchemas unevaluatedItems nullable a"""
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from(["#", "#/$defs/a", "a", "object", "any", "integer", "^(?=a)"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS.split()), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(ANYTHING.filter(lambda value: isinstance(value, dict)))
def test_any_schema_is_read_or_refused_by_name(schema: Any) -> None:
    with contextlib.suppress(ConfigError):
        schemas = checked(schema)
        assert len(read(written("xml", ("a", "1"), ("b", "{}")), schemas)) == 1
    with contextlib.suppress(ConfigError):
        SchemaReader(schema).left_out(schema)
    with contextlib.suppress(ConfigError):
        find_fault({"tools: f": schema}, COMPILER.refusal)


@pytest.mark.parametrize(
    "pattern",
    [
        "^(?=a)b", "^(?!a)b", "(?<=a)b", "(?<!a)b", r"(a)\1", r"(?<n>a)\k<n>", r"\d{3}\b", r"\B", r"\cA", r"\Z", r"\e", r"\0",
        "[^]", "[]", r"[\b]", "[[a]", "{", "a{", "a{,3}", "^{.*}$", r"\<a",
    ],
)  # fmt: skip
def test_patterns_without_words_are_recognised(pattern: str) -> None:
    """What the compiler refuses of what other dialects allow; what it understands stays."""
    schema = {"type": "string", "pattern": pattern}
    assert not is_regex(pattern)
    assert COMPILER._library.LLMatcher.validate_grammar(
        COMPILER._library.LLMatcher.grammar_from_json_schema(json.dumps(schema)), None
    )
    assert accepts(json_schema_spec(schema), '"whatever"')


@pytest.mark.parametrize(
    "pattern",
    [
        r"\/a", r"\u0041", r"\x41", r"\p{L}+", r"[\w-]+", r"[\]\[]", "[(?=]", "[{]", r"\{\}", "a{2}", "a{2,}", "a{2,3}", "(?i)a",
        "(?:a|b)", "(?<n>a)", "[[:alpha:]]", r"\\b", r"\\(a)", r"^\S+@\S+$", r"[^@\s]", "^$", "", "}", "]", "é",
    ],
)  # fmt: skip
def test_patterns_that_are_understood(pattern: str) -> None:
    assert is_regex(pattern) and COMPILER.refusal({"type": "string", "pattern": pattern}) == ""
