"""What passes cost on this machine, as measured while decoding: a moving median per kind of pass, width and context."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Literal

Pass = Literal["plain", "verify", "draft", "commit", "host"]

WINDOW = (
    16  # measurements that a median is taken of: a machine that throttles is noticed within some twenty steps
)


class Costs:
    """Wall milliseconds of passes. Widths count columns; contexts are told apart by powers of two.

    What is timed are calls. On a GPU a commit returns when it is launched, and the next draft waits for it: only their sum is
    what they cost. `host` is the rest of a drafted step: the tree, sampling, bookkeeping.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[Pass, int, int], deque[float]] = {}

    def measured(self, kind: Pass, ms: float, width: int = 1, context: int = 0) -> None:
        """Take in a measurement."""
        self._seen.setdefault((kind, width, context.bit_length()), deque(maxlen=WINDOW)).append(ms)

    def of(self, kind: Pass, width: int = 1, context: int = 0) -> float | None:
        """The median of the last measurements, None where there is none."""
        seen = self._seen.get((kind, width, context.bit_length()))
        return median(seen) if seen else None
