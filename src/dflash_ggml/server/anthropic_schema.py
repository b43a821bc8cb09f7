"""Anthropic's message format: validation, and its translation into one list of chat messages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from .dialect import chat_tool, dumps, merge_system
from .errors import bad_request
from .schema import Body, Positive, Probability, Speculation, Temperature


class CacheControl(Body):
    """A hint where to cut for the prefix cache, which here finds the common prefix by itself."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Body):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[list[Any] | None, Field(max_length=0)] = None


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: dict[str, Any] | None = None  # says who called the tool; only "direct" comes from here


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


UserBlock = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]


class UserMessage(Body):
    role: Literal["user"]
    content: str | list[UserBlock]


class AssistantMessage(Body):
    role: Literal["assistant"]
    content: str | list[AssistantBlock]


class SystemMessage(Body):
    role: Literal["system"]
    content: str | list[TextBlock]


class Tool(Body):
    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    input_schema: dict[str, Any]
    cache_control: CacheControl | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None  # arguments are always streamed as they come


class AnthropicChoice(Body):
    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Positive | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(Body):
    user_id: str | None = None


class KeepThinking(Body):
    """The one context edit that changes nothing: keeping all earlier thinking."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(Body):
    edits: list[KeepThinking] = []


class CountBody(Body):
    """What /v1/messages/count_tokens takes: the part of a request that makes the prompt."""

    model: str
    messages: Annotated[
        list[Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]],
        Field(min_length=1),
    ]
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None


class MessagesBody(CountBody):
    """A request to /v1/messages."""

    max_tokens: Positive
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: int | None = None
    metadata: Metadata | None = None  # a label of the caller's own
    service_tier: Literal["auto", "standard_only"] | None = None
    dflash: Speculation | None = None


def chat_messages(body: CountBody) -> list[dict[str, Any]]:
    """The conversation as chat messages: tool results become tool messages, thinking becomes reasoning."""
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system)})
    for i, message in enumerate(body.messages):
        if isinstance(message, SystemMessage):
            messages.append({"role": "system", "content": _text(message.content)})
        elif isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif isinstance(message, UserMessage):
            messages.extend(_user(message.content, f"messages[{i}]"))
        else:
            messages.append(_assistant(message.content))
    return merge_system(messages)


def _text(content: str | list[TextBlock] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n\n".join(block.text for block in content)


def _user(blocks: list[Any], where: str) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    texts: list[TextBlock] = []
    for j, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            texts.append(block)
            continue
        if texts:
            raise bad_request("tool results must come before text", f"{where}.content[{j}]")
        content = _text(block.content)
        # chat messages have no error flag, so the model is told in words
        content = f"Error: {content}" if block.is_error else content
        results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
    if texts or not results:
        results.append({"role": "user", "content": _text(texts)})
    return results


def _assistant(blocks: list[Any]) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": _text([b for b in blocks if isinstance(b, TextBlock)]),
    }
    thoughts = [b.thinking for b in blocks if isinstance(b, ThinkingBlock)]
    if thoughts:
        message["reasoning_content"] = "\n\n".join(thoughts)
    calls = [b for b in blocks if isinstance(b, ToolUseBlock)]
    if calls:
        message["tool_calls"] = [
            {"id": b.id, "type": "function", "function": {"name": b.name, "arguments": dumps(b.input)}}
            for b in calls
        ]
    return message


def chat_tools(tools: list[Tool] | None) -> tuple[dict[str, Any], ...]:
    """Tool definitions in the shape of chat completions."""
    return tuple(chat_tool(t.name, t.description, t.input_schema, t.strict) for t in tools or ())
