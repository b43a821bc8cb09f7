"""Anthropic's message format: validation, and translation to chat messages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from .dialect import dumps
from .ignored_fields import IDLE_MESSAGES, QUIET_MESSAGES
from .media import content_text, note_role, part_text, thoughts
from .notes import Notes
from .schema import Body, Echoed, Positive, Probability, Speculation, Temperature, Whole, parse

# Claude Code's label in the system prompt, different in every request
BILLING = "x-anthropic-billing-header:"


class ToolUseBlock(Echoed):
    """A tool call of an earlier answer."""

    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Echoed):
    """The result of a tool call."""

    tool_use_id: str
    content: str | list[Any] | dict[str, Any] | None = None
    is_error: bool | None = None


class Message(Echoed):
    """One message of the conversation."""

    role: str
    content: str | list[dict[str, Any]]


class AnthropicChoice(Body):
    """Which tools may or must be called."""

    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether the model reasons, and for how many tokens."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Positive | None = None
    display: str | None = None


class OutputFormat(Body):
    """The form that the answer has to have."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    """The format of the answer, and its reasoning effort."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountBody(Body):
    """A request to /v1/messages/count_tokens: the part of a request that determines the prompt."""

    quiet = QUIET_MESSAGES
    idle = IDLE_MESSAGES
    model: str
    messages: Annotated[list[Message], Field(min_length=1)]
    system: str | list[Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None


class MessagesBody(CountBody):
    """A request to /v1/messages."""

    max_tokens: Positive
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: Whole | None = None
    dflash: Speculation | None = None


def chat_messages(body: CountBody, notes: Notes) -> list[dict[str, Any]]:
    """The conversation as chat messages: tool results become tool messages, thinking becomes reasoning."""
    messages: list[dict[str, Any]] = []
    if body.system:
        system = body.system
        if isinstance(system, list):
            system = [
                b for b in system if not (isinstance(b, dict) and str(b.get("text")).startswith(BILLING))
            ]
        messages.append({"role": "system", "content": content_text(system, "system", notes, "\n\n")})
    for i, message in enumerate(body.messages):
        where = f"messages[{i}]"
        note_role(message.role, ("user", "assistant", "system"), where, notes)
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            messages.append(_assistant(message.content, where, notes))
        else:
            messages.extend(_user(message.role, message.content, where, notes))
    return messages


def _user(role: str, blocks: list[dict[str, Any]], where: str, notes: Notes) -> list[dict[str, Any]]:
    """Tool results first, since they answer the previous message, then the user's text."""
    results: list[dict[str, Any]] = []
    rest: list[str] = []
    for j, block in enumerate(blocks):
        path = f"{where}.content[{j}]"
        if block.get("type") != "tool_result":
            rest.append(part_text(block, path, notes) or "")
            continue
        result = parse(ToolResultBlock, block, notes, path)
        content = content_text(result.content, f"{path}.content", notes, "\n\n")
        # chat messages have no error flag
        content = f"Error: {content}" if result.is_error else content
        results.append({"role": "tool", "tool_call_id": result.tool_use_id, "content": content})
    texts = [text for text in rest if text]
    if texts or not results:
        results.append({"role": role, "content": "\n\n".join(texts)})
    return results


def _assistant(blocks: list[dict[str, Any]], where: str, notes: Notes) -> dict[str, Any]:
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for j, block in enumerate(blocks):
        path = f"{where}.content[{j}]"
        if block.get("type") == "tool_use":
            use = parse(ToolUseBlock, block, notes, path)
            function = {"name": use.name, "arguments": dumps(use.input)}
            calls.append({"id": use.id, "type": "function", "function": function})
        else:
            texts.append(part_text(block, path, notes) or "")
    message: dict[str, Any] = {"role": "assistant", "content": "\n\n".join(t for t in texts if t)}
    thought = thoughts(blocks)
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return message
