"""An answer assembled from its events: every body is rendered from it, so that streams and bodies agree."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import DflashError
from .events import (
    Begin,
    Finish,
    PromptLogprobs,
    ReasoningDelta,
    StepReport,
    TextDelta,
    TokenLogprob,
    ToolCallArgs,
    ToolCallBegin,
    Usage,
)


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
    """The answer so far. `blocks` are in the order in which the model generated them."""

    blocks: list[Block] = field(default_factory=list)
    steps: list[StepReport] = field(default_factory=list)
    prompt: list[TokenLogprob] = field(default_factory=list)
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
        elif isinstance(event, PromptLogprobs):
            self.prompt.extend(event.tokens)
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

    @classmethod
    def of(cls, events: Iterable[Any]) -> Answer:
        """The answer assembled from all these events."""
        answer = cls()
        for event in events:
            answer.feed(event)
        return answer

    @property
    def text(self) -> str:
        """The visible text so far."""
        return "".join(b.text for b in self.blocks if b.kind == "text")

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return "".join(b.text for b in self.blocks if b.kind == "reasoning")

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """Log-probabilities of the tokens so far."""
        return [t for b in self.blocks for t in b.logprobs]

    @property
    def tools(self) -> list[Block]:
        """The tool calls so far."""
        return [b for b in self.blocks if b.kind == "tool"]

    def done(self) -> tuple[Usage, Finish]:
        """Usage and finish.

        Raises:
            DflashError: The events ended without them.
        """
        if self.usage is None or self.finish is None:
            raise DflashError("the answer ended early")
        return self.usage, self.finish
