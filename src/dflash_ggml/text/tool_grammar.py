"""Grammars that make the model call a tool: any of several, or one by name, with arguments that fit its schema."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .bounded_schema import bounded_schema
from .call_opening import END_ARG_VALUE
from .grammar import JSON_OPTIONS
from .grammar_spec import GrammarSpec, dump_schema, load_schema
from .template import ToolFormat
from .tools import value_types

Schemas = Mapping[str, Mapping[str, Any]]

# keywords that free text between parameter tags cannot enforce; such tools are called in the JSON form
_STRING_LIMITS = ("pattern", "format", "minLength", "maxLength", "contentEncoding")
_OBJECT_LIMITS = (
    "anyOf",
    "oneOf",
    "allOf",
    "not",
    "if",
    "patternProperties",
    "dependentRequired",
    "minProperties",
)
_LINES = ("lead: /\\n{0,2}/", "gap: /\\n?/")
_END_VALUE = "\n</parameter>\n"
_INNER_KEYED = r"<\/arg_value>|<\/tool_call>"
_INNER_ENDS = r"<\/parameter>|\n<parameter=|\n<\/function>|<\/tool_call>"


def forced_call_grammar(
    schemas: Schemas, form: ToolFormat, *, several: bool, special_tags: frozenset[str] = frozenset()
) -> GrammarSpec:
    """A grammar of one call (or `several`) of the tools in `schemas` (name -> argument schema) and nothing else.

    form: as the model was taught; special_tags: tags that are control tokens of the vocabulary.
    """
    start = f"start: lead block{' (gap block)*' if several else ''}"
    return _grammar([start, *_LINES, f"block: CALL {_inside(form)} END_CALL"], schemas, form, special_tags)


def call_or_answer_grammar(
    schemas: Schemas,
    form: ToolFormat,
    answer: str,
    *,
    several: bool,
    special_tags: frozenset[str] = frozenset(),
) -> GrammarSpec:
    """As forced_call_grammar, or else a text that fits the JSON schema `answer` (JSON text)."""
    start = f"start: lead (block{' (gap block)*' if several else ''} | answer)"
    blocks = [*_LINES, f"block: CALL {_inside(form)} END_CALL"]
    return _grammar([start, *blocks], schemas, form, special_tags, [f"answer: {_json(load_schema(answer))}"])


def inner_call_grammar(
    schemas: Schemas, form: ToolFormat, *, special_tags: frozenset[str] = frozenset()
) -> GrammarSpec:
    """What follows a `<tool_call>` tag that the model wrote of its own accord, to the closing tag."""
    return _grammar([f"start: {_inside(form)} END_CALL"], schemas, form, special_tags)


def _inside(form: ToolFormat) -> str:
    """What stands between the tags around a call."""
    return "call" if form == "keys" else '"\\n" call "\\n"'


def _grammar(
    start: list[str],
    schemas: Schemas,
    form: ToolFormat,
    special_tags: frozenset[str],
    more: Sequence[str] = (),
) -> GrammarSpec:
    for name, tag in (("END_CALL", "</tool_call>"), ("CALL", "<tool_call>")):
        start = [line.replace(name, tag if tag in special_tags else _quote(tag)) for line in start]
    rules, names = list(more), []
    end, inner = (END_ARG_VALUE, _INNER_KEYED) if form == "keys" else (_END_VALUE, _INNER_ENDS)
    for i, (name, schema) in enumerate(schemas.items()):
        if form == "json" or not fits_parameter_form(schema):
            rules += _json_rules(i, name, schema)
        elif form == "keys":
            rules += _keyed_rules(i, name, schema)
        else:
            rules += _parameter_rules(i, name, schema)
        names.append(f"call_{i}")
    head = [
        "%llguidance {}",
        *start,
        f"call: {' | '.join(names)}",
        # what the reader of calls takes for the end of a value must not stand inside one
        f"text[suffix={_quote(end)}]: /(?s:.*)/ & ~/(?s:.*)({inner})(?s:.*)/",
    ]
    return GrammarSpec("lark", "\n".join(head + rules) + "\n")


def fits_parameter_form(schema: Mapping[str, Any]) -> bool:
    """Whether arguments written as `<parameter=..>` text can be held to this schema."""
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping) or any(k in schema for k in _OBJECT_LIMITS):
        return False
    if not all(isinstance(k, str) and k and not any(c in k for c in "<>\n") for k in properties):
        return False
    required = schema.get("required", [])
    if not isinstance(required, list) or any(not isinstance(k, str) or k not in properties for k in required):
        return False
    for sub in properties.values():
        if isinstance(sub, Mapping) and not isinstance(sub.get("enum", []), list):
            return False  # JSON's form, whose compiler has words for it
        kinds = value_types(sub, schema)
        if (
            "string" in kinds
            and isinstance(sub, Mapping)
            and (any(k in sub for k in _STRING_LIMITS) or any("\n" in str(v) for v in sub.get("enum", ())))
        ):
            return False
    return True


def _json_rules(i: int, name: str, schema: Mapping[str, Any]) -> list[str]:
    head = '{"name": ' + json.dumps(name, ensure_ascii=False) + ', "arguments": '
    return [f'call_{i}: {_quote(head)} args_{i} "}}"', f"args_{i}: {_json({'type': 'object', **schema})}"]


def _parameter_rules(i: int, name: str, schema: Mapping[str, Any]) -> list[str]:
    required = set(schema.get("required", ()))
    parts, rules = [], []
    for j, (key, sub) in enumerate(schema.get("properties", {}).items()):
        rule = f"p_{i}_{j}"
        parts.append(rule if key in required else f"{rule}?")
        rules.append(f"{rule}: {_quote(f'<parameter={key}>{chr(10)}')} {_value(sub, schema)}")
    body = " ".join([_quote(f"<function={name}>\n"), *parts, _quote("</function>")])
    return [f"call_{i}: {body}", *rules]


def _keyed_rules(i: int, name: str, schema: Mapping[str, Any]) -> list[str]:
    required = set(schema.get("required", ()))
    parts, rules = [], []
    for j, (key, sub) in enumerate(schema.get("properties", {}).items()):
        rule = f"p_{i}_{j}"
        parts.append(rule if key in required else f"{rule}?")
        head = f"{_quote(f'<arg_key>{key}</arg_key>')} gap_{i} {_quote('<arg_value>')}"
        rules.append(f"{rule}: {head} {_value(sub, schema, END_ARG_VALUE)} gap_{i}")
    return [f"call_{i}: {' '.join([_quote(name), f'gap_{i}', *parts])}", f"gap_{i}: /\\n?/", *rules]


def _value(sub: Any, root: Mapping[str, Any], end: str = _END_VALUE) -> str:
    kinds = value_types(sub, root) or frozenset(("string",))
    sub = sub if isinstance(sub, Mapping) else {}
    if "string" not in kinds:
        return f"{_json(sub, root)} {_quote(end)}"
    values = [sub["const"]] if "const" in sub else sub.get("enum")
    if values:
        words = [v if isinstance(v, str) else json.dumps(v) for v in values]
        return f"({' | '.join(_quote(w) for w in words)}) {_quote(end)}"
    return "text"


def _json(schema: Any, root: Mapping[str, Any] | None = None) -> str:
    """A JSON value that fits a schema, within a Lark rule; root: what its references point into, if not itself."""
    made = bounded_schema(schema, root)
    if isinstance(made, bool):
        made = {"anyOf": []} if not made else {}
    return f"%json {dump_schema({**made, 'x-guidance': JSON_OPTIONS})}"


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
