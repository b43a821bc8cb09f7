"""Allocator of cache rows: ranges lent to sequences.

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
APART, CLOSE = (1.0, 0.5, 0.25, 0.0), (0.0,)


class RowPool:
    """The rows of an engine's caches. `lend` takes the first range that is long enough and can grow.

    Args:
        apart: `APART` or `CLOSE`.
    """

    def __init__(self, n_rows: int, apart: tuple[float, ...] = CLOSE) -> None:
        self.n_rows, self.apart = n_rows, apart
        self._lent: list[range] = []  # in order
        self._stale: set[int] = set()  # units written by past sequences

    def lend(self, n: int) -> range:
        """Lend a range of n rows, rounded up to a multiple of 256.

        Raises:
            NoRoomError: No free range is long enough.
        """
        for apart in self.apart:
            if (found := self._first(n, apart)) is not None:
                i, rows = found
                self._lent.insert(i, rows)
                return rows
        raise NoRoomError(f"no {n} cache rows in one piece are free of {self.n_rows}; lower the context (-c)")

    def _first(self, n: int, apart: float) -> tuple[int, range] | None:
        """The first range of n rows with free rows (a fraction `apart` of a range's length) after it and after the range before,
        and its index among the lent ones."""
        length, at = -(-n // UNIT) * UNIT, 0
        for i, taken in enumerate([*self._lent, range(self.n_rows, self.n_rows)]):
            end = min(at + length, self.n_rows)
            if n <= end - at and end + _units(apart * length) <= taken.start:
                return i, range(at, end)
            at = -(-taken.stop // UNIT) * UNIT + _units(apart * len(taken))
        return None

    def extend(self, rows: range, n: int) -> range | None:
        """Extend a lent range to n rows, rounded up, by the rows after it; None if they are not free."""
        i = self._lent.index(rows)
        limit = self._lent[i + 1].start if i + 1 < len(self._lent) else self.n_rows
        end = min(rows.start - (-n // UNIT) * UNIT, limit)
        if end - rows.start < n:
            return None
        self._lent[i] = range(rows.start, max(end, rows.stop))
        return self._lent[i]

    def gathered(self, n: int, rows: range | None = None) -> list[tuple[range, range]] | None:
        """Moves of lent ranges (from, to), in order, after which a lent range can be extended to n rows, or n more can be lent;
        None if there are too few rows. Each move goes to free rows, which the old ones may overlap. The remaining free rows
        are spread after the ranges in equal parts, none larger than the range before it."""
        wanted = [max(n, len(one)) if one == rows else len(one) for one in self._lent]
        wanted += [n] if rows is None else []
        left = self.n_rows - sum(map(_units, wanted[:-1])) - wanted[-1]
        if left < 0:
            return None
        most, at, moves = left // len(wanted) // UNIT * UNIT, 0, []
        for one, length in zip(self._lent, wanted):
            moves.append((one, range(at, at + len(one))))
            at += _units(length) + min(most, _units(length))
        # to lower rows from the first on, to higher ones from the last on: those are free then
        down = [(one, to) for one, to in moves if to.start < one.start]
        up = [(one, to) for one, to in moves if to.start > one.start]
        return down + up[::-1]

    def move(self, rows: range, to: range) -> None:
        """Note that a lent range has moved."""
        self._lent[self._lent.index(rows)] = to
        self._lent.sort(key=lambda one: one.start)

    @property
    def longest(self) -> int:
        """Rows of the longest free range."""
        at, found = 0, 0
        for taken in (*self._lent, range(self.n_rows, self.n_rows)):
            found = max(found, taken.start - at)
            at = -(-taken.stop // UNIT) * UNIT
        return found

    def give_back(self, rows: range) -> None:
        """Take a lent range back.

        Raises:
            ValueError: It is not lent.
        """
        self._lent.remove(rows)

    def left_in(self, rows: range) -> None:
        """Note that rows which are given back hold stale values."""
        self._stale.update(range(rows.start // UNIT, -(-rows.stop // UNIT)) if rows else ())

    def take_stale(self, rows: range) -> int:
        """How many of these rows, from the first on, may hold stale values of past sequences; clears the mark."""
        found = self._stale.intersection(range(rows.start // UNIT, -(-rows.stop // UNIT)))
        self._stale -= found
        return min((max(found) + 1) * UNIT, rows.stop) - rows.start if found else 0


def _units(n: float) -> int:
    """n rows, up to a multiple of 256."""
    return -int(-n // UNIT) * UNIT
