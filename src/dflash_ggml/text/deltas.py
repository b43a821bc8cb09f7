"""Pieces of an assistant's answer: reasoning, visible text and tool calls, with their tokens' log-probabilities.

A tool call is `ToolCallBegin` `ToolCallArgs`* `ToolCallEnd`; calls do not interleave, and the concatenated `json` of its
`ToolCallArgs` is one JSON object (cut off where it was if the answer was).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One candidate token: id, its bytes and its natural log-probability under the unmodified logits."""

    token: int
    data: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """An emitted token with its log-probability and the best alternatives (sorted, best first).

    Attributes:
        logprob: None for a prompt's first token, which nothing predicts, and if only the tokens were requested.
        offset: Index of the token's first character: in the concatenated prompt and output of a completion, in the
            visible text of a chat.
    """

    token: int
    data: bytes
    logprob: float | None
    top: tuple[TopLogprob, ...]
    offset: int = 0


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More text of the model's reasoning (never empty)."""

    text: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More visible text; `logprobs` has the tokens whose text begins in this delta, if requested."""

    text: str
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """A tool call starts; `index` counts calls of this message from 0, `id` is unique."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArgs:
    """The next piece of the call's arguments as JSON text."""

    index: int
    json: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The call is complete."""

    index: int


Delta = Union[ReasoningDelta, TextDelta, ToolCallBegin, ToolCallArgs, ToolCallEnd]
