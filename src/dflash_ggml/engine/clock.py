"""Timing of the parts of a step."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(slots=True)
class StepTimes:
    """Wall milliseconds of one step. tree: planning it and growing its tree. `host` is what the other four leave: masks,
    sampling, bookkeeping."""

    draft: float = 0.0
    tree: float = 0.0
    verify: float = 0.0
    commit: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        """The whole step."""
        return self.draft + self.tree + self.verify + self.commit + self.host


class Clock:
    """Laps of one step, summed by name."""

    __slots__ = ("_at", "times")

    def __init__(self) -> None:
        self.times = StepTimes()
        self._at = time.perf_counter()

    def lap(self, name: str) -> None:
        """Note the milliseconds since the last lap under `name`."""
        now, times = time.perf_counter(), self.times
        setattr(times, name, getattr(times, name) + (now - self._at) * 1e3)
        self._at = now
