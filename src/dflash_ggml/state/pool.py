"""Ranges of cache rows, lent to sequences.

All caches and masks of an engine number their rows alike, so one range is a sequence's place in all of them;
`Sequence.first_slot` is where it begins. Pages of 256 rows, lent one by one with a table per sequence, were the other design:
no range would have to be free in one piece, but every attention would read through the table, and the kernels read rows that
follow each other.
"""

from __future__ import annotations

from ..errors import NoRoomError

UNIT = 256  # ranges begin and end at multiples of it, as the buckets of graphs do


class RowPool:
    """The rows of an engine's caches. `lend` takes the first range that is long enough."""

    def __init__(self, n_rows: int) -> None:
        self.n_rows = n_rows
        self._lent: list[range] = []  # in order
        self._stale: set[int] = set()  # units in which texts that are gone have left something

    def lend(self, n: int) -> range:
        """A range of n rows or, up to a multiple of 256, a few more. Raises NoRoomError when none is free in one piece."""
        length = -(-n // UNIT) * UNIT
        at = 0
        for i, taken in enumerate([*self._lent, range(self.n_rows, self.n_rows)]):
            end = min(at + length, self.n_rows)
            if n <= end - at and end <= taken.start:
                self._lent.insert(i, range(at, end))
                return self._lent[i]
            at = -(-taken.stop // UNIT) * UNIT
        raise NoRoomError(f"no {n} cache rows in one piece are free of {self.n_rows}; lower the context (-c)")

    def extend(self, rows: range, n: int) -> range | None:
        """A lent range with as many of the rows behind it as make it n, or a few more; None where they are not free."""
        i = self._lent.index(rows)
        limit = self._lent[i + 1].start if i + 1 < len(self._lent) else self.n_rows
        end = min(rows.start - (-n // UNIT) * UNIT, limit)
        if end - rows.start < n:
            return None
        self._lent[i] = range(rows.start, max(end, rows.stop))
        return self._lent[i]

    @property
    def longest(self) -> int:
        """Rows of the longest range that is free."""
        at, found = 0, 0
        for taken in (*self._lent, range(self.n_rows, self.n_rows)):
            found = max(found, taken.start - at)
            at = -(-taken.stop // UNIT) * UNIT
        return found

    def give_back(self, rows: range) -> None:
        """Take a lent range back. Raises ValueError for one that is not lent."""
        self._lent.remove(rows)

    def left_in(self, rows: range) -> None:
        """Rows that are given back hold something."""
        self._stale.update(range(rows.start // UNIT, -(-rows.stop // UNIT)) if rows else ())

    def take_stale(self, rows: range) -> int:
        """How many of these rows, from the first on, may hold something of texts that are gone; told once."""
        found = self._stale.intersection(range(rows.start // UNIT, -(-rows.stop // UNIT)))
        self._stale -= found
        return min((max(found) + 1) * UNIT, rows.stop) - rows.start if found else 0
