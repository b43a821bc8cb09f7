"""Reference of `ngram_index` in plain Python: the same chains, one token at a time."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from struct import Struct

LONGEST = 48  # tokens of a match that are looked at
HOPS = 6  # positions of one hash that are looked at, newest first
ENOUGH = 64  # tokens matched in sum after which no more positions are looked at
ORDERS = (6, 2)  # tokens hashed; the shorter ones are asked where the longer ones find nothing
_MOST = ORDERS[0]
# The last tokens side by side are one number, the newest on top, and a hash is what a prime leaves of its top: the next
# number comes of the last by a shift, where a sum of products begins anew.
_BITS = 32  # of a token
_TOP = _BITS * (_MOST - 1)  # below the newest
_PRIME = 1500450271
_TAIL = Struct(f"<{_MOST}i")


class _Chains:
    """The positions of one order: `before[p]` is the position before p with the hash of the tokens that end there, 0 for none."""

    def __init__(self, order: int, size: int) -> None:
        self.order, self.beneath = order, _BITS * (_MOST - order)
        self.newest, self.before = array("i", bytes(4 * size)), array("i", [0])

    def slot(self, tail: int) -> int:
        """The position in `newest` of the tokens on top of `tail`."""
        return (tail >> self.beneath) % _PRIME & (len(self.newest) - 1)

    def add(self, tails: Sequence[int], end: int) -> None:
        """Add tokens to a sequence of length `end`, no fewer than ORDERS[0], as the last tokens up to each."""
        newest, before, beneath, mask = self.newest, self.before, self.beneath, len(self.newest) - 1
        for tail in tails:
            end += 1
            slot = (tail >> beneath) % _PRIME & mask
            before.append(newest[slot])
            newest[slot] = end

    def drop(self, tail: int, end: int) -> None:
        """Undo `add` for the last token of a sequence of length `end`."""
        before = self.before.pop()
        if end >= self.order:
            self.newest[self.slot(tail)] = before


class NgramIndex:
    """A token sequence that grows, and is truncated now and then. A position p precedes token p."""

    def __init__(self) -> None:
        self.ids: array[int] = array("i")
        self._size = 1 << 10
        self._chains = tuple(_Chains(order, self._size) for order in ORDERS)

    def __len__(self) -> int:
        return len(self.ids)

    def extend(self, ids: Sequence[int]) -> None:
        for token in ids:
            self.ids.append(token)
            if len(self.ids) > self._size:
                self._rebuild()
            else:
                self._add(len(self.ids))

    def _add(self, end: int) -> None:
        tail = _packed(self.ids[max(end - _MOST, 0) : end])
        for chain in self._chains:
            if end >= chain.order:
                chain.add([tail], end - 1)
            else:
                chain.before.append(0)

    def cut(self, n: int) -> None:
        while (end := len(self.ids)) > n:
            tail = _packed(self.ids[-_MOST:])
            for chain in self._chains:
                chain.drop(tail, end)
            self.ids.pop()

    def _rebuild(self) -> None:
        self._size *= 2
        self._chains = tuple(_Chains(order, self._size) for order in ORDERS)
        for end in range(1, len(self.ids) + 1):
            self._add(end)

    def find(self, tail: list[int]) -> list[tuple[int, int]]:
        """(position, length) where the last `length` tokens of `tail` stood before, at least 2, at most LONGEST; newest first."""
        ids, have, matched = self.ids, len(tail), 0
        found: list[tuple[int, int]] = []
        short, last = self._chains[-1], _packed(tail[-_MOST:])
        if have < short.order or not short.newest[short.slot(last)]:
            return found  # a longer match would be one of the shortest length too
        for chain in self._chains:
            order = chain.order
            if have < order:
                continue
            position, end = chain.newest[chain.slot(last)], tail[-1]
            before, hops = chain.before, HOPS
            while position and hops and matched < ENOUGH:
                hops -= 1
                if ids[position - 1] == end:
                    length, most = 1, min(have, position, LONGEST)
                    while length < most and ids[position - 1 - length] == tail[-1 - length]:
                        length += 1
                    if length >= order:
                        found.append((position, length))
                        matched += length
                position = before[position]
            if found:
                break
        return found


def _packed(tokens: Sequence[int]) -> int:
    """Tokens, no more than ORDERS[0], as one number, the last on top; padded with zeros."""
    missing = [0] * (_MOST - len(tokens))
    return int.from_bytes(_TAIL.pack(*missing, *tokens), "little")


def continuations(
    text: NgramIndex, past: NgramIndex, pending: int, depth: int, most: int
) -> tuple[list[list[int]], list[int]]:
    """Windows and lengths of what followed where the end of `text` and `pending` behind it stood before."""
    tail = [*text.ids[-(LONGEST - 1) :], pending]
    positions = [(length, position, text) for position, length in text.find(tail)]
    positions += [(length, position, past) for position, length in past.find(tail)]
    if len(positions) > most:
        positions = sorted(positions, key=lambda position: position[0], reverse=True)[:most]
    windows, lengths = [], []
    for length, position, where in positions:
        window = where.ids[position : position + depth].tolist()
        if len(window) < depth and where is text:
            window.append(pending)
            window = (window * (depth // len(window) + 1))[:depth]
        if window:
            windows.append(window)
            lengths.append(length)
    return windows, lengths
