"""OpenAI's Responses format: validation, and its translation into chat messages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from .dialect import merge_system
from .schema import Body, Positive, Probability, Speculation, Temperature, plain_format

Status = Literal["in_progress", "completed", "incomplete"]
Empty = Annotated[list[Any] | None, Field(max_length=0)]


class Text(Body):
    """A part of a message; the fields behind `text` come with output that is sent back."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    annotations: Empty = None
    logprobs: list[Any] | None = None


class MessageItem(Body):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Text]
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class CallItem(Body):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None


class CallOutputItem(Body):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Text]
    id: str | None = None
    status: Status | None = None


class ReasoningItem(Body):
    type: Literal["reasoning"]
    id: str | None = None
    summary: list[Text] = []
    content: list[Text] | None = None
    encrypted_content: None = None
    status: Status | None = None


class FunctionTool(Body):
    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(Body):
    type: Literal["function"]
    name: str


class TextFormat(Body):
    """text.format: as chat's response_format, with the schema one level up."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    def plain(self) -> dict[str, Any] | None:
        """As the mapping that ChatRequest.response_format takes; None for plain text."""
        return plain_format(self.type, self.name, self.schema_, "text.format.schema")


class TextConfig(Body):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesStreamOptions(Body):
    include_obfuscation: Literal[False] | None = None


class ResponsesBody(Body):
    """The request. Fields typed None or with one literal are known to the API, and mean only that here."""

    model: str | None = None
    input: str | list[MessageItem | CallItem | CallOutputItem | ReasoningItem]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    dflash: Speculation | None = None


def chat_messages(items: str | list[Any]) -> list[dict[str, Any]]:
    """Input items as chat messages; neighbouring items of the assistant become one message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, CallOutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages.append({"role": item.role, "content": _text(item.content)})
        else:
            _extend_assistant(messages, item)
    return messages


def _extend_assistant(messages: list[dict[str, Any]], item: MessageItem | CallItem | ReasoningItem) -> None:
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    # reasoning opens a new turn; text cannot follow a call within one message
    opens = isinstance(item, ReasoningItem) and last is not None and (last["content"] or "tool_calls" in last)
    if last is None or opens or (isinstance(item, MessageItem) and "tool_calls" in last):
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    if isinstance(item, MessageItem):
        last["content"] += _text(item.content)
    elif isinstance(item, ReasoningItem):
        text = _text(item.content or item.summary)
        last["reasoning_content"] = last.get("reasoning_content", "") + text
    else:
        function = {"name": item.name, "arguments": item.arguments}
        last.setdefault("tool_calls", []).append(
            {"id": item.call_id, "type": "function", "function": function}
        )


def _text(content: str | list[Text]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def with_instructions(instructions: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation behind its instructions, system messages at the head joined."""
    head = [{"role": "system", "content": instructions}] if instructions else []
    return merge_system([*head, *messages])
