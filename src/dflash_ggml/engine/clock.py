"""Timing of the parts of a step."""

from __future__ import annotations

import time

from ..ggml.graph_cache import GraphCache
from ..policy.policy import StepTimes


class Clock:
    """Laps of one step, summed by name.

    Attributes:
        cold: Laps in which a graph was run for the first times, which take longer than later ones.
    """

    __slots__ = ("_at", "_graphs", "_n", "cold", "times")

    def __init__(self, graphs: GraphCache) -> None:
        self.times, self._graphs, self._n = StepTimes(), graphs, graphs.cold
        self.cold: set[str] = set()  # set[str]() takes much longer
        self._at = time.perf_counter()

    def lap(self, name: str) -> None:
        """Note the milliseconds since the last lap under `name`."""
        now, times = time.perf_counter(), self.times
        setattr(times, name, getattr(times, name) + (now - self._at) * 1e3)
        if (n := self._graphs.cold) != self._n:
            self._n = n
            self.cold.add(name)
        self._at = now
