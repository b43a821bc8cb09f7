"""Anthropic's /v1/messages: validation into a ChatRequest, events into message events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..session.answer import Answer
from ..session.events import (
    Finish,
    Progress,
    ReasoningDelta,
    TextDelta,
    ToolCallArgs,
    ToolCallBegin,
    ToolCallEnd,
    Usage,
)
from ..session.openai_parts import timings_dict, usage_timings
from ..session.requests import ChatRequest, ToolChoice
from .anthropic_schema import CountBody, MessagesBody, chat_messages
from .dialect import ApiCall, Settings, data_event, new_id, opened, speculation, text_format, thinking
from .errors import ApiError, anthropic_body
from .limits import check_count, check_stops
from .notes import Notes
from .schema import parse, plain_format, sampling_params
from .tools import ToolSet, anthropic_tools, arguments_of, pick


def read_call(data: dict[str, Any], settings: Settings) -> ApiCall:
    """Validate a request body.

    Raises:
        ApiError: A field is wrong; it names it.
    """
    body, notes = opened(MessagesBody, data, settings)
    model = settings.model(body.model)
    sampling = sampling_params(
        settings.sampling, temperature=body.temperature, top_p=body.top_p, top_k=body.top_k
    )
    request = ChatRequest(
        **_prompt(body, settings, notes),
        sampling=sampling,
        max_tokens=body.max_tokens,
        stop=check_stops(body.stop_sequences or (), settings.limits, "stop_sequences"),
        **speculation(body.dflash),
    )
    show = body.thinking is None or body.thinking.display != "omitted"
    encoder = MessageEncoder(model, body.max_tokens, show_thinking=show)
    return ApiCall(request, encoder, bool(body.stream), notes)


def read_count(data: dict[str, Any], settings: Settings) -> ChatRequest:
    """Validate a count_tokens body, which may be a whole request.

    Raises:
        ApiError: A field is wrong; it names it.
    """
    notes = Notes(settings.strict)
    extra = set(MessagesBody.model_fields) - set(CountBody.model_fields)
    body = parse(CountBody, {k: v for k, v in data.items() if k not in extra}, notes)
    settings.model(body.model)
    return ChatRequest(**_prompt(body, settings, notes))


def _prompt(body: CountBody, settings: Settings, notes: Notes) -> dict[str, Any]:
    """The arguments of a ChatRequest that shape the prompt."""
    check_count(body.messages, settings.limits.messages, "messages")
    check_count(body.tools or (), settings.limits.tools, "tools")
    effort = thinking(
        body.output_config.effort if body.output_config else None, "output_config.effort", notes
    )
    # Like the real API, no thinking without the field.
    enabled = body.thinking is not None and body.thinking.type != "disabled"
    tool_set, choice = _choice(body, notes)
    form = (body.output_config.format if body.output_config else None) or body.output_format
    schema = None if form is None else plain_format("json_schema", None, form.schema_, "output_config.format")
    return {
        "messages": chat_messages(body, notes),
        "tools": tool_set.definitions,
        "tool_choice": choice,
        "parallel_tool_calls": not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        "enable_thinking": enabled,
        "reasoning_budget": body.thinking.budget_tokens if body.thinking else None,
        "reasoning_effort": effort.get("reasoning_effort"),
        "continue_final_message": body.messages[-1].role == "assistant",
        "response_format": text_format(schema, choice),
    }


def _choice(body: CountBody, notes: Notes) -> tuple[ToolSet, ToolChoice]:
    choice, tool_set = body.tool_choice, anthropic_tools(body.tools, notes)
    if choice is None:
        return tool_set, "auto"
    named = (choice.name or "") if choice.type == "tool" else None
    return pick(choice.type, named, tool_set, notes, "tool_choice.name")


class MessageEncoder:
    """Renders message bodies and message event streams."""

    def __init__(self, model: str, max_tokens: int, *, show_thinking: bool) -> None:
        self.answer = Answer()
        self._id = new_id("msg_")
        self._model = model
        self._max_tokens = max_tokens
        self._show_thinking = show_thinking
        self._started = False
        self._kind: str | None = None  # of the open content block
        self._index = -1

    def _event(self, kind: str, **fields: Any) -> bytes:
        return data_event({"type": kind, **fields}, event=kind)

    def feed(self, event: Any) -> Iterator[bytes]:
        """What the client sees of one event."""
        self.answer.feed(event)
        if isinstance(event, Progress):
            yield self._event("ping")
            return
        if not self._started:
            self._started = True
            yield self._event("message_start", message=self._message([], None, None, self._begin_usage()))
        if isinstance(event, TextDelta):
            yield from self._delta("text", {"type": "text", "text": ""}, type="text_delta", text=event.text)
        elif isinstance(event, ReasoningDelta):
            block = {"type": "thinking", "thinking": "", "signature": ""}
            if self._show_thinking:
                yield from self._delta("thinking", block, type="thinking_delta", thinking=event.text)
            else:
                yield from self._open("thinking", block)
        elif isinstance(event, ToolCallBegin):
            yield from self._close()
            yield from self._open(
                "tool", {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
            )
        elif isinstance(event, ToolCallArgs):
            yield from self._delta("tool", {}, type="input_json_delta", partial_json=event.json)
        elif isinstance(event, ToolCallEnd):
            yield from self._close()
        elif isinstance(event, Finish):
            yield from self._close()
            usage, _ = self.answer.done()
            delta = {
                "stop_reason": self._stop_reason(),
                "stop_sequence": event.stop_string,
                "stop_details": None,
            }
            yield self._event("message_delta", delta=delta, usage=_usage(usage), timings=timings_dict(usage))
            yield self._event("message_stop")

    def _open(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        if self._kind == kind:
            return
        yield from self._close()
        self._kind = kind
        self._index += 1
        yield self._event("content_block_start", index=self._index, content_block=block)

    def _delta(self, kind: str, block: dict[str, Any], **delta: Any) -> Iterator[bytes]:
        yield from self._open(kind, block)
        yield self._event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> Iterator[bytes]:
        if self._kind is None:
            return
        # clients expect a signature before the block ends
        if self._kind == "thinking":
            yield self._event(
                "content_block_delta", index=self._index, delta={"type": "signature_delta", "signature": ""}
            )
        self._kind = None
        yield self._event("content_block_stop", index=self._index)

    def error(self, error: ApiError) -> Iterator[bytes]:
        """A failure in mid-stream."""
        yield data_event(anthropic_body(error, self._id), event="error")

    def _begin_usage(self) -> dict[str, Any]:
        begin = self.answer.begin
        return _counts(begin.prompt_n, begin.cached_n) if begin else _counts(0, 0)

    def _message(
        self, content: list[Any], reason: str | None, stop: str | None, usage: Any
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }

    def _stop_reason(self) -> str:
        usage, finish = self.answer.done()
        if finish.reason == "length":
            return "max_tokens" if usage.predicted_n >= self._max_tokens else "model_context_window_exceeded"
        if finish.reason == "tool_calls":
            return "tool_use"
        return "stop_sequence" if finish.stop_string is not None else "end_turn"

    def body(self) -> dict[str, Any]:
        """The whole message."""
        usage, finish = self.answer.done()
        content: list[dict[str, Any]] = []
        for block in self.answer.blocks:
            if block.kind == "text":
                content.append({"type": "text", "text": block.text})
            elif block.kind == "reasoning":
                thinking = block.text if self._show_thinking else ""
                content.append({"type": "thinking", "thinking": thinking, "signature": ""})
            else:
                arguments = arguments_of(block.text)
                content.append({"type": "tool_use", "id": block.id, "name": block.name, "input": arguments})
        message = self._message(content, self._stop_reason(), finish.stop_string, _usage(usage))
        return {**message, "timings": timings_dict(usage)}


def _usage(usage: Usage) -> dict[str, Any]:
    counts = _counts(usage.prompt_n, usage.cached_n, usage.predicted_n)
    return {**counts, "timings": usage_timings(usage)}


def _counts(prompt: int, cached: int, output: int = 0) -> dict[str, Any]:
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }
