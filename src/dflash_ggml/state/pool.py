"""Allocator of cache rows: a contiguous range for each sequence.

All caches and masks of an engine number their rows alike, so one range is a sequence's rows in all of them; it begins at
`Sequence.first_row` (ranges against pages: docs/decisions/0008).

Sequences grow, and one directly followed by another has to move. On a GPU ranges are therefore spaced out if possible: after
each, as many rows as it has are left free, or half or a quarter of that. On a CPU, whose passes read all rows up to the last in
use, ranges are adjacent (bench/notes-several.md). If no free range is long enough, ranges are compacted.
"""

from __future__ import annotations

from ..errors import NoRoomError

UNIT = 256  # ranges begin and end at multiples of it, as the buckets of graphs do
# free rows after a range, as fractions of its length: the first that fits
SPACED, ADJACENT = (1.0, 0.5, 0.25, 0.0), (0.0,)


class RowPool:
    """The rows of an engine's caches. `allocate` takes the first free range that is long enough and can grow.

    Args:
        spacing: Free rows kept after a range, as fractions of its length, in order of preference: `SPACED` or `ADJACENT`.
    """

    def __init__(self, n_rows: int, spacing: tuple[float, ...] = ADJACENT) -> None:
        self.n_rows, self.spacing = n_rows, spacing
        self._allocated: list[range] = []  # in order
        self._stale: set[int] = set()  # units written by past sequences

    def allocate(self, n: int) -> range:
        """Allocate a range of n rows, rounded up to a multiple of 256.

        Raises:
            NoRoomError: No free range is long enough.
        """
        for spacing in self.spacing:
            if (found := self._first(n, spacing)) is not None:
                i, rows = found
                self._allocated.insert(i, rows)
                return rows
        raise NoRoomError(f"no {n} cache rows in one piece are free of {self.n_rows}; lower the context (-c)")

    def _first(self, n: int, spacing: float) -> tuple[int, range] | None:
        """The first free range of n rows with a fraction `spacing` of its length free after it, and the same of the range before;
        and its index among the allocated ones."""
        length, at = -(-n // UNIT) * UNIT, 0
        for i, taken in enumerate([*self._allocated, range(self.n_rows, self.n_rows)]):
            end = min(at + length, self.n_rows)
            if n <= end - at and end + _units(spacing * length) <= taken.start:
                return i, range(at, end)
            at = -(-taken.stop // UNIT) * UNIT + _units(spacing * len(taken))
        return None

    def extend(self, rows: range, n: int) -> range | None:
        """Extend a range to n rows, rounded up, by the rows after it; None if they are not free."""
        i = self._allocated.index(rows)
        limit = self._allocated[i + 1].start if i + 1 < len(self._allocated) else self.n_rows
        end = min(rows.start - (-n // UNIT) * UNIT, limit)
        if end - rows.start < n:
            return None
        self._allocated[i] = range(rows.start, max(end, rows.stop))
        return self._allocated[i]

    def compacted(self, n: int, rows: range | None = None) -> list[tuple[range, range]] | None:
        """Moves of ranges (from, to), in order, after which `rows` can be extended to n rows, or n more can be allocated;
        None if there are too few rows. Each move goes to free rows, which the old ones may overlap. The remaining free rows
        are spread after the ranges in equal parts, none larger than the range before it."""
        wanted = [max(n, len(one)) if one == rows else len(one) for one in self._allocated]
        wanted += [n] if rows is None else []
        left = self.n_rows - sum(map(_units, wanted[:-1])) - wanted[-1]
        if left < 0:
            return None
        most, at, moves = left // len(wanted) // UNIT * UNIT, 0, []
        for one, length in zip(self._allocated, wanted):
            moves.append((one, range(at, at + len(one))))
            at += _units(length) + min(most, _units(length))
        # to lower rows from the first on, to higher ones from the last on: those are free then
        down = [(one, to) for one, to in moves if to.start < one.start]
        up = [(one, to) for one, to in moves if to.start > one.start]
        return down + up[::-1]

    def move(self, rows: range, to: range) -> None:
        """Note that a range has moved."""
        self._allocated[self._allocated.index(rows)] = to
        self._allocated.sort(key=lambda one: one.start)

    @property
    def longest(self) -> int:
        """Rows of the longest free range."""
        at, found = 0, 0
        for taken in (*self._allocated, range(self.n_rows, self.n_rows)):
            found = max(found, taken.start - at)
            at = -(-taken.stop // UNIT) * UNIT
        return found

    def free(self, rows: range) -> None:
        """Free a range.

        Raises:
            ValueError: It is not allocated.
        """
        self._allocated.remove(rows)

    def mark_stale(self, rows: range) -> None:
        """Note that freed rows hold stale values."""
        self._stale.update(range(rows.start // UNIT, -(-rows.stop // UNIT)) if rows else ())

    def take_stale(self, rows: range) -> int:
        """How many of these rows, from the first on, may hold stale values of past sequences; clears the mark."""
        found = self._stale.intersection(range(rows.start // UNIT, -(-rows.stop // UNIT)))
        self._stale -= found
        return min((max(found) + 1) * UNIT, rows.stop) - rows.start if found else 0


def _units(n: float) -> int:
    """n rows, up to a multiple of 256."""
    return -int(-n // UNIT) * UNIT
