"""Typed events of one generation: the interface between the engine's tokens and every response format.

Order within one run: `Progress`* `Begin` `Progress`* (deltas)* `Usage` `Finish`. `Finish` is always last, directly after
`Usage`. A requested `StepReport` comes before the deltas of its step. The deltas of `text.deltas` are re-exported here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Union

from ..text.deltas import (
    Delta,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallArgs,
    ToolCallBegin,
    ToolCallEnd,
    TopLogprob,
)

if TYPE_CHECKING:
    from ..engine.step import Step
    from ..text.tokenizer import Tokenizer


__all__ = [
    "Begin",
    "Event",
    "Finish",
    "FinishReason",
    "Progress",
    "PromptLogprobs",
    "ReasoningDelta",
    "StepReport",
    "TextDelta",
    "TokenLogprob",
    "ToolCallArgs",
    "ToolCallBegin",
    "ToolCallEnd",
    "TopLogprob",
    "Usage",
    "merged",
]

FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]


@dataclass(frozen=True, slots=True)
class Begin:
    """The prompt is tokenised: its length in tokens, and how many of them were cached."""

    prompt_n: int
    cached_n: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a long stage: `done` of `total` units (tokens for stage "prefill")."""

    stage: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The prompt's tokens with their log-probabilities, if requested; comes before the first delta."""

    tokens: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class WidthUse:
    """Steps of one width.

    Attributes:
        nodes: Drafted ones that were verified, 0 in plain decoding.
        tokens: Tokens that the steps emitted.
        ms: Wall milliseconds of all of them.
        predicted_ms: Expected milliseconds of one step, as of the end; None if unknown.
    """

    nodes: int
    steps: int
    tokens: int
    ms: float
    predicted_ms: float | None


@dataclass(frozen=True, slots=True)
class SourceTotal:
    """Totals of one source of drafted tokens: steps it took part in, nodes it proposed, nodes accepted."""

    name: str
    steps: int
    draft_n: int
    draft_n_accepted: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts and times of one run. Tokens are the model's; times are wall milliseconds.

    Attributes:
        prompt_n: Tokens of the prompt.
        cached_n: Those of them that were in the prefix cache.
        predicted_n: Tokens emitted, without the end-of-generation token.
        reasoning_n: Those of them that are reasoning.
        steps: Target passes after the prompt's own.
        draft_n: Drafted nodes that the target verified.
        draft_n_accepted: Those that it accepted.
        sources: The same by source; a node of two sources counts for both.
        mode: The requested mode, plain if nothing drafts.
        budget: The most drafted nodes of a step, 0 in plain decoding.
        widths: Steps by width, narrowest first.
        prompt_kept_n: Tokens of a shortened prompt that were prefilled.
        score_ms: Time for choosing them, included in `prompt_ms`.
        prefill_fp8: Whether prompts are prefilled with 8-bit floats, which is lossy.
    """

    prompt_n: int
    cached_n: int
    predicted_n: int
    reasoning_n: int
    steps: int
    draft_n: int
    draft_n_accepted: int
    prompt_ms: float
    predicted_ms: float
    mode: str
    budget: int
    widths: tuple[WidthUse, ...] = ()
    sources: tuple[SourceTotal, ...] = ()
    prompt_kept_n: int | None = None
    score_ms: float = 0.0
    prefill_fp8: bool = False

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens emitted per target pass after prefill; 0.0 without a pass."""
        return sum(use.tokens for use in self.widths) / self.steps if self.steps else 0.0

    @property
    def predicted_per_second(self) -> float:
        """Decoding speed in tokens per second; 0.0 when nothing was timed."""
        return 1000.0 * self.predicted_n / self.predicted_ms if self.predicted_ms > 0 else 0.0

    @property
    def prefilled_n(self) -> int:
        """Tokens of the prompt that were prefilled: kept and not cached."""
        return (self.prompt_n if self.prompt_kept_n is None else self.prompt_kept_n) - self.cached_n

    @property
    def prompt_per_second(self) -> float:
        """Prefill speed in tokens per second over the tokens that were not cached; 0.0 when nothing was timed."""
        return 1000.0 * self.prefilled_n / self.prompt_ms if self.prompt_ms > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of the run. `stop_string` is the stop string that ended it, if one did."""

    reason: FinishReason
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step, as a client sees it. A step without a draft has no nodes.

    Attributes:
        tokens, parents, texts, log_probs: Of each node of the tree; node 0 is the root (the pending token).
        path: The accepted nodes, root first.
        emitted: The texts that the step added.
        times: Milliseconds by part of the step.
        sources: Source of each node: 0 for the root, 1 a draft model, 2 prompt lookup, 3 both.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    texts: tuple[str, ...]
    log_probs: tuple[float, ...]
    path: tuple[int, ...]
    accepted: int
    emitted: tuple[str, ...]
    mode: str
    times: Mapping[str, float]
    sources: tuple[int, ...] = ()

    @classmethod
    def of(cls, step: Step, tokenizer: Tokenizer) -> StepReport:
        """The report of an engine's Step."""

        def text(token: int) -> str:
            return tokenizer.piece(int(token)).decode("utf-8", "replace")

        tree = step.tree
        tokens = tuple(int(t) for t in tree.tokens) if tree is not None else ()
        sources: tuple[int, ...] = (0, *[1] * (len(tokens) - 1)) if tokens else ()
        if tree is not None and tree.sources is not None:
            sources = tuple(tree.sources.tolist())
        names = ("draft", "tree", "verify", "commit", "host")
        # rejected tokens of prompt lookup may come from another client's answer
        hidden = {i for i, source in enumerate(sources) if source & 2 and i not in step.path}
        tokens = tuple(-1 if i in hidden else token for i, token in enumerate(tokens))
        return cls(
            tokens=tokens,
            parents=tuple(int(p) for p in tree.parents) if tree is not None else (),
            texts=tuple("" if t < 0 else text(t) for t in tokens),
            log_probs=tuple(round(float(p), 4) for p in tree.log_probs) if tree is not None else (),
            path=tuple(int(i) for i in step.path),
            accepted=int(step.n_accepted),
            emitted=tuple(text(t) for t in step.tokens),
            mode=step.mode,
            times={n: round(float(getattr(step.timings, n)), 3) for n in names},
            sources=sources,
        )


Event = Union[Begin, Progress, PromptLogprobs, StepReport, Delta, Usage, Finish]


def merged(events: Iterable[Event]) -> list[Event]:
    """The events with adjacent deltas of one kind joined: one step's output in as few events as possible."""
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta):
            logprobs = (last.logprobs or ()) + (event.logprobs or ())
            out[-1] = TextDelta(last.text + event.text, logprobs or None)
        elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            out[-1] = ReasoningDelta(last.text + event.text)
        elif isinstance(event, ToolCallArgs) and isinstance(last, ToolCallArgs) and event.index == last.index:
            out[-1] = ToolCallArgs(event.index, last.json + event.json)
        else:
            out.append(event)
    return out
