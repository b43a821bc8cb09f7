"""Tool definitions: validation, and a generic description for templates without tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Union

from ..errors import ConfigError
from .grammar_spec import dump_schema, load_schema
from .tool_schema import ToolSchema

KEPT_CHARS = 1 << 15  # characters of a schema that is cached between requests

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
    """A tool_choice that names the required tool."""

    name: str


ToolChoice = Union[Literal["auto", "none", "required"], NamedTool]


def check_tools(tools: Sequence[Mapping[str, Any]]) -> dict[str, ToolSchema]:
    """Tool name -> its arguments.

    Raises:
        ConfigError: A tool is not a uniquely named function, or a reference is unresolved.
    """
    schemas: dict[str, ToolSchema] = {}
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
        if parameters is None or parameters == {}:
            parameters = {"type": "object", "properties": {}}
        if not isinstance(parameters, Mapping):
            raise ConfigError(f"tools[{i}].function.parameters: expected a JSON schema object")
        try:
            schemas[name] = _tool_schema(parameters)
        except ConfigError as error:
            what = str(error).removeprefix("json schema: ")
            raise ConfigError(f"tools[{i}].function.parameters: {name}: {what}") from None
    return schemas


def _tool_schema(parameters: Mapping[str, Any]) -> ToolSchema:
    """Parsed schema, cached between requests. Raises ConfigError for an unresolved reference."""
    text = dump_schema(parameters)
    return (_read if len(text) <= KEPT_CHARS else _read.__wrapped__)(text)


@lru_cache(256)
def _read(text: str) -> ToolSchema:
    schema = ToolSchema(load_schema(text))
    schema.reader.check(schema.parameters)
    return schema


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
