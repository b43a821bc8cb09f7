"""Costs of passes on this machine: measured at load time, then learned while decoding.

One table: a moving median by (pass, columns, sequences) and octave of the context. An unmeasured cell is derived from
measured ones: matmuls run over all columns, so a pass over S sequences costs as much as one sequence with as many
columns, plus an amount learned by S. All costs share a pace: a throttled machine slows every pass at once, also those
that have not run since. The pace moves only where passes of several kinds agree, so that one wrong measurement moves
nothing else.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Iterable
from math import inf
from typing import Literal, NamedTuple, get_args

from ..decode.tree import verify_width

Pass = Literal["plain", "verify", "draft", "append", "commit", "host", "after"]

WINDOW = 15  # measurements of a median: a machine that slows down is noticed within ten steps
SURE = 5  # measurements of a pass before it counts for the pace
RECENT = 20  # measurements after which a pass no longer counts for the pace
APART = 1.5  # minimum ratio of two contexts for a slope; between nearer ones it is noise
NOTED = 64  # most pending measurements
LEAST = 1e-6  # milliseconds; a coarse clock may report 0


class Point(NamedTuple):
    """One measurement of one sequence: wall milliseconds of a pass of `width` columns at `context` tokens."""

    kind: Pass
    width: int
    context: int
    ms: float


class _Cell:
    """The last measurements of one kind, at pace 1; context: of the newest."""

    __slots__ = ("_median", "context", "ms")

    def __init__(self, window: int = WINDOW) -> None:
        self.context, self._median, self.ms = 0, 0.0, deque[float](maxlen=window)

    def take(self, ms: float, context: int = 0) -> None:
        self.context, self._median = context, 0.0
        self.ms.append(ms)

    @property
    def median(self) -> float:
        if not self._median:
            ordered = sorted(self.ms)  # statistics.median checks its input for longer than this sorts
            half = len(ordered) // 2
            self._median = ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
        return self._median


Key = tuple[Pass, int, int]
Curve = list[tuple[int, float]]


class Costs:
    """Wall milliseconds of passes.

    plain: a step of one column per sequence. verify, draft, commit: passes of a drafted step. append: the draft model's pass
    over committed tokens when it does not propose. host: the rest of a drafted step. after: additional time of a plain step
    right after a drafted one, when a CPU's caches hold other weights.
    """

    def __init__(self) -> None:
        self._cells: dict[Key, dict[int, _Cell]] = {}  # by octave of the context
        self._extra: dict[tuple[Pass, int], _Cell] = {}  # additional time of a pass by sequences
        self._wide: dict[tuple[Pass, int], _Cell] = {}  # passes with more columns than one sequence ever has
        # when a pass last ran, and its times over its usual ones
        self._slowdowns: dict[Pass, tuple[int, _Cell]] = {}
        self._pace, self._n = 1.0, 0
        self._noted = deque[tuple[Pass, float, int, int, int]](maxlen=NOTED)
        # at pace 1, as of the last `catch_up`
        self._curves: dict[tuple[Pass, int], Curve] = {}
        self._slopes: dict[Key, float] = {}  # likewise

    # ---- what is measured

    def measured(self, kind: Pass, ms: float, columns: int = 1, context: int = 0, sequences: int = 1) -> None:
        """Record a measurement; it takes effect at the next lookup, or in `catch_up` while a device is busy.

        Args:
            columns: Of all sequences.
            context: Their mean.
        """
        self._noted.append((kind, max(ms, LEAST), columns, context, sequences))

    def catch_up(self) -> None:
        """Process the recorded measurements."""
        if not self._noted:
            return
        for measurement in self._noted:
            self._take_in(*measurement)
        self._noted.clear()
        self._curves.clear()
        self._slopes.clear()

    def learn(self, points: Iterable[Point]) -> None:
        """Process measurements of an earlier run as usual values: they outweigh the first few of this run."""
        for kind, width, context, ms in points:
            for _ in range(SURE + 1):
                self._take((kind, width, 1), ms, context)
        self._curves.clear()
        self._slopes.clear()

    def points(self) -> list[Point]:
        """The medians for one sequence, in the form that `learn` accepts."""
        self.catch_up()
        order = get_args(Pass).index
        return [
            Point(kind, width, cell.context, cell.median * self._pace)
            for (kind, width, n), octaves in sorted(
                self._cells.items(), key=lambda item: (order(item[0][0]), item[0])
            )
            if n == 1
            for _, cell in sorted(octaves.items())
        ]

    @property
    def pace(self) -> float:
        """Current slowdown of all passes, 1 for the usual speed."""
        self.catch_up()
        return self._pace

    # ---- lookups

    def of(self, kind: Pass, columns: int = 1, context: int = 0, sequences: int = 1) -> float | None:
        """Current cost of a pass by its own measurements; None without any."""
        self.catch_up()
        usual = self._at_pace_one((kind, columns, sequences), context)
        return None if usual is None else usual * self._pace

    def expected(self, kind: Pass, columns: int = 1, context: int = 0, sequences: int = 1) -> float:
        """Current cost of a pass, derived if it was not measured; 0 if nothing of its kind is known.

        Measurements since the last `catch_up` do not count.
        """
        usual = None
        if sequences > 1 or kind == "plain":
            usual = self._at_pace_one((kind, columns, sequences), context)
        if usual is None:
            alone = self._alone if sequences > 1 else self._measured
            usual = max(alone(kind, columns, context) + self._added(kind, sequences), 0.0)
        return usual * self._pace

    def knows_plain(self, sequences: int) -> bool:
        """Whether plain steps of so many sequences were measured, or both of fewer and of more (at most twice as many)."""
        self.catch_up()
        if sequences == 1:
            return ("plain", 1, 1) in self._cells
        known = [n for kind, _, n in self._cells if kind == "plain" and n > 1]
        fewer, more = _neighbours(known, sequences)
        return bool(fewer and more) and more <= 2 * fewer

    def curve(self, kind: Pass, context: int = 0) -> Curve:
        """(columns, milliseconds) of the measured passes of one sequence, rising in both."""
        self.catch_up()
        return [(columns, ms * self._pace) for columns, ms in self._curve(kind, context)]

    def verified(self, nodes: Iterable[int], context: int = 0, sequences: int = 1) -> dict[int, float]:
        """Cost of a step without its drafts, by the number of verified nodes of all sequences."""
        of, found = self.expected, dict[int, float]()
        commit = of("commit", 1, 0, sequences)
        for n in nodes:
            width = verify_width(sequences + n - 1)
            found[n] = commit + of("verify", width, context, sequences) + of("host", width, 0, sequences)
        return found

    def drafted(self, nodes: Iterable[int], block: int, context: int = 0) -> dict[int, float]:
        """Cost of a step of one sequence with a draft of `block` columns; 0: with prompt lookup alone."""
        self.catch_up()
        draft = self.expected("draft", block, context) if block else self.expected("append", 1, context)
        return {n: draft + ms for n, ms in self.verified(nodes, context).items()}

    # ---- the table

    def _take_in(self, kind: Pass, ms: float, columns: int, context: int, sequences: int) -> None:
        if sequences == 1 and kind in ("plain", "verify", "draft"):
            self._keep_pace(kind, ms, columns, context)
        ms /= self._pace
        if sequences > 1:
            curve = self._curve(kind, context)
            if curve and columns > curve[-1][0]:
                cell = self._wide.setdefault((kind, columns), _Cell())
                cell.take(ms - self._added(kind, sequences))
            elif kind != "draft":
                cell = self._extra.setdefault((kind, sequences), _Cell())
                cell.take(ms - self._alone(kind, columns, context))
        self._take((kind, columns, sequences), ms, context)

    def _keep_pace(self, kind: Pass, ms: float, columns: int, context: int) -> None:
        """Move the pace by what recent passes have in common: their smallest slowdown, or their smallest speedup."""
        self._n += 1
        octaves = self._cells.get((kind, columns, 1))
        if not octaves:
            return
        here = octaves.get(context.bit_length())
        usual = here.median if here else self._at_pace_one((kind, columns, 1), context) or LEAST
        _, cell = self._slowdowns.get(kind) or (0, _Cell(SURE))
        cell.take(ms / usual)
        self._slowdowns[kind] = self._n, cell
        since = self._n - RECENT
        found = [c.median for at, c in self._slowdowns.values() if at > since and len(c.ms) == SURE]
        if len(found) > 1:
            least = min(found)
            self._pace = max(least, 1.0) if least > 1 else min(max(found), 1.0)

    def _take(self, key: Key, ms: float, context: int) -> None:
        octaves = self._cells.setdefault(key, {})
        octave = context.bit_length()
        if octave not in octaves:
            octaves[octave] = _Cell()
        octaves[octave].take(ms, context)

    def _at_pace_one(self, key: Key, context: int) -> float | None:
        """The median at this context's octave, else from the nearest one along the slope over the context."""
        octaves = self._cells.get(key)
        if not octaves:
            return None
        bits = context.bit_length()
        nearest = octaves.get(bits) or octaves[min(octaves, key=lambda seen: abs(seen - bits))]
        further = context - nearest.context
        if not further:
            return nearest.median
        slope = self._slopes.get(key)
        if slope is None:
            slope = self._slopes[key] = self._slope(key)
        # never negative at context 0
        return max(nearest.median + min(slope, nearest.median / max(nearest.context, 1)) * further, LEAST)

    def _slope(self, key: Key) -> float:
        """Milliseconds per token of context.

        A verify pass that is known at one octave only takes the slope of the target's other passes, linear in their columns: on a
        GPU the width hardly matters, on a CPU every column reads the context.
        """
        kind, columns, sequences = key
        own = _rise(self._cells.get(key, {}))
        if own is not None or kind != "verify" or sequences > 1:
            return own or 0.0
        of_target = [
            (w, _rise(cells))
            for (k, w, n), cells in self._cells.items()
            if n == 1 and k in ("verify", "plain")
        ]
        known = sorted([(w, rise) for w, rise in of_target if rise is not None])
        if len(known) < 2:
            return known[0][1] if known else 0.0
        return max(_on_line(known, columns, beyond=True), 0.0)

    def _curve(self, kind: Pass, context: int) -> Curve:
        """`curve` at pace 1. A plain step is the narrowest verify pass. Wider passes bound narrower ones from above, so that a
        width whose measurement was disturbed is not avoided for ever."""
        if kind == "plain":
            kind = "verify"
        known = self._curves.get((kind, context))
        if known is None:
            known = [
                (w, self._at_pace_one((k, w, n), context) or 0.0)
                for k, w, n in self._cells
                if k == kind and n == 1
            ]
            if kind == "verify" and (plain := self._at_pace_one(("plain", 1, 1), context)) is not None:
                known.append((1, plain))
            known.sort()
            for i in range(len(known) - 2, -1, -1):
                known[i] = known[i][0], min(known[i][1], known[i + 1][1])
            self._curves[kind, context] = known
        return known

    def _measured(self, kind: Pass, columns: int, context: int) -> float:
        """A pass of one sequence, at pace 1: linear between measured widths, constant beyond them."""
        return _on_line(self._curve(kind, context), columns)

    def _alone(self, kind: Pass, columns: int, context: int) -> float:
        """A pass of one sequence with so many columns, at pace 1, also beyond the widths that one sequence has.

        Beyond them the line through the last two widths is an upper bound: an optimistic estimate is tried and then measured, a
        pessimistic one never is.
        """
        curve = self._curve(kind, context)
        if not curve or columns <= curve[-1][0]:
            return _on_line(curve, columns)
        last, least = curve[-1]
        wide = [(w, max(cell.median, least)) for (k, w), cell in self._wide.items() if k == kind and w > last]
        curve = [*curve, *sorted(wide)]
        i = bisect(curve, (columns,))
        if i < len(curve) and curve[i][0] == columns:
            return curve[i][1]
        (w0, ms0), (w1, ms1) = curve[i - 2 : i] if i > 1 else ((0, 0.0), curve[0])
        hoped = ms1 + (columns - w1) * max(ms1 - ms0, 0.0) / (w1 - w0)
        return min(hoped, _on_line(curve, columns) if i < len(curve) else inf)

    def _added(self, kind: Pass, sequences: int) -> float:
        """Additional time of so many sequences over one: linear between measurements, proportional beyond them."""
        if sequences == 1:
            return 0.0
        known = sorted([(n, cell.median) for (k, n), cell in self._extra.items() if k == kind])
        fewer, more = _neighbours([n for n, _ in known], sequences)
        if fewer and more:
            return _on_line(known, sequences)
        nearest = fewer or more
        return dict(known)[nearest] * (sequences - 1) / (nearest - 1) if nearest else 0.0


def step_ends(most: int, sequences: int = 1) -> list[int]:
    """Drafted nodes of so many sequences at which one more would make a pass wider, up to one of `most` columns."""
    room = most - sequences
    ends = [w - sequences for w in (*range(1, 9), *range(16, most, 8)) if 0 < w - sequences < room]
    return [*ends, room] if room > 0 else ends


def _rise(octaves: dict[int, _Cell]) -> float | None:
    """Milliseconds per token between the shortest and the longest context; None if they are too close."""
    if len(octaves) < 2:
        return None
    low, high = octaves[min(octaves)], octaves[max(octaves)]
    if high.context < APART * low.context:
        return None
    return max(high.median - low.median, 0.0) / max(high.context - low.context, 1)


def _on_line(known: Curve, at: int, beyond: bool = False) -> float:
    """Piecewise linear value at `at` through points with rising x, 0 without any; beyond them the last value, or the line's."""
    if not known:
        return 0.0
    i = bisect(known, (at,))
    if not beyond and (i in (0, len(known)) or known[i][0] == at):
        return known[min(i, len(known) - 1)][1]
    i = min(max(i, 1), len(known) - 1)
    (x0, y0), (x1, y1) = known[i - 1], known[i]
    return y0 + (at - x0) / (x1 - x0) * (y1 - y0)


def _neighbours(measured: Iterable[int], n: int) -> tuple[int, int]:
    """The measured numbers nearest to n, below and above it, or n itself; 0 for none."""
    measured = list(measured)
    fewer = max([m for m in measured if m <= n], default=0)
    return fewer, min([m for m in measured if m >= n], default=0)
