"""Tool definitions: checking them, describing them to a model whose template cannot, and typing argument values."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union

from ..errors import ConfigError
from .json_stream import read_json

# Names of types that are none of JSON schema's but that tools declare.
_ALIASES = {
    **dict.fromkeys(("float", "double", "decimal"), "number"),
    **dict.fromkeys(("int", "long"), "integer"),
    **dict.fromkeys(("dict", "map"), "object"),
    **dict.fromkeys(("list", "tuple"), "array"),
    **dict.fromkeys(("str", "text"), "string"),
    "bool": "boolean",
    **{name: name for name in ("string", "number", "integer", "object", "array", "boolean", "null")},
}
_DATA = ("enum", "const", "default", "examples", "example")  # keywords whose values are no schemas
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # schemas by name
_WORDS = {"true": True, "false": False, "null": None, "none": None}
_NUMBER = re.compile(r"[+-]?([0-9]{1,4000}(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")

GENERIC_TOOL_PROMPT = """You can call tools. The tools, one JSON object per line:
<tools>
{tools}
</tools>
To call one, write exactly this, with the call as one JSON object:
<tool_call>
{{"name": "tool name", "arguments": {{"argument": "value"}}}}
</tool_call>
The result comes back in a message between <tool_response> and </tool_response>."""


@dataclass(frozen=True, slots=True)
class NamedTool:
    """tool_choice: this tool must be called."""

    name: str


ToolChoice = Union[Literal["auto", "none", "required"], NamedTool]


def check_tools(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Tool name -> JSON schema of its arguments. Raises ConfigError on anything but uniquely named functions."""
    schemas: dict[str, Mapping[str, Any]] = {}
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
            raise ConfigError(f"tools[{i}]: expected {{'type': 'function', 'function': {{...}}}}")
        name = function.get("name")
        if not isinstance(name, str) or not name or any(c in name for c in '<>\n"'):
            raise ConfigError(f"tools[{i}].function.name: {name!r} is not a usable name")
        if name in schemas:
            raise ConfigError(f"tools[{i}].function.name: {name!r} is defined twice")
        parameters = function.get("parameters")
        parameters = {"type": "object", "properties": {}} if parameters is None else parameters
        if not isinstance(parameters, Mapping):
            raise ConfigError(f"tools[{i}].function.parameters: expected a JSON schema object")
        schemas[name] = standard_types(parameters)
    return schemas


def standard_types(schema: Any, depth: int = 0) -> Any:
    """The schema with JSON schema's own type names in place of others in use: "float", "int", "dict", "STRING", ..."""
    if depth > 64:
        return schema
    if isinstance(schema, Sequence) and not isinstance(schema, str):
        return [standard_types(item, depth + 1) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    out: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _DATA:
            out[key] = value
        elif key in _NAMED and isinstance(value, Mapping):
            out[key] = {name: standard_types(inner, depth + 1) for name, inner in value.items()}
        elif key == "type":
            out[key] = [_standard(k) for k in value] if isinstance(value, (list, tuple)) else _standard(value)
        else:
            out[key] = standard_types(value, depth + 1)
    return out


def _standard(kind: Any) -> Any:
    return _ALIASES.get(kind.lower(), kind) if isinstance(kind, str) else kind


def with_generic_tool_prompt(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The conversation rewritten for a template without tools: definitions, calls and results become plain text.

    The definitions (if any) join the system message, calls join the assistant's text, results become user messages.
    """
    rows: list[dict[str, Any]] = []
    for message in messages:
        row = {k: v for k, v in message.items() if k not in ("tool_calls", "tool_call_id", "name")}
        for call in message.get("tool_calls", ()):
            body = json.dumps(call["function"], ensure_ascii=False)
            row["content"] += f"{chr(10) if row['content'] else ''}<tool_call>\n{body}\n</tool_call>"
        if row["role"] == "tool":
            row = {"role": "user", "content": f"<tool_response>\n{row['content']}\n</tool_response>"}
        rows.append(row)
    if not tools:
        return rows
    prompt = GENERIC_TOOL_PROMPT.format(
        tools="\n".join(json.dumps(t["function"], ensure_ascii=False) for t in tools)
    )
    if rows and rows[0]["role"] == "system":
        rows[0]["content"] = f"{rows[0]['content']}\n\n{prompt}" if rows[0]["content"] else prompt
        return rows
    return [{"role": "system", "content": prompt}, *rows]


def value_types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """JSON type names that a schema allows; empty when it does not say. Local `$ref`s are followed 8 deep."""
    if not isinstance(schema, Mapping) or depth > 8:
        return frozenset()
    if isinstance(schema.get("$ref"), str):
        return value_types(_resolve(schema["$ref"], root), root, depth + 1)
    kinds = _declared_types(schema, root, depth)
    return kinds | {"null"} if kinds and schema.get("nullable") is True else kinds


def _declared_types(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> frozenset[str]:
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset((kind,))
    if isinstance(kind, Sequence):
        return frozenset(k for k in kind if isinstance(k, str))
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return frozenset(_type_name(v) for v in values) if isinstance(values, Sequence) else frozenset()
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), Sequence):
            return frozenset().union(*(value_types(s, root, depth + 1) for s in schema[key]))
    if "properties" in schema or "items" in schema:
        return frozenset(("object" if "properties" in schema else "array",))
    return frozenset()


def parameter_types(parameters: Mapping[str, Any], key: str) -> frozenset[str]:
    """Types that tool parameter `key` allows; {"string"} when the schema does not say."""
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    return value_types(schema, parameters) or frozenset(("string",))


def coerce(text: str, types: frozenset[str]) -> Any:
    """A parameter written as text -> the JSON value that its schema wants; the text itself when it does not fit."""
    if types == {"string"}:
        return text
    trimmed = text.strip()
    value: Any
    try:
        value = _WORDS[trimmed.lower()] if trimmed.lower() in _WORDS else read_json(trimmed)
        for _ in range(2):
            if not isinstance(value, str) or "string" in types:
                break
            value = read_json(value)  # written as JSON text inside JSON text
    except ValueError:
        value = _number(trimmed)
    kind = _type_name(value)
    if kind in types or (kind == "integer" and "number" in types):
        # with "string" allowed too, only null and containers are unmistakable
        return value if "string" not in types or kind in ("null", "object", "array") else text
    if kind == "number" and "integer" in types and float(value).is_integer():
        return int(value)
    return text


def _number(text: str) -> Any:
    """A number as people write it, `+3` or `.5`; the text itself when it is none."""
    if not _NUMBER.fullmatch(text):
        return text
    value = float(text) if any(c in ".eE" for c in text) else int(text)
    return value if math.isfinite(value) else text


def _resolve(ref: str, root: Mapping[str, Any]) -> Any:
    node: Any = root
    if not ref.startswith("#/"):
        return None
    for part in ref[2:].split("/"):
        node = node.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(node, Mapping) else None
    return node


def _type_name(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    for types, name in ((int, "integer"), (float, "number"), (str, "string"), (Mapping, "object")):
        if isinstance(value, types):
            return name
    return "array"
