"""One answer put together from its events; all encoders render this, so streams and bodies agree."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from ..events import (
    Begin,
    Finish,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallArgs,
    ToolCallBegin,
    Usage,
)
from .errors import ApiError
from .steps import StepView


@dataclass(slots=True)
class Block:
    """A run of one kind of output; for kind "tool", `text` is the arguments' JSON."""

    kind: Literal["reasoning", "text", "tool"]
    text: str = ""
    id: str = ""
    name: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(slots=True)
class Answer:
    """What has been received so far. `blocks` are in the order in which the model wrote them."""

    blocks: list[Block] = field(default_factory=list)
    steps: list[StepView] = field(default_factory=list)
    begin: Begin | None = None
    usage: Usage | None = None
    finish: Finish | None = None

    def feed(self, event: Any) -> None:
        """Add one event."""
        if isinstance(event, TextDelta):
            block = self._block("text")
            block.text += event.text
            block.logprobs.extend(event.logprobs or ())
        elif isinstance(event, ReasoningDelta):
            self._block("reasoning").text += event.text
        elif isinstance(event, ToolCallBegin):
            self.blocks.append(Block("tool", id=event.id, name=event.name))
        elif isinstance(event, ToolCallArgs):
            self.blocks[-1].text += event.json
        elif isinstance(event, StepView):
            self.steps.append(event)
        elif isinstance(event, Begin):
            self.begin = event
        elif isinstance(event, Usage):
            self.usage = event
        elif isinstance(event, Finish):
            self.finish = event

    def _block(self, kind: Literal["reasoning", "text"]) -> Block:
        if not self.blocks or self.blocks[-1].kind != kind:
            self.blocks.append(Block(kind))
        return self.blocks[-1]

    @property
    def text(self) -> str:
        return "".join(b.text for b in self.blocks if b.kind == "text")

    @property
    def reasoning(self) -> str:
        return "".join(b.text for b in self.blocks if b.kind == "reasoning")

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [t for b in self.blocks for t in b.logprobs]

    @property
    def tools(self) -> list[Block]:
        return [b for b in self.blocks if b.kind == "tool"]

    def done(self) -> tuple[Usage, Finish]:
        """Usage and finish; raises ApiError 500 when the events ended without them."""
        if self.usage is None or self.finish is None:
            raise ApiError(500, "the answer ended early", code="internal_error")
        return self.usage, self.finish


def openai_usage(usage: Usage) -> dict[str, Any]:
    """The `usage` object of OpenAI's chat and text completions."""
    return {
        "prompt_tokens": usage.prompt_n,
        "completion_tokens": usage.predicted_n,
        "total_tokens": usage.prompt_n + usage.predicted_n,
        "prompt_tokens_details": {"cached_tokens": usage.cached_n},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_n},
    }


def timings(usage: Usage) -> dict[str, Any]:
    """Speed and acceptance under the names of llama.cpp's server, and what a tree adds to them."""
    return {
        "cache_n": usage.cached_n,
        "prompt_n": usage.prompt_n - usage.cached_n,
        "prompt_ms": round(usage.prompt_ms, 3),
        "prompt_per_second": round(usage.prompt_per_second, 2),
        "predicted_n": usage.predicted_n,
        "predicted_ms": round(usage.predicted_ms, 3),
        "predicted_per_second": round(usage.predicted_per_second, 2),
        "draft_n": usage.draft_n,
        "draft_n_accepted": usage.draft_n_accepted,
        "steps": usage.steps,
        "tokens_per_step": round(usage.tokens_per_step, 3),
        "mode": usage.mode,
        "budget": usage.budget,
    }


def logprob_entry(token: TokenLogprob) -> dict[str, Any]:
    """One entry of OpenAI's chat logprobs."""
    return {
        "token": token.data.decode("utf-8", "replace"),
        "bytes": list(token.data),
        "logprob": token.logprob,
        "top_logprobs": [
            {"token": t.data.decode("utf-8", "replace"), "bytes": list(t.data), "logprob": t.logprob}
            for t in token.top
        ],
    }


def dumps(value: Any) -> str:
    """Compact JSON, non-ASCII kept; NaN is an error rather than invalid JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
