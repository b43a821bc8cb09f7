"""What a run says about itself: a progress meter for terminals, and the statistics of a generation."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, TextIO

from ..engine.engine import Engine
from ..engine.step import Step
from ..session.events import Usage

STAGES = ("draft", "tree", "verify", "commit", "host")


class Meter:
    """A progress bar on a terminal; silent elsewhere. As a context it removes the bar, whatever happens."""

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

    def tokens(self, done: int, total: int) -> None:
        """`done` of `total` prompt tokens."""
        self._show("prefill", done, total, f"{done}/{total} tokens")

    def _show(self, label: str, done: int, total: int, text: str) -> None:
        if not self._on:
            return
        filled = 24 * done // max(total, 1)
        line = f"\r{label} [{'#' * filled}{'.' * (24 - filled)}] {text}"
        if line != self._shown:
            self._stream.write(line)
            self._stream.flush()
            self._shown = line

    def clear(self) -> None:
        """Remove the bar."""
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._shown = ""


class Steps:
    """What the steps of a generation tell beyond its `Usage`: the token ids, and where the time went."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._n = 0
        self._ms = dict.fromkeys(STAGES, 0.0)

    def add(self, step: Step) -> None:
        """Take in one step."""
        self.token_ids += step.tokens
        if step.mode != "prefill":  # the first token came with the prompt
            self._n += 1
            for stage in STAGES:
                self._ms[stage] += getattr(step.timings, stage)

    def ms(self) -> dict[str, float]:
        """Mean milliseconds of each stage of a step."""
        return {stage: round(ms / max(self._n, 1), 4) for stage, ms in self._ms.items()}


@dataclass(frozen=True, slots=True)
class Report:
    """One generation. Unlike `Usage`, its tokens include the end-of-generation token."""

    text: str
    finish_reason: str
    usage: Usage
    steps: Steps

    @property
    def per_second(self) -> float:
        """Decoding speed in tokens per second; 0.0 when nothing was timed."""
        return 1e3 * len(self.steps.token_ids) / self.usage.predicted_ms if self.usage.predicted_ms else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        usage = self.usage
        return {
            "text": self.text,
            "token_ids": self.steps.token_ids,
            "prompt_n": usage.prompt_n,
            "predicted_n": len(self.steps.token_ids),
            "prompt_ms": round(usage.prompt_ms, 3),
            "predicted_ms": round(usage.predicted_ms, 3),
            "steps": usage.steps,
            "draft_n": usage.draft_n,
            "draft_n_accepted": usage.draft_n_accepted,
            "acceptance_length": round(usage.tokens_per_step, 4),
            "mode": usage.mode,
            "budget": usage.budget,
            "widths": [asdict(use) for use in usage.widths],
            "finish_reason": self.finish_reason,
            "step_ms": self.steps.ms(),
        }

    def line(self) -> str:
        """One line for people."""
        usage = self.usage
        fixed = usage.mode in ("chain", "tree") and usage.budget
        mode = f"{usage.mode} {usage.budget}" if fixed else usage.mode
        stages = ", ".join(f"{name} {ms:.2f}" for name, ms in self.steps.ms().items())
        return (
            f"prompt {usage.prompt_n} tokens at {usage.prompt_per_second:.0f}/s; {len(self.steps.token_ids)} tokens at "
            f"{self.per_second:.1f}/s ({mode}, {usage.tokens_per_step:.2f} per step, {usage.steps} steps; "
            f"ms per step: {stages})"
        )

    def choices(self) -> list[str]:
        """What `auto` chose, a line for each width."""
        if self.usage.mode != "auto":
            return []
        lines = [f"{'width':>10} {'steps':>6} {'tokens/step':>12} {'ms':>8} {'predicted':>10}"]
        for use in self.usage.widths:
            name = f"{use.nodes} nodes" if use.nodes else "plain"
            expected = "" if use.predicted_ms is None else f"{use.predicted_ms:.2f}"
            lines.append(
                f"{name:>10} {use.steps:6} {use.tokens / use.steps:12.2f} {use.ms / use.steps:8.2f} {expected:>10}"
            )
        return lines


def sizes(engine: Engine) -> list[str]:
    """The device, the bytes of everything on it, and how often its graphs ran, a line each."""
    device = engine.device
    counts = engine.run_counts()
    return [
        f"{device.info.description}, {device.n_threads} threads",
        *(f"  {name:16} {size / 2**20:9.1f} MiB" for name, size in engine.nbytes.items()),
        f"  graphs: {counts['graphs']} built, {counts['runs']} runs",
    ]
