"""N-gram index: earlier occurrences of the end of a token sequence.

Hash chains over the last 6 and the last 2 tokens, as in Lempel-Ziv coders: the newest position of each hash, and for each
position the previous one; at most 29 bytes per token, and truncation undoes insertions. The loops are in
`native/ngram_index.c`; the arrays live here (docs/decisions/0007).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .native import ffi, lib

LONGEST: int = lib.NGRAM_LONGEST  # longest match, in tokens
ENOUGH: int = lib.NGRAM_ENOUGH  # total matched tokens after which the search ends
_HOPS: int = lib.NGRAM_HOPS
_LEAST = 1 << 10  # smallest number of hash slots
_RESERVE = 64  # spare capacity: one token in so many

# int32 [matches, depth] ids after each match; number of valid ones, at least 1; lengths of the matches
Windows = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]


class NgramIndex:
    """A token sequence that grows and may be truncated, with its index. Position p is before token p.

    Attributes:
        native: The struct for the functions in C.
    """

    def __init__(self) -> None:
        self._held: tuple[Any, ...] = ffi.new("struct ngram_index *"), *[np.zeros(0, np.int32)] * 3
        self._make_room(0)

    @property
    def native(self) -> Any:
        """The struct, valid until tokens are added or cut."""
        return self._held[0]

    def __len__(self) -> int:
        return self.native.n

    @property
    def ids(self) -> NDArray[np.int32]:
        """The tokens, int32 [n]; a view, valid until tokens are added or cut."""
        native, ids, *_ = self._held
        return ids[: native.n]

    @property
    def nbytes(self) -> int:
        """Host bytes: 12 a token, spare capacity included, and 8 a hash slot, of which there are at most two a token."""
        return sum(array.nbytes for array in self._held[1:])

    def extend(self, ids: Sequence[int]) -> None:
        """Append tokens.

        Raises:
            OverflowError: An id is not int32.
        """
        if len(ids) == 1 and not lib.ngram_index_add(self.native, ids[0]):
            return  # the common case, without an array
        new = ffi.new("int32_t[]", ids if isinstance(ids, (list, tuple)) else list(ids))
        if lib.ngram_index_extend(self.native, new, len(new)):
            self._make_room(self.native.n + len(new))
            lib.ngram_index_extend(self.native, new, len(new))

    def cut(self, n: int) -> None:
        """Keep the first n tokens."""
        lib.ngram_index_cut(self.native, n)

    def shared(self, ids: Sequence[int]) -> int:
        """Number of leading tokens that equal those of ids."""
        n = min(len(ids), len(self))
        differ = np.flatnonzero(np.asarray(ids[:n], np.int32) != self.ids[:n])
        return int(differ[0]) if len(differ) else n

    def find(self, tail: Sequence[int]) -> list[tuple[int, int]]:
        """(position, length) of earlier occurrences of the last `length` tokens of `tail`, 2 to LONGEST of them; newest first."""
        positions, lengths = ffi.new("int32_t[]", _HOPS), ffi.new("int32_t[]", _HOPS)
        n = lib.ngram_index_find(self.native, ffi.new("int32_t[]", list(tail)), len(tail), positions, lengths)
        return [(positions[i], lengths[i]) for i in range(n)]

    def _make_room(self, n: int) -> None:
        """Grow the capacity to n tokens; tables that are too small are rebuilt.

        The new struct and its arrays replace the old ones in one assignment, so that an interruption leaves no dangling pointer.
        """
        old, _, old_before, newest = self._held
        index, tokens, capacity = ffi.new("struct ngram_index *"), self.ids, n + n // _RESERVE + 64
        slots = max(_LEAST, 1 << (n - 1).bit_length() if n else 0, old.slots)
        before, ids = np.zeros((2, capacity + 1), np.int32), np.zeros(capacity, np.int32)
        grows = slots > old.slots
        if grows:
            newest = np.zeros(2 * slots, np.int32)
        else:
            before[:, : len(tokens) + 1] = old_before[:, : len(tokens) + 1]
            ids[: len(tokens)] = tokens
            index.n = len(tokens)
        index.capacity, index.slots = capacity, slots
        index.ids = _pointer(ids)
        for order in range(2):
            index.before[order] = _pointer(before[order])
            index.newest[order] = _pointer(newest[order * slots :])
        if grows:
            lib.ngram_index_extend(index, _pointer(tokens), len(tokens))
        self._held = index, ids, before, newest


class Continuations:
    """Finds what followed earlier occurrences of the end of a sequence; buffers are reused.

    Args:
        most: Most matches, the longest first.
        depth: Tokens after each.
    """

    def __init__(self, most: int, depth: int) -> None:
        self._most, self._depth = min(most, 2 * _HOPS), depth
        self._windows = np.zeros((self._most, depth), np.int32)
        self._ends, self._matched = np.zeros(self._most, np.int32), np.zeros(self._most, np.int32)
        self._into = tuple(_pointer(array) for array in (self._windows, self._ends, self._matched))

    def of(self, index: NgramIndex, past: NgramIndex, pending: int) -> Windows | None:
        """What followed the end of `index` and the token `pending` earlier, in it or in `past`; None without a match."""
        n = lib.ngram_continuations(index.native, past.native, pending, self._depth, self._most, *self._into)
        return (self._windows[:n].copy(), self._ends[:n].copy(), self._matched[:n].copy()) if n else None


def _pointer(array: NDArray[np.int32]) -> Any:
    """Pointer to an array that the caller keeps alive."""
    return ffi.cast("int32_t *", array.ctypes.data)
