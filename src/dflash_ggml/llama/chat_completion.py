"""Chat completions in the shape of llama-cpp-python: one dict, or a stream of chunks, from a session's events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ..session.answer import Answer, Block
from ..session.events import Event, Finish, ReasoningDelta, TextDelta, ToolCallArgs, ToolCallBegin, Usage
from ..session.logprobs import chat_logprobs
from ..session.openai_parts import call_object, finish_reason, timings_dict, usage_dict
from .completion import Heading


def chat_body(events: Iterable[Event], head: Heading, *, legacy_call: bool = False) -> dict[str, Any]:
    """The whole answer, of OpenAI's shape.

    Args:
        events: Events of the generation.
        head: Id, time and model's name.
        legacy_call: Also report the first call as `function_call`, for legacy requests.
    """
    answer = Answer.of(events)
    usage, finish = answer.done()
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    calls = [call_object(b) for b in answer.tools]
    if calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = calls
        if legacy_call:
            message["function_call"] = dict(calls[0]["function"])
    logprobs = chat_logprobs(answer.logprobs)
    body = chat_object(head, message, logprobs, finish_reason(finish.reason), usage_dict(usage))
    return {**body, "timings": timings_dict(usage)}


def _call_delta(index: int, call: dict[str, Any], legacy_call: bool) -> dict[str, Any]:
    legacy = {"function_call": dict(call["function"])} if legacy_call and index == 0 else {}
    return {"tool_calls": [{"index": index, **call}], **legacy}


def chat_object(
    head: Heading,
    message: dict[str, Any],
    logprobs: dict[str, Any] | None,
    reason: str,
    usage: dict[str, Any],
) -> dict[str, Any]:
    """A chat completion of one choice."""
    choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": reason}
    named = {
        "id": "chat" + head.id,
        "object": "chat.completion",
        "created": head.created,
        "model": head.model,
    }
    return {**named, "choices": [choice], "usage": usage}


def chat_chunks(
    events: Iterable[Event], head: Heading, *, legacy_call: bool = False
) -> Iterator[dict[str, Any]]:
    """The answer as chunks: the role, then deltas, then an empty delta with the reason, usage and timings."""
    usage: Usage | None = None
    started = False
    for event in events:
        if not started:
            # with the first event, so that errors in the request still surface at the first next()
            yield chat_chunk(head, {"role": "assistant"})
            started = True
        if isinstance(event, TextDelta):
            yield chat_chunk(head, {"content": event.text}, chat_logprobs(event.logprobs or ()))
        elif isinstance(event, ReasoningDelta):
            yield chat_chunk(head, {"reasoning_content": event.text})
        elif isinstance(event, ToolCallBegin):
            call = call_object(Block("tool", id=event.id, name=event.name))
            yield chat_chunk(head, _call_delta(event.index, call, legacy_call))
        elif isinstance(event, ToolCallArgs):
            yield chat_chunk(
                head, _call_delta(event.index, {"function": {"arguments": event.json}}, legacy_call)
            )
        elif isinstance(event, Usage):
            usage = event
        elif isinstance(event, Finish):
            assert usage is not None
            last = chat_chunk(head, {}, None, finish_reason(event.reason))
            yield {**last, "usage": usage_dict(usage), "timings": timings_dict(usage)}


def chat_chunk(
    head: Heading, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None
) -> dict[str, Any]:
    """A chunk of a chat completion."""
    choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
    named = {"id": "chat" + head.id, "model": head.model, "created": head.created}
    return {**named, "object": "chat.completion.chunk", "choices": [choice]}
