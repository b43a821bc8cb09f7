"""Reports of a run: a progress meter for terminals, and the statistics of a generation."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from ..engine.engine import Engine
from ..engine.step import Step
from ..session.events import Usage
from .wording import count

BAR = 24  # columns of a bar, if they fit


STAGES = ("draft", "tree", "verify", "commit", "host")


class Meter:
    """A progress bar on a terminal; silent elsewhere. As a context manager it always removes the bar."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._on = stream.isatty()
        self._shown = ""

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.clear()

    def bytes(self, stage: str, done: int, total: int) -> None:
        """`done` of `total` bytes of a load stage."""
        self._show(f"loading {stage}", done, total, f"{done / 2**20:.0f}/{total / 2**20:.0f} MiB")

    def tokens(self, stage: str, done: int, total: int) -> None:
        """`done` of `total` prompt tokens of a stage; the bar ends at `total`."""
        self._show(stage, done, total, f"{done}/{total} tokens")
        if done >= total:
            self.clear()

    def _show(self, label: str, done: int, total: int, text: str) -> None:
        if not self._on:
            return
        # leave one column free: a full line would wrap, and could not be overwritten
        room = self._columns() - 1
        bar = min(BAR, room - len(f"{label} [] {text}"))
        filled = bar * done // max(total, 1)
        line = f"{label} [{'#' * filled}{'.' * (bar - filled)}] {text}" if bar > 3 else f"{label} {text}"
        line = "\r" + (line if len(line) <= room else text[:room]) + "\x1b[K"
        if line != self._shown:
            self._stream.write(line)
            self._stream.flush()
            self._shown = line

    def _columns(self) -> int:
        """Width of the terminal, 80 if unknown."""
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except (OSError, ValueError):
            return 80

    def clear(self) -> None:
        """Remove the bar."""
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._shown = ""


class Steps:
    """Per-step data of a generation beyond its `Usage`: token ids, and times by stage."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._n = 0
        self._ms = dict.fromkeys(STAGES, 0.0)

    def add(self, step: Step) -> None:
        """Add one step."""
        self.token_ids += step.tokens
        if step.mode != "prefill":  # the first token comes from prefill
            self._n += 1
            for stage in STAGES:
                self._ms[stage] += getattr(step.timings, stage)

    def ms(self) -> dict[str, float]:
        """Mean milliseconds of each stage of a step."""
        return {stage: round(ms / max(self._n, 1), 4) for stage, ms in self._ms.items()}


@dataclass(frozen=True, slots=True)
class Report:
    """Report of one generation. Unlike in `Usage`, tokens include the end-of-generation token.

    Attributes:
        reasoning: For chats only.
    """

    text: str
    finish_reason: str
    usage: Usage
    steps: Steps
    reasoning: str | None = None

    @property
    def is_cut_in_thinking(self) -> bool:
        """Whether the token limit or the context ended it during reasoning."""
        return self.finish_reason == "length" and bool(self.reasoning) and not self.text

    @property
    def per_second(self) -> float:
        """Decoding speed in tokens per second; 0.0 when nothing was timed."""
        return 1e3 * len(self.steps.token_ids) / self.usage.predicted_ms if self.usage.predicted_ms else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data for JSON."""
        usage = self.usage
        return {
            "text": self.text,
            **({} if self.reasoning is None else {"reasoning": self.reasoning}),
            "token_ids": self.steps.token_ids,
            "prompt_n": usage.prompt_n,
            "predicted_n": len(self.steps.token_ids),
            "prompt_ms": round(usage.prompt_ms, 3),
            **({"prefill_fp8": True} if usage.prefill_fp8 else {}),
            "predicted_ms": round(usage.predicted_ms, 3),
            "steps": usage.steps,
            "draft_n": usage.draft_n,
            "draft_n_accepted": usage.draft_n_accepted,
            "sources": [asdict(source) for source in usage.sources],
            "acceptance_length": round(usage.tokens_per_step, 4),
            "mode": usage.mode,
            "budget": usage.budget,
            "widths": [asdict(use) for use in usage.widths],
            "finish_reason": self.finish_reason,
            "step_ms": self.steps.ms(),
        }

    def line(self) -> str:
        """A one-line summary."""
        usage = self.usage
        fixed = usage.mode in ("chain", "tree") and usage.budget
        mode = f"{usage.mode} {usage.budget}" if fixed else usage.mode
        stages = ", ".join(f"{name} {ms:.2f}" for name, ms in self.steps.ms().items())
        kept = usage.prompt_kept_n
        part = "" if kept is None else f", {kept} of them prefilled (lossy, on request),"
        part += " in 8-bit floats (lossy)" if usage.prefill_fp8 else ""
        return (
            f"prompt {count(usage.prompt_n, 'token')}{part} at {usage.prompt_per_second:.0f}/s; "
            f"{count(len(self.steps.token_ids), 'token')} at "
            f"{self.per_second:.1f}/s ({mode}, {usage.tokens_per_step:.2f} per step, {count(usage.steps, 'step')}; "
            f"ms per step: {stages})"
        )

    def drafts(self) -> list[str]:
        """Acceptance by source of drafts, a line each."""
        return [
            f"{source.name:>10}: {source.draft_n_accepted} of {count(source.draft_n, 'node')} accepted in "
            f"{count(source.steps, 'step')}"
            for source in self.usage.sources
        ]

    def choices(self) -> list[str]:
        """Choices of `auto` by width, a line each."""
        if self.usage.mode != "auto":
            return []
        lines = [f"{'width':>10} {'steps':>6} {'tokens/step':>12} {'ms':>8} {'predicted':>10}"]
        for use in self.usage.widths:
            name = count(use.nodes, "node") if use.nodes else "plain"
            expected = "" if use.predicted_ms is None else f"{use.predicted_ms:.2f}"
            lines.append(
                f"{name:>10} {use.steps:6} {use.tokens / use.steps:12.2f} {use.ms / use.steps:8.2f} {expected:>10}"
            )
        return lines


def sizes(engine: Engine) -> list[str]:
    """The device, memory by part, and graph runs, a line each."""
    device = engine.device
    counts = engine.run_counts()
    kept = ", ".join(f"{kind} {n}" for kind, n in sorted(engine.passes.graphs.kinds.items()))
    return [
        f"{device.info.description}, {count(device.n_threads, 'thread')}",
        *(f"  {plan.where}" for plan in engine.memory.devices if plan.where),
        f"  K/V caches: {engine.passes.state.kv.type}",
        *(f"  {name:16} {size / 2**20:9.1f} MiB" for name, size in engine.nbytes.items()),
        f"  {engine.memory.against(engine.nbytes)}",
        f"  graphs: {counts['graphs']} built, {count(counts['runs'], 'run')}; kept: {kept}",
    ]
