"""One answer put together from its events; all encoders render this, so streams and bodies agree."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from ..session.events import (
    Begin,
    Finish,
    ReasoningDelta,
    StepReport,
    TextDelta,
    TokenLogprob,
    ToolCallArgs,
    ToolCallBegin,
    Usage,
)
from .errors import ApiError


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
    steps: list[StepReport] = field(default_factory=list)
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
        elif isinstance(event, StepReport):
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


def dumps(value: Any) -> str:
    """Compact JSON, non-ASCII kept; NaN is an error rather than invalid JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
