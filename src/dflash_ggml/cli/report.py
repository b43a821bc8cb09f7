"""What a run says about itself: a progress meter for terminals, and the statistics of a generation."""

from __future__ import annotations

import time
from typing import TextIO

from ..engine.engine import Engine
from ..engine.step import Step

STAGES = ("draft", "tree", "verify", "commit", "host")


class Meter:
    """A progress bar on a terminal; silent elsewhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._on = stream.isatty()
        self._shown = ""

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


class Run:
    """The record of one generation. Create it just before the prefill."""

    def __init__(self, engine: Engine, prompt_n: int) -> None:
        self.prompt_n = prompt_n
        mode = "tree" if engine.config.mode == "auto" else engine.config.mode
        self.mode = mode if engine.has_draft else "plain"
        self.budget = {"plain": 0, "chain": engine.drafter.depth if engine.drafter else 0}.get(
            self.mode, engine.config.budget
        )
        self.pieces: list[str] = []
        self.token_ids: list[int] = []
        self.steps: list[Step] = []
        self.finish_reason: str | None = None
        self.prompt_ms = self.predicted_ms = 0.0
        self._began = time.perf_counter()

    def prefilled(self) -> None:
        """The prompt is in; decoding begins."""
        now = time.perf_counter()
        self.prompt_ms, self._began = (now - self._began) * 1e3, now

    def add(self, step: Step, text: str) -> None:
        """Take in one step and the text it committed."""
        self.pieces.append(text)
        self.token_ids += step.tokens
        self.finish_reason = step.finish
        if step.mode != "prefill":  # the first token came with the prompt
            self.steps.append(step)
        self.predicted_ms = (time.perf_counter() - self._began) * 1e3

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per target pass of the decoding phase, the target's own token included."""
        return sum(len(s.tokens) for s in self.steps) / len(self.steps) if self.steps else 0.0

    def step_ms(self) -> dict[str, float]:
        """Mean milliseconds of each stage of a step."""
        n = max(len(self.steps), 1)
        return {stage: round(sum(getattr(s.timings, stage) for s in self.steps) / n, 4) for stage in STAGES}

    def as_dict(self) -> dict:
        """All of it, ready for JSON."""
        return {
            "text": "".join(self.pieces),
            "token_ids": self.token_ids,
            "prompt_n": self.prompt_n,
            "predicted_n": len(self.token_ids),
            "prompt_ms": round(self.prompt_ms, 3),
            "predicted_ms": round(self.predicted_ms, 3),
            "steps": len(self.steps),
            "draft_n": sum(s.n_draft for s in self.steps),
            "draft_n_accepted": sum(s.n_accepted for s in self.steps),
            "acceptance_length": round(self.acceptance_length, 4),
            "mode": self.mode,
            "budget": self.budget,
            "finish_reason": self.finish_reason,
            "step_ms": self.step_ms(),
        }

    def line(self) -> str:
        """One line for people."""
        speed = 1e3 * len(self.token_ids) / self.predicted_ms if self.predicted_ms else 0.0
        prompt_speed = 1e3 * self.prompt_n / self.prompt_ms if self.prompt_ms else 0.0
        mode = f"{self.mode} {self.budget}" if self.budget else self.mode
        stages = ", ".join(f"{name} {ms:.2f}" for name, ms in self.step_ms().items())
        return (
            f"prompt {self.prompt_n} tokens at {prompt_speed:.0f}/s; {len(self.token_ids)} tokens at {speed:.1f}/s "
            f"({mode}, {self.acceptance_length:.2f} per step, {len(self.steps)} steps; ms per step: {stages})"
        )
