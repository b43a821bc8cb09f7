"""What passes over several sequences cost: those of one sequence with as many columns, and what each further sequence adds.

Products are over all columns together, so a pass of S sequences costs what one of as many columns does; attention, convolution
and delta net run per sequence. That rest is learned per number of sequences. A table by columns and sequences was the other
design: it would have to be measured in full before the first decision, and neighbours of a cell would say nothing of it. Here a
cell that was measured a few times stands for itself, and every other one for the sum. Passes wider than any of one sequence
continue its curve; a draft's columns cost the same whosever they are.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Iterable
from math import inf
from statistics import median
from typing import Literal

from .costs import FEW, LEAST, WINDOW, Costs

JointPass = Literal["plain", "verify", "draft", "commit", "host"]


class JointCosts:
    """Wall milliseconds of passes over two or more sequences; those of one are `costs`."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._cells: dict[tuple[JointPass, int, int], deque[float]] = {}
        self._wide: dict[
            JointPass, dict[int, deque[float]]
        ] = {}  # of one sequence, by columns that one never has
        self._extras: dict[JointPass, dict[int, deque[float]]] = {}
        self._noted: list[tuple[JointPass, float, int, int, int]] = []
        # curves that were asked for since something was measured: of one sequence, and with the columns that one never has
        self._of_one: dict[tuple[JointPass, int], list[tuple[int, float]]] = {}
        self._all: dict[tuple[JointPass, int], list[tuple[int, float]]] = {}

    def measured(self, kind: JointPass, ms: float, columns: int, sequences: int, context: int = 0) -> None:
        """Note a measurement, which is taken in when a cost is asked for, or earlier, while a device is busy. columns: of all
        sequences together; context: their mean."""
        self._of_one.clear()
        self._all.clear()
        self._noted.append((kind, max(LEAST, ms) / self.costs.pace, columns, sequences, context))

    def catch_up(self) -> None:
        """Take in what was noted."""
        noted, self._noted = self._noted, []
        for measurement in noted:
            self._take_in(*measurement)

    def _take_in(self, kind: JointPass, ms: float, columns: int, sequences: int, context: int) -> None:
        """ms: at a pace of 1."""
        self._cells.setdefault((kind, columns, sequences), deque(maxlen=WINDOW)).append(ms)
        alone = self._curve(kind, context)
        if alone and columns > alone[-1][0]:
            wide = self._wide.setdefault(kind, {}).setdefault(columns, deque(maxlen=WINDOW))
            wide.append(ms - self._extra(kind, sequences))
            self._all.clear()
        elif sequences > 1 and kind != "draft":
            extra = ms - self._alone(kind, columns, context) / self.costs.pace
            extras = self._extras.setdefault(kind, {})
            extras.setdefault(sequences, deque(maxlen=WINDOW)).append(extra)

    def of(self, kind: JointPass, columns: int, sequences: int, context: int = 0) -> float:
        """What a pass costs now; 0 where nothing of its kind is known."""
        self.catch_up()
        cell = self._cells.get((kind, columns, sequences), ())
        measured = median(cell) * self.costs.pace if cell else 0.0
        if len(cell) >= FEW:
            return measured
        derived = self._alone(kind, columns, context) + self._extra(kind, sequences) * self.costs.pace
        # one that was disturbed is not to be believed, nor is what was derived once there is one
        return max(derived + (measured - derived) * len(cell) / FEW, 0.0)

    def knows(self, kind: JointPass, sequences: int) -> bool:
        """Whether what so many sequences add was measured, or what fewer and more do, no more than twice as many."""
        self.catch_up()
        if sequences < 2:
            return True
        # of more sequences than one ever has columns it is among the wide passes
        wide = self._wide.get(kind, ()) if kind == "plain" else ()
        fewer, more = _neighbours({*self._extras.get(kind, ()), *wide}, sequences)
        return bool(fewer and more) and more <= 2 * fewer

    def _alone(self, kind: JointPass, columns: int, context: int) -> float:
        """A pass of one sequence with so many columns.

        Wider ones than any of one sequence that were not measured are on the line of the two before them, or on that to the next
        where it is lower: what is hoped for is tried and then known, what is feared never is.
        """
        curve = self._all.get((kind, context))
        if curve is None:
            curve = self._all[kind, context] = self._widened(kind, context)
        if not curve:
            return 0.0
        i = bisect(curve, (columns,))  # of the first that is no narrower
        if i < len(curve) and (i == 0 or curve[i][0] == columns):
            return curve[i][1]
        hoped = inf
        if columns > self._curve(kind, context)[-1][0]:
            (w0, ms0), (w1, ms1) = curve[i - 2 : i] if i > 1 else ((0, 0.0), curve[0])
            hoped = ms1 + (columns - w1) * max(ms1 - ms0, 0.0) / (w1 - w0)
        if i == len(curve):
            return hoped
        (w0, ms0), (w1, ms1) = curve[i - 1 : i + 1]
        return min(hoped, ms0 + (columns - w0) / (w1 - w0) * (ms1 - ms0))

    def _widened(self, kind: JointPass, context: int) -> list[tuple[int, float]]:
        """The curve of one sequence, continued by passes that are wider."""
        curve = [*self._curve(kind, context)]
        wide = self._wide.get(kind, {}) if curve else {}
        for width in sorted(wide):
            if width > curve[-1][0]:
                curve.append((width, max(median(wide[width]) * self.costs.pace, curve[-1][1])))
        return curve

    def _curve(self, kind: JointPass, context: int) -> list[tuple[int, float]]:
        """(columns, milliseconds) of passes of one sequence."""
        found = self._of_one.get((kind, context))
        if found is None:
            if kind == "commit":
                found = [(1, self.costs.of("commit") or 0.0)]
            else:
                found = self.costs.curve("verify" if kind == "plain" else kind, context)
            self._of_one[kind, context] = found
        return found

    def _extra(self, kind: JointPass, sequences: int) -> float:
        """What so many sequences take more than one: on a line between what was measured, beyond that through the nearest."""
        extras = self._extras.get(kind)
        if not extras or sequences < 2:
            return 0.0
        fewer, more = _neighbours(extras, sequences)
        if not fewer or not more:
            nearest = fewer or more
            return median(extras[nearest]) * (sequences - 1) / (nearest - 1)
        least = median(extras[fewer])
        if fewer == more:
            return least
        return least + (median(extras[more]) - least) * (sequences - fewer) / (more - fewer)


def _neighbours(measured: Iterable[int], n: int) -> tuple[int, int]:
    """The nearest numbers to n that were measured, below and above it, or itself; 0 for none."""
    fewer = max([m for m in measured if m <= n], default=0)
    return fewer, min([m for m in measured if m >= n], default=0)
