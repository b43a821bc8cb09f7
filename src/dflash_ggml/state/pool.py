"""Ranges of cache rows, lent to sequences.

All caches and masks of an engine number their rows alike, so one range is a sequence's rows in all of them; `Sequence.first_row`
is where it begins (ranges against pages: docs/decisions/0008).

Sequences grow, and one with another right behind it has to move. On a GPU ranges are therefore lent apart where there is room:
behind each as many rows are left free as it has, or half or a quarter of that; they belong to no sequence. On a CPU, whose passes
read all rows up to the last in use, ranges are adjacent (bench/notes-several.md). Where no piece is long enough, ranges are
compacted.
"""

from __future__ import annotations

from ..errors import NoRoomError

UNIT = 256  # ranges begin and end at multiples of it, as the buckets of graphs do
# rows left free behind a range, as parts of its length: the first of these that there is room for
APART, CLOSE = (1.0, 0.5, 0.25, 0.0), (0.0,)


class RowPool:
    """The rows of an engine's caches. `lend` takes the first range that is long enough and leaves room to grow.

    Args:
        apart: `APART` or `CLOSE`.
    """

    def __init__(self, n_rows: int, apart: tuple[float, ...] = CLOSE) -> None:
        self.n_rows, self.apart = n_rows, apart
        self._lent: list[range] = []  # in order
        self._stale: set[int] = set()  # units that past sequences have written

    def lend(self, n: int) -> range:
        """A range of n rows or, up to a multiple of 256, a few more.

        Raises:
            NoRoomError: None is free in one piece.
        """
        for apart in self.apart:
            if (found := self._first(n, apart)) is not None:
                i, rows = found
                self._lent.insert(i, rows)
                return rows
        raise NoRoomError(f"no {n} cache rows in one piece are free of {self.n_rows}; lower the context (-c)")

    def _first(self, n: int, apart: float) -> tuple[int, range] | None:
        """The first range of n rows with so many times a range's rows free behind it and behind the one before, and its index
        among the lent ones."""
        length, at = -(-n // UNIT) * UNIT, 0
        for i, taken in enumerate([*self._lent, range(self.n_rows, self.n_rows)]):
            end = min(at + length, self.n_rows)
            if n <= end - at and end + _units(apart * length) <= taken.start:
                return i, range(at, end)
            at = -(-taken.stop // UNIT) * UNIT + _units(apart * len(taken))
        return None

    def extend(self, rows: range, n: int) -> range | None:
        """A lent range with as many of the rows behind it as make it n, or a few more; None where they are not free."""
        i = self._lent.index(rows)
        limit = self._lent[i + 1].start if i + 1 < len(self._lent) else self.n_rows
        end = min(rows.start - (-n // UNIT) * UNIT, limit)
        if end - rows.start < n:
            return None
        self._lent[i] = range(rows.start, max(end, rows.stop))
        return self._lent[i]

    def gathered(self, n: int, rows: range | None = None) -> list[tuple[range, range]] | None:
        """Where lent ranges must go, from and to, one after the other, so that a lent range can be extended to n rows, or n more
        can be lent; None where there are not as many. Each goes to free rows, which its old ones may overlap. What is left
        over lies behind all of them in equal parts, none of more rows than the range before it has."""
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
        """A lent range lies elsewhere now."""
        self._lent[self._lent.index(rows)] = to
        self._lent.sort(key=lambda one: one.start)

    @property
    def longest(self) -> int:
        """Rows of the longest range that is free."""
        at, found = 0, 0
        for taken in (*self._lent, range(self.n_rows, self.n_rows)):
            found = max(found, taken.start - at)
            at = -(-taken.stop // UNIT) * UNIT
        return found

    def give_back(self, rows: range) -> None:
        """Take a lent range back.

        Raises:
            ValueError: For one that is not lent.
        """
        self._lent.remove(rows)

    def left_in(self, rows: range) -> None:
        """Rows that are given back hold something."""
        self._stale.update(range(rows.start // UNIT, -(-rows.stop // UNIT)) if rows else ())

    def take_stale(self, rows: range) -> int:
        """How many of these rows, from the first on, may hold values of past sequences; the question clears the mark."""
        found = self._stale.intersection(range(rows.start // UNIT, -(-rows.stop // UNIT)))
        self._stale -= found
        return min((max(found) + 1) * UNIT, rows.stop) - rows.start if found else 0


def _units(n: float) -> int:
    """n rows, up to a multiple of 256."""
    return -int(-n // UNIT) * UNIT
