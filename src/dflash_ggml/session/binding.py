"""JSON schemas that constrain a request's answer, without keywords that have no effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..text.grammar_spec import load_schema, response_format_spec
from ..text.schema_reading import SchemaReader
from ..text.tools import check_tools
from .requests import ChatRequest, CompletionRequest, NamedTool


def is_strict(tools: tuple[Mapping[str, Any], ...]) -> bool:
    """Whether every call of these tools must fit its schema, forced or not."""
    return any(tool["function"].get("strict") for tool in tools)


def binding_schemas(request: ChatRequest | CompletionRequest) -> dict[str, Any]:
    """The schemas that bind an answer, by the field (and the tool) that they come from."""
    chat = request if isinstance(request, ChatRequest) else None
    asked = {"json_schema": request.grammar}
    if chat is not None:
        asked["response_format"] = response_format_spec(chat.response_format)
    found = {
        label: load_schema(spec.text)
        for label, spec in asked.items()
        if spec is not None and spec.kind == "json_schema"
    }
    if chat is None or chat.tool_choice == "none" or not chat.tools:
        return found
    schemas, choice = check_tools(chat.tools), chat.tool_choice
    if isinstance(choice, NamedTool):
        schemas = {name: schema for name, schema in schemas.items() if name == choice.name}
    elif choice == "auto" and not found and not is_strict(chat.tools):
        return found
    return {f"tools: {name}": schema.parameters for name, schema in schemas.items()} | found


def unbound(request: ChatRequest | CompletionRequest) -> list[tuple[str, str]]:
    """Keywords of binding schemas that no grammar can express: the schema, and the keyword's path in it."""
    return [
        (label, what)
        for label, schema in binding_schemas(request).items()
        for what in SchemaReader(schema).left_out(schema)
    ]
