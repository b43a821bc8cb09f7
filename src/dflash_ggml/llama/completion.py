"""Text completions in the shape of llama-cpp-python: one dict, or a stream of chunks, from a session's events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..session.answer import Answer
from ..session.events import Event, Finish, PromptLogprobs, TextDelta, TokenLogprob, Usage
from ..session.logprobs import completion_logprobs
from ..session.openai_parts import finish_reason, timings_dict, usage_dict


@dataclass(frozen=True, slots=True)
class Heading:
    """Common fields of one answer's chunks."""

    model: str
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4()}")
    created: int = field(default_factory=lambda: int(time.time()))


def completion_body(events: Iterable[Event], head: Heading, *, echo: str | None = None) -> dict[str, Any]:
    """The whole answer, of OpenAI's shape.

    Args:
        events: Those of the generation.
        head: Id, time and model's name.
        echo: Prompt text to prepend.
    """
    answer = Answer.of(events)
    usage, finish = answer.done()
    choice = {
        "text": (echo or "") + answer.text,
        "index": 0,
        "logprobs": completion_logprobs([*answer.prompt, *answer.logprobs]),
        "finish_reason": finish_reason(finish.reason),
    }
    return {**_chunk(head, choice), "usage": usage_dict(usage), "timings": timings_dict(usage)}


def completion_chunks(
    events: Iterable[Event], head: Heading, *, echo: str | None = None
) -> Iterator[dict[str, Any]]:
    """The answer as chunks: text with finish_reason None, then an empty text with the reason, usage and timings.

    Args:
        echo: Prompt text for a first chunk, which has the prompt's log-probabilities if requested.
    """
    usage: Usage | None = None
    prompt_entries: tuple[TokenLogprob, ...] = ()

    def chunk(text: str, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        logprobs = completion_logprobs(entries)
        return _chunk(head, {"text": text, "index": 0, "logprobs": logprobs, "finish_reason": None})

    for event in events:
        if echo and isinstance(event, (TextDelta, Usage)):  # the prompt is prefilled
            yield chunk(echo, prompt_entries)
            echo = None
        if isinstance(event, PromptLogprobs):
            prompt_entries = event.tokens
        elif isinstance(event, TextDelta):
            yield chunk(event.text, event.logprobs or ())
        elif isinstance(event, Usage):
            usage = event
        elif isinstance(event, Finish):
            assert usage is not None
            choice = {"text": "", "index": 0, "logprobs": None, "finish_reason": finish_reason(event.reason)}
            yield {**_chunk(head, choice), "usage": usage_dict(usage), "timings": timings_dict(usage)}


def _chunk(head: Heading, choice: dict[str, Any]) -> dict[str, Any]:
    named = {"id": head.id, "object": "text_completion", "created": head.created, "model": head.model}
    return {**named, "choices": [choice]}
