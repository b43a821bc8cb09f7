"""OpenAI's Responses format: validation, and translation to chat messages."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any, Literal

from .errors import bad_request
from .ignored_fields import IDLE_RESPONSES, QUIET_RESPONSES
from .media import base64_text, content_text
from .notes import Notes
from .schema import (
    Alternatives,
    Body,
    Echoed,
    JsonSchema,
    Positive,
    Probability,
    Speculation,
    Temperature,
    parse,
    plain_format,
)
from .tools import flat_name

SEALED = "dflash:"  # prefix of reasoning sent as encrypted_content

Items = Callable[[str], dict[str, Any] | None]  # an item of a stored response by its id


class MessageItem(Echoed):
    """A message of the input."""

    role: str
    content: str | list[Any]


class CallItem(Echoed):
    """A call of an earlier answer, of any kind: arguments, input and action are equivalent."""

    call_id: str | None = None
    id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None
    input: str | None = None
    action: dict[str, Any] | None = None

    def plain(self, kind: str, where: str) -> dict[str, Any]:
        """The call as a tool call of a chat message."""
        name, given = self.name, self.arguments
        if kind == "custom_tool_call":
            given = {"input": self.input or ""}
        elif kind == "local_shell_call":
            name, given = "local_shell", {k: v for k, v in (self.action or {}).items() if v and k != "type"}
        if name is None:
            raise bad_request("the name of the tool is missing", f"{where}.name")
        function = {"name": flat_name(name, self.namespace), "arguments": given}
        return {"id": self.call_id or self.id, "type": "function", "function": function}


class CallOutputItem(Echoed):
    """The result of a call."""

    call_id: str | None = None
    id: str | None = None
    output: str | list[Any] | dict[str, Any] | None = None


class ReasoningItem(Echoed):
    """The reasoning of an earlier answer."""

    summary: list[Any] | None = None
    content: list[Any] | None = None
    encrypted_content: str | None = None


class ReferenceItem(Echoed):
    """An item of a stored response, by id."""

    id: str


CALLS = ("function_call", "custom_tool_call", "local_shell_call")
OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")


TOOL_LISTS = ("additional_tools", "tool_search_output")  # items with tools


class TextFormat(JsonSchema):
    """text.format: like chat's response_format, with the schema one level up."""

    type: Literal["text", "json_object", "json_schema"]

    def plain(self) -> dict[str, Any] | None:
        """The format for ChatRequest.response_format; None for plain text."""
        return plain_format(self.type, self.name, self.schema_, "text.format.schema")


class TextConfig(Body):
    """Options of the visible text."""

    idle = {"verbosity": ("medium",)}
    format: TextFormat | None = None


class Reasoning(Body):
    """Reasoning effort and summary."""

    quiet = frozenset(("generate_summary", "context"))
    effort: str | None = None
    max_tokens: Positive | None = None  # OpenRouter's
    summary: str | None = None


class ResponsesStreamOptions(Body):
    """Stream options."""

    quiet = frozenset(("include_obfuscation", "include_usage"))


class ResponsesBody(Body):
    """The request."""

    quiet = QUIET_RESPONSES
    idle = IDLE_RESPONSES
    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_logprobs: Alternatives | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    dflash: Speculation | None = None


def all_tools(body: ResponsesBody) -> list[dict[str, Any]]:
    """The tools of a request, including those in input items."""
    items = body.input if isinstance(body.input, list) else []
    found = [item.get("tools") for item in items if item.get("type") in TOOL_LISTS]
    more = [tool for tools in found if isinstance(tools, list) for tool in tools if isinstance(tool, dict)]
    return [*(body.tools or ()), *more]


def chat_messages(items: str | list[dict[str, Any]], notes: Notes, known: Items) -> list[dict[str, Any]]:
    """Input items as chat messages; consecutive items of the assistant become one message.

    Args:
        items: A text, or the items.
        notes: Receives unsupported parts.
        known: Items of stored responses, by id.

    Raises:
        ApiError: An item is malformed; it names it.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        _take(messages, item, f"input[{i}]", notes, known)
    return messages


def _take(
    messages: list[dict[str, Any]], item: dict[str, Any], where: str, notes: Notes, known: Items
) -> None:
    kind = item.get("type") or ("message" if "role" in item else None)
    if kind == "item_reference" or (kind is None and isinstance(item.get("id"), str)):
        reference = parse(ReferenceItem, item, notes, where)
        found = known(reference.id)
        if found is None:
            notes.weaken(where, f"there is no stored item {reference.id[:40]!r}; it is left out")
        else:
            _take(messages, found, where, notes, lambda _: None)
    elif kind == "message":
        message = parse(MessageItem, item, notes, where)
        text = content_text(message.content, f"{where}.content", notes)
        if message.role == "assistant":
            _assistant(messages, "content", text)
        else:
            messages.append({"role": message.role, "content": text})
    elif kind == "reasoning":
        reasoning = parse(ReasoningItem, item, notes, where)
        _assistant(messages, "reasoning_content", _thought(reasoning, where, notes))
    elif kind in CALLS:
        call = parse(CallItem, item, notes, where).plain(str(kind), where)
        _assistant(messages, "tool_calls", call)
    elif kind in OUTPUTS:
        result = parse(CallOutputItem, item, notes, where)
        given = result.output
        # older Codex: an object that contains the text
        given = given.get("content") if isinstance(given, dict) and "content" in given else given
        text = content_text(given, f"{where}.output", notes)
        messages.append({"role": "tool", "tool_call_id": result.call_id or result.id, "content": text})
    elif kind in TOOL_LISTS:
        pass  # handled by `all_tools`
    elif isinstance(kind, str):
        notes.leave_out(f"item of type {kind[:40]}", where)
    else:
        raise bad_request("an item needs a type", f"{where}.type", "missing_required_parameter")


def _assistant(messages: list[dict[str, Any]], key: str, value: Any) -> None:
    """Append to the assistant's last message, or begin a new one."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    # reasoning begins a new turn; text cannot follow a call within one message
    opens = key == "reasoning_content" and last is not None and (last["content"] or "tool_calls" in last)
    if last is None or opens or (key == "content" and "tool_calls" in last):
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    if key == "tool_calls":
        last.setdefault(key, []).append(value)
    elif value or key == "content":
        last[key] = last.get(key, "") + value


def _thought(item: ReasoningItem, where: str, notes: Notes) -> str:
    text = content_text(item.content, f"{where}.content", notes)
    return text or unseal(item.encrypted_content) or content_text(item.summary, f"{where}.summary", notes)


def seal(reasoning: str) -> str:
    """Reasoning as encrypted_content, for clients that only send that back. Encoded, not encrypted."""
    return SEALED + base64.b64encode(reasoning.encode("utf-8", "replace")).decode()


def unseal(sealed: str | None) -> str | None:
    """The reasoning from `seal`; None for foreign content."""
    if sealed is None or not sealed.startswith(SEALED):
        return None
    return base64_text(sealed.removeprefix(SEALED))


def with_instructions(instructions: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation after its instructions."""
    head = [{"role": "system", "content": instructions}] if instructions else []
    return [*head, *messages]
