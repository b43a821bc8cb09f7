"""What passes cost on this machine: measured when loading, then learned on while decoding.

A moving median is kept per kind of pass, width and octave of the context. What was not measured follows from what was: on a line
between widths, on a line over the context. All costs share a pace: a machine that throttles, or is busy, slows all
widths at once, also those that have not run since. It moves only when passes of several kinds agree, so that one wrong
measurement moves nothing else.

A measurement is noted when it is made, and taken in when a cost is asked for, or earlier, while a device is busy (`catch_up`).
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from .tree import verify_width

Pass = Literal["plain", "verify", "draft", "append", "commit", "host", "after"]

WINDOW = 15  # measurements that a median is taken of: a change is noticed within some ten steps
SURE = 5  # measurements of a kind of pass that its pace is the median of
LEAST = 1e-6  # milliseconds: a coarse clock may say 0, and no pass is free
FEW = 3  # measurements of which one that was disturbed is not the median
SLOPES_FOR = 32  # measurements that a slope holds for: working it out takes longer than all else
APART = 1.5  # times the shorter context that a longer one must be; a slope between nearer ones is noise
RECENT = 20  # measurements after which a kind has no say in the pace
MOST_NOTED = 64  # measurements that wait to be taken in


class Point(NamedTuple):
    """One measurement: wall milliseconds of a pass of `width` columns behind `context` tokens."""

    kind: Pass
    width: int
    context: int
    ms: float


@dataclass(slots=True)
class _Octave:
    """The last measurements at about one context length, at pace 1."""

    context: int = 0
    median: float = 0.0
    ms: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def take(self, context: int, ms: float) -> None:
        self.context = context
        self.ms.append(ms)
        self.median = _median(self.ms)


@dataclass(slots=True)
class _Slowdown:
    """How many times longer than usual the last passes of a kind took, and when that was, in measurements."""

    at: int = 0
    median: float = 0.0
    times: deque[float] = field(default_factory=lambda: deque(maxlen=SURE))

    def take(self, at: int, times: float) -> None:
        self.at = at
        self.times.append(times)
        self.median = _median(self.times)


class Costs:
    """Wall milliseconds of passes. Widths count columns; contexts are told apart by powers of two.

    plain: a whole plain step. verify, draft, commit: the passes of a drafted step; append: what a draft that is not run takes
    to see what was committed; host: the rest of a drafted step, sampling and bookkeeping; after: what the plain step behind it
    takes more than others, since a CPU's caches hold other things. What is timed are calls: on a GPU a commit returns when it is
    launched, and the next draft waits for it, so only their sum is what they cost.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[Pass, int], dict[int, _Octave]] = {}
        self._slowdowns: dict[Pass, _Slowdown] = {}
        self._n = 0
        self._taken = 0
        self._slopes: dict[tuple[Pass, int], float] = {}  # those that were asked for lately
        self._pace = 1.0
        self._noted: list[tuple[Pass, float, int, int]] = []

    def measured(self, kind: Pass, ms: float, width: int = 1, context: int = 0) -> None:
        """Note a measurement."""
        self._noted.append((kind, ms, width, context))
        if len(self._noted) >= MOST_NOTED:
            self.catch_up()

    def catch_up(self) -> None:
        """Take in what was noted."""
        noted, self._noted = self._noted, []
        for kind, ms, width, context in noted:
            ms = max(LEAST, ms)
            if kind in ("plain", "verify", "draft"):
                self._n += 1
                usual = self._at_pace_one(kind, width, context)
                if usual:
                    slowdown = self._slowdowns.get(kind)
                    if slowdown is None:
                        slowdown = self._slowdowns[kind] = _Slowdown()
                    slowdown.take(self._n, ms / usual)
                    self._pace = self._common_pace()
            self._take(kind, width, context, ms / self._pace)

    @property
    def pace(self) -> float:
        """How many times longer than usual passes take now."""
        if self._noted:
            self.catch_up()
        return self._pace

    def _common_pace(self) -> float:
        """What the kinds of passes that ran lately have in common: the least of their slowdowns, or of their speedups."""
        since = self._n - RECENT
        found = [s.median for s in self._slowdowns.values() if s.at > since and len(s.times) == SURE]
        if len(found) < 2:
            return self._pace
        return max(min(found), 1.0) if min(found) > 1 else min(max(found), 1.0)

    def of(self, kind: Pass, width: int = 1, context: int = 0) -> float | None:
        """What a pass costs now; None where no context has been measured."""
        if self._noted:
            self.catch_up()
        usual = self._at_pace_one(kind, width, context)
        return None if usual is None else usual * self._pace

    def is_sure(self, kind: Pass, width: int = 1, context: int = 0) -> bool:
        """Whether what `of` says rests on more than a measurement or two."""
        self.catch_up()
        octaves = self._seen.get((kind, width))
        return octaves is not None and len(_nearest(octaves, context).ms) >= FEW

    def curve(self, kind: Pass, context: int = 0) -> list[tuple[int, float]]:
        """(width, milliseconds) of all measured widths of a pass, rising in both.

        A plain step is the narrowest verify pass. Wider passes bound narrower ones from above: a width that was measured while
        something else ran may not be shunned for ever.
        """
        self.catch_up()
        widths = sorted(width for seen, width in self._seen if seen == kind)
        known = [(w, self.of(kind, w, context) or 0.0) for w in widths]
        if kind == "verify" and (plain := self.of("plain", 1, context)) is not None:
            known.insert(0, (1, plain))
        for i in range(len(known) - 2, -1, -1):
            known[i] = known[i][0], min(known[i][1], known[i + 1][1])
        return known

    def draft(self, columns: int, context: int = 0) -> float:
        """A draft pass over `columns` columns; between measured widths on a line, beyond them as the nearest one."""
        return _on_line(self.curve("draft", context), columns)

    def drafted(self, nodes: Iterable[int], columns: int, context: int = 0) -> dict[int, float]:
        """By node count, a drafted step that verifies so many nodes and the root after a draft of `columns` columns; 0: of copies
        alone."""
        verify, host = self.curve("verify", context), self.curve("host")
        draft = self.draft(columns, context) if columns else self.of("append", 1, context) or 0.0
        rest = draft + (self.of("commit") or 0.0)
        widths = {n: verify_width(n) for n in nodes}
        return {n: rest + _on_line(verify, w) + _on_line(host, w) for n, w in widths.items()}

    def points(self) -> list[Point]:
        """All medians, as `learn` takes them."""
        self.catch_up()
        return [
            Point(kind, width, octave.context, octave.median * self._pace)
            for (kind, width), octaves in sorted(self._seen.items(), key=_in_order)
            for _, octave in sorted(octaves.items())
        ]

    def learn(self, points: Iterable[Point]) -> None:
        """Take in measurements of another time, as what is usual: they outweigh the first few of this time."""
        self.catch_up()
        for kind, width, context, ms in points:
            for _ in range(SURE + 1):
                self._take(kind, width, context, ms)

    def _take(self, kind: Pass, width: int, context: int, ms: float) -> None:
        octaves = self._seen.get((kind, width))
        if octaves is None:
            octaves = self._seen[kind, width] = {}
        octave = octaves.get(context.bit_length())
        if octave is None:
            octave = octaves[context.bit_length()] = _Octave()
        octave.take(context, ms)
        self._taken += 1
        if len(octave.ms) == 1 or self._taken % SLOPES_FOR == 0:
            self._slopes.clear()

    def _at_pace_one(self, kind: Pass, width: int, context: int) -> float | None:
        """The median at this context's octave, else from the nearest one along the slope over the context."""
        octaves = self._seen.get((kind, width))
        if not octaves:
            return None
        nearest, of = _nearest(octaves, context), (kind, width)
        slope = self._slopes.get(of)
        if slope is None:
            slope = self._slopes[of] = self._slope(kind, width)
        # behind no tokens a pass takes no less than nothing
        slope = min(slope, nearest.median / max(nearest.context, 1))
        return max(nearest.median + slope * (context - nearest.context), LEAST)

    def _slope(self, kind: Pass, width: int) -> float:
        """Milliseconds per token of context.

        A verify pass that is known at one octave only has that of other passes of the target, on a line over their widths: on a
        GPU the width hardly counts, on a CPU every column reads the context for itself.
        """
        own = _rise(self._seen.get((kind, width), {}))
        if own is not None or kind != "verify":
            return own or 0.0
        of_target = [
            (w, _rise(octaves)) for (k, w), octaves in self._seen.items() if k in ("verify", "plain")
        ]
        known = sorted((w, rise) for w, rise in of_target if rise is not None)
        if len(known) < 2:
            return known[0][1] if known else 0.0
        i = min(max(bisect([w for w, _ in known], width), 1), len(known) - 1)
        (w0, rise0), (w1, rise1) = known[i - 1], known[i]
        return max(rise0 + (width - w0) / (w1 - w0) * (rise1 - rise0), 0.0)


def _median(values: deque[float]) -> float:
    """As `statistics.median`, which takes longer to check what it is given than to sort so few."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _rise(octaves: dict[int, _Octave]) -> float | None:
    """Milliseconds per token between the shortest and the longest context; None where they are too near."""
    if len(octaves) < 2:
        return None
    low, high = octaves[min(octaves)], octaves[max(octaves)]
    if high.context < APART * low.context:
        return None
    return max(high.median - low.median, 0.0) / max(high.context - low.context, 1)


def _nearest(octaves: dict[int, _Octave], context: int) -> _Octave:
    """The octave that speaks for a context."""
    bits = context.bit_length()
    return octaves[bits if bits in octaves else min(octaves, key=lambda seen: abs(seen - bits))]


def _on_line(known: list[tuple[int, float]], at: int) -> float:
    """The value at `at` of a line through points with rising places; 0 without any."""
    if not known:
        return 0.0
    i = bisect(known, (at,))
    if i == len(known) or known[i][0] == at or i == 0:
        return known[min(i, len(known) - 1)][1]
    (x0, y0), (x1, y1) = known[i - 1], known[i]
    return y0 + (at - x0) / (x1 - x0) * (y1 - y0)


def _in_order(item: tuple[tuple[Pass, int], object]) -> tuple[int, int]:
    kind, width = item[0]
    return get_args(Pass).index(kind), width
