"""Where the end of a text has stood before.

Hash chains over the last 6 and the last 2 tokens, as Lempel-Ziv coders keep them: the newest place of each hash, and for each
place the one before it. A suffix automaton, which knows all lengths at once, was the other design: it takes some hundred bytes a
token in Python and does not forget its end cheaply; here a token takes at most 28 bytes, and a text is cut back by undoing.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from struct import Struct

import numpy as np
from numpy.typing import NDArray

LONGEST = 48  # tokens of a match that are looked at
HOPS = 6  # places of one hash that are looked at, newest first
ENOUGH = 64  # tokens matched in sum after which no more places are looked at
ORDERS = (6, 2)  # tokens hashed; the shorter ones are asked where the longer ones find nothing
BULK = 96  # tokens, or an eighth of the text, from which on arrays are faster than a loop
_MOST = ORDERS[0]
# The last tokens side by side are one number, the newest on top, and a hash is what a prime leaves of its top: the next
# number comes of the last by a shift, where a sum of products begins anew.
_BITS = 32  # of a token
_TOP = _BITS * (_MOST - 1)  # below the newest
_PRIME = 1500450271
_TAIL = Struct(f"<{_MOST}i")


class _Chains:
    """The places of one order: `before[p]` is the place before p with the hash of the tokens that end there, 0 for none."""

    def __init__(self, order: int, size: int) -> None:
        self.order, self.beneath = order, _BITS * (_MOST - order)
        self.newest, self.before = array("i", bytes(4 * size)), array("i", [0])

    def slot(self, tail: int) -> int:
        """The place in `newest` of the tokens on top of `tail`."""
        return (tail >> self.beneath) % _PRIME & (len(self.newest) - 1)

    def add(self, tails: Sequence[int], end: int) -> None:
        """Take in tokens behind a text of `end`, no fewer than ORDERS[0], as the last tokens up to each."""
        newest, before, beneath, mask = self.newest, self.before, self.beneath, len(self.newest) - 1
        for tail in tails:
            end += 1
            slot = (tail >> beneath) % _PRIME & mask
            before.append(newest[slot])
            newest[slot] = end

    def drop(self, tail: int, end: int) -> None:
        """Undo `add` for the last token of a text of `end`."""
        before = self.before.pop()
        if end >= self.order:
            self.newest[self.slot(tail)] = before

    def rebuild(self, ids: NDArray[np.int64], size: int) -> None:
        """Take in all of ids anew, in a table of `size` slots, a power of two."""
        newest, before = np.zeros(size, np.int32), np.zeros(len(ids) + 1, np.int32)
        n = len(ids) - self.order + 1
        if n > 0:
            keys = np.zeros(n, np.int64)
            for i in range(self.order):
                keys += ids[i : i + n] * pow(2, _BITS * i, _PRIME)
            slots = (keys % _PRIME & (size - 1)).astype(np.int32)
            order = np.argsort(slots, kind="stable")
            ends, slots = order.astype(np.int32) + self.order, slots[order]
            same = slots[1:] == slots[:-1]
            before[ends[1:][same]] = ends[:-1][same]
            last = np.append(~same, True)
            newest[slots[last]] = ends[last]
        self.newest, self.before = array("i", newest.tobytes()), array("i", before.tobytes())


class TextIndex:
    """A text that grows, and is cut back now and then. A place p stands before token p."""

    def __init__(self) -> None:
        self.ids: array[int] = array("i")
        self._size = 1 << 10
        self._chains = tuple(_Chains(order, self._size) for order in ORDERS)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        """Host bytes: 12 a token, and 8 a slot, of which there are at most two a token."""
        return 4 * (len(self.ids) + sum(len(c.newest) + len(c.before) for c in self._chains))

    def extend(self, ids: Sequence[int]) -> None:
        """Put tokens behind the text; ids below 2**29, for sums of hashes in 64 bits."""
        own, end = self.ids, len(self.ids)
        own.extend(ids)
        if len(ids) > max(BULK, end // 8) or len(own) > self._size or end < _MOST:
            self._rebuild()
            return
        tail, tails = _packed(own[end - _MOST : end]), []
        for token in ids:
            tail = tail >> _BITS | token << _TOP
            tails.append(tail)
        for chain in self._chains:
            chain.add(tails, end)

    def cut(self, n: int) -> None:
        """Keep the first n tokens."""
        if len(self.ids) - n > max(BULK, n // 8):
            del self.ids[n:]
            self._rebuild()
            return
        while (end := len(self.ids)) > n:
            tail = _packed(self.ids[-_MOST:])
            for chain in self._chains:
                chain.drop(tail, end)
            self.ids.pop()

    def _rebuild(self) -> None:
        while self._size < len(self.ids):
            self._size *= 2
        ids = np.array(self.ids, np.int64)
        for chain in self._chains:
            chain.rebuild(ids, self._size)

    def shared(self, ids: Sequence[int]) -> int:
        """How many leading tokens equal those of ids."""
        n = min(len(ids), len(self.ids))
        differ = np.flatnonzero(np.asarray(ids[:n], np.int32) != np.frombuffer(self.ids, np.int32, n))
        return int(differ[0]) if len(differ) else n

    def find(self, tail: list[int]) -> list[tuple[int, int]]:
        """(place, length) where the last `length` tokens of `tail` stood before, at least 2, at most LONGEST; newest first."""
        ids, have, matched = self.ids, len(tail), 0
        found: list[tuple[int, int]] = []
        short, last = self._chains[-1], _packed(tail[-_MOST:])
        if have < short.order or not short.newest[short.slot(last)]:
            return found  # a longer match would be one of the shortest length too
        for chain in self._chains:
            order = chain.order
            if have < order:
                continue
            place, end = chain.newest[chain.slot(last)], tail[-1]
            before, hops = chain.before, HOPS
            while place and hops and matched < ENOUGH:
                hops -= 1
                if ids[place - 1] == end:
                    length, most = 1, min(have, place, LONGEST)
                    while length < most and ids[place - 1 - length] == tail[-1 - length]:
                        length += 1
                    if length >= order:
                        found.append((place, length))
                        matched += length
                place = before[place]
            if found:
                break
        return found


def _packed(tokens: Sequence[int]) -> int:
    """Tokens, no more than ORDERS[0], as one number, the last on top; zeros stand for those that lack."""
    missing = [0] * (_MOST - len(tokens))
    return int.from_bytes(_TAIL.pack(*missing, *tokens), "little")
