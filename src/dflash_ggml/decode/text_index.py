"""Index of where the end of a token sequence has occurred before.

Hash chains over the last 6 and the last 2 tokens, as Lempel-Ziv coders keep them: the newest position of each hash, and for each
position the previous one; at most 29 bytes per token, and truncation undoes insertions. The loops are in
`native/text_index.c`, the arrays here (docs/decisions/0007).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .native import ffi, lib

LONGEST: int = lib.TEXT_LONGEST  # tokens of a match that are looked at
ENOUGH: int = lib.TEXT_ENOUGH  # tokens matched in sum after which no more places are looked at
_HOPS: int = lib.TEXT_HOPS
_LEAST = 1 << 10  # slots of a table
_RESERVE = 64  # a text has room to grow by one in so many

# int32 [places, depth], the tokens there are of each, at least 1, and the tokens matched before it
Windows = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]


class TextIndex:
    """A text that grows, and is cut back now and then. A place p stands before token p. native: for the functions in C."""

    def __init__(self) -> None:
        self._held: tuple[Any, ...] = ffi.new("struct text_index *"), *[np.zeros(0, np.int32)] * 3
        self._make_room(0)

    @property
    def native(self) -> Any:
        """The struct, of use until the text changes."""
        return self._held[0]

    def __len__(self) -> int:
        return self.native.n

    @property
    def ids(self) -> NDArray[np.int32]:
        """The text; the array is of use until it changes."""
        native, ids, *_ = self._held
        return ids[: native.n]

    @property
    def nbytes(self) -> int:
        """Host bytes: 12 a token, with the reserve, and 8 a slot, of which there are at most two a token."""
        return sum(array.nbytes for array in self._held[1:])

    def extend(self, ids: Sequence[int]) -> None:
        """Put tokens behind the text. Raises OverflowError for ids that are not int32."""
        if len(ids) == 1 and not lib.text_index_add(self.native, ids[0]):
            return  # what most steps bring, without an array for it
        new = ffi.new("int32_t[]", ids if isinstance(ids, (list, tuple)) else list(ids))
        if lib.text_index_extend(self.native, new, len(new)):
            self._make_room(self.native.n + len(new))
            lib.text_index_extend(self.native, new, len(new))

    def cut(self, n: int) -> None:
        """Keep the first n tokens."""
        lib.text_index_cut(self.native, n)

    def shared(self, ids: Sequence[int]) -> int:
        """How many leading tokens equal those of ids."""
        n = min(len(ids), len(self))
        differ = np.flatnonzero(np.asarray(ids[:n], np.int32) != self.ids[:n])
        return int(differ[0]) if len(differ) else n

    def find(self, tail: Sequence[int]) -> list[tuple[int, int]]:
        """(place, length) where the last `length` tokens of `tail` stood before, at least 2, at most LONGEST; newest first."""
        places, lengths = ffi.new("int32_t[]", _HOPS), ffi.new("int32_t[]", _HOPS)
        n = lib.text_index_find(self.native, ffi.new("int32_t[]", list(tail)), len(tail), places, lengths)
        return [(places[i], lengths[i]) for i in range(n)]

    def _make_room(self, n: int) -> None:
        """Have room for n tokens; where the tables are too small for them, the text is taken in anew.

        The struct is made anew beside its arrays, and they change places with the old ones at once: whatever breaks this off, no
        pointer is left to an array that is gone.
        """
        old, _, old_before, newest = self._held
        index, text, capacity = ffi.new("struct text_index *"), self.ids, n + n // _RESERVE + 64
        slots = max(_LEAST, 1 << (n - 1).bit_length() if n else 0, old.slots)
        before, ids = np.zeros((2, capacity + 1), np.int32), np.zeros(capacity, np.int32)
        grows = slots > old.slots
        if grows:
            newest = np.zeros(2 * slots, np.int32)
        else:
            before[:, : len(text) + 1] = old_before[:, : len(text) + 1]
            ids[: len(text)] = text
            index.n = len(text)
        index.capacity, index.slots = capacity, slots
        index.ids = _pointer(ids)
        for order in range(2):
            index.before[order] = _pointer(before[order])
            index.newest[order] = _pointer(newest[order * slots :])
        if grows:
            lib.text_index_extend(index, _pointer(text), len(text))
        self._held = index, ids, before, newest


class Continuations:
    """What followed where the end of a text stood before."""

    def __init__(self, most: int, depth: int) -> None:
        """`most`: places that are followed, of those with the longest matches; `depth`: tokens behind each."""
        self._most, self._depth = min(most, 2 * _HOPS), depth
        self._windows = np.zeros((self._most, depth), np.int32)
        self._ends, self._matched = np.zeros(self._most, np.int32), np.zeros(self._most, np.int32)
        self._into = tuple(_pointer(array) for array in (self._windows, self._ends, self._matched))

    def of(self, text: TextIndex, past: TextIndex, pending: int) -> Windows | None:
        """What stood behind the end of `text` and the token `pending`, in it or in `past`; None if that end stood nowhere."""
        n = lib.text_continuations(text.native, past.native, pending, self._depth, self._most, *self._into)
        return (self._windows[:n].copy(), self._ends[:n].copy(), self._matched[:n].copy()) if n else None


def _pointer(array: NDArray[np.int32]) -> Any:
    """To an array that is kept for as long as the pointer is used."""
    return ffi.cast("int32_t *", array.ctypes.data)
