"""Prefix cache: snapshots of the engine's state at positions where a later prompt is likely to continue.

A hybrid model's state cannot be truncated to a shorter prefix, so a prompt can only reuse the live state, if it extends
it, or a snapshot. Snapshots are taken during prefill: at message boundaries, every few thousand tokens, and where an
earlier prompt diverged from this one. They are taken without their K/V rows, which stay in the device's cache; before
another conversation overwrites those, the snapshots are completed with them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, chain, repeat
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..engine.batches import FINEST

if TYPE_CHECKING:
    from ..state.snapshot import RowBlock, Snapshot

Ids = Sequence[int] | NDArray[np.int32]

INTERVAL = 4096  # tokens between snapshots inside one long message
MIN_GAP = 32  # a snapshot must save at least this many tokens over the one before it
N_RECENT = 8  # prompts kept to find where prompts diverge
INNER = (
    1 / 8
)  # probability that a prompt diverges at a snapshot below many, relative to one that extends the last


class Entry:
    """A snapshot in the cache.

    Attributes:
        below: Tokens of the longest snapshot of a shorter prefix.
        n_above: Number of snapshots that extend it.
        used: The cache's clock when a prompt last had these tokens.
        n_begun: Prompts that continued from here.
    """

    __slots__ = ("below", "n_above", "n_begun", "snapshot", "used")

    def __init__(self, snapshot: Snapshot, used: float) -> None:
        self.snapshot, self.used = snapshot, used
        self.below = self.n_above = self.n_begun = 0


class PrefixCache:
    """Snapshots by their tokens, within `budget` bytes of host memory; shared K/V rows count once.

    Above the budget, rows that a slot also has on the device are evicted first, then the snapshot that saves the fewest
    prefill tokens per byte. A clock at the value of the last evicted entry ages the others (GreedyDual-Size, Cao and Irani
    1997).

    Args:
        on_device: Whether a slot has the rows of a snapshot.
    """

    def __init__(self, budget: int, on_device: Callable[[Snapshot], bool] = lambda snapshot: False) -> None:
        self.budget, self.on_device = budget, on_device
        self.nbytes = 0
        self._entries: dict[bytes, Entry] = {}
        self._holders: Counter[RowBlock] = Counter()  # snapshots that have a block
        self._clock = 0.0
        self._recent: deque[NDArray[np.int32]] = deque(maxlen=N_RECENT)

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, snapshot: Snapshot) -> bool:
        """Add a snapshot; False if others are worth more, or it is larger than the whole budget."""
        if snapshot.nbytes > self.budget:
            return False
        key = _key(snapshot.tokens)
        if key in self._entries:
            self._replace(self._entries[key], snapshot)
        else:
            self._add(key, snapshot)
        evictions = self._evictions()
        while self.nbytes > self.budget:
            next(evictions)()
        return key in self._entries

    def make_room(self, snapshot: Snapshot, row_nbytes: int) -> bool:
        """Evict others, so that the K/V rows of a snapshot in the cache fit; False if it cannot have them.

        Args:
            row_nbytes: Bytes of the rows of a token.
        """
        key, wanted = _key(snapshot.tokens), row_nbytes * len(snapshot.tokens)
        if snapshot.state_nbytes + wanted > self.budget:
            return False
        evictions = self._evictions()
        while key in self._entries:
            known = sum(block.nbytes for block in self.rows(snapshot.tokens))
            if self.nbytes + max(wanted - known, 0) <= self.budget:
                return True
            next(evictions)()
        return False

    def best(self, ids: Ids, limit: int, usable: Callable[[Snapshot], bool]) -> Snapshot | None:
        """The longest usable snapshot that is a prefix of ids[:limit]; marks all prefixes as used."""
        for key in self._prefixes(_key(ids[:limit])):
            self._entries[key].used = self._clock
        found = self.longest(ids, limit, usable)
        if found is not None:
            self._entries[_key(found.tokens)].n_begun += 1
        return found

    def longest(self, ids: Ids, limit: int, usable: Callable[[Snapshot], bool]) -> Snapshot | None:
        """As `best`, without marking anything as used."""
        for key in self._prefixes(_key(ids[:limit])):
            if usable(self._entries[key].snapshot):
                return self._entries[key].snapshot
        return None

    def without_rows(self, tokens: Ids) -> list[Snapshot]:
        """Snapshots without rows of prefixes of these tokens, the longest first."""
        found = (self._entries[key].snapshot for key in self._prefixes(_key(tokens)))
        return [snapshot for snapshot in found if snapshot.rows is None]

    def rows(self, tokens: Ids) -> tuple[RowBlock, ...]:
        """Blocks of rows that snapshots hold for the first of these tokens."""
        wanted = np.asarray(tokens, np.int32)
        best: tuple[RowBlock, ...] = ()
        n_best = 0
        for key, entry in self._entries.items():
            rows = entry.snapshot.rows or ()
            shared = common_prefix(wanted, np.frombuffer(key, np.int32))
            ends = list(accumulate(block.n_tokens for block in rows))
            n = bisect_right(ends, shared)
            if shared == len(wanted) and n < len(rows):
                n += n == 0 or ends[n - 1] < shared  # the last block may be used in part
            known = min(ends[n - 1], shared) if n else 0
            if known > n_best:
                best, n_best = rows[:n], known
        return best

    def sweep(self, usable: Callable[[Snapshot], bool]) -> None:
        """Drop snapshots that can no longer be restored."""
        for key in [k for k, entry in self._entries.items() if not usable(entry.snapshot)]:
            self._drop(key)

    def clear(self) -> None:
        """Drop everything."""
        self._entries.clear()
        self._holders.clear()
        self._recent.clear()
        self.nbytes = 0

    def _prefixes(self, wanted: bytes) -> list[bytes]:
        """Keys of prefixes, longest first."""
        return sorted((key for key in self._entries if wanted.startswith(key)), key=len, reverse=True)

    def _worth(self, entry: Entry) -> float:
        """Prefill tokens per byte that an entry saves, relative to the clock."""
        gap = len(entry.snapshot.tokens) - entry.below
        alone = sum(block.nbytes for block in entry.snapshot.rows or () if self._holders[block] == 1)
        likelihood = max(0.5**entry.n_above, INNER * (1 + entry.n_begun))
        return entry.used + likelihood * gap / max(entry.snapshot.state_nbytes + alone, 1)

    def _evictions(self) -> Iterator[Callable[[], None]]:
        """What to do in turn until there is enough memory."""
        return chain([self._drop_rows], repeat(self._drop_worst))

    def _drop_worst(self) -> None:
        worst = min(self._entries, key=lambda k: self._worth(self._entries[k]))
        self._clock = self._worth(self._entries[worst])
        self._drop(worst)

    def _add(self, key: bytes, snapshot: Snapshot) -> None:
        entry, n = Entry(snapshot, self._clock), len(snapshot.tokens)
        for other_key, other in self._entries.items():
            if key.startswith(other_key):
                entry.below, other.n_above = max(entry.below, len(other.snapshot.tokens)), other.n_above + 1
            elif other_key.startswith(key):
                entry.n_above, other.below = entry.n_above + 1, max(other.below, n)
        self._entries[key] = entry
        self._count(snapshot, 1)

    def _drop(self, key: bytes) -> None:
        entry = self._entries.pop(key)
        self._count(entry.snapshot, -1)
        for other_key, other in self._entries.items():
            if key.startswith(other_key):
                other.n_above -= 1
            elif other.below == len(entry.snapshot.tokens) and other_key.startswith(key):
                other.below = entry.below

    def _replace(self, entry: Entry, snapshot: Snapshot) -> None:
        self._count(entry.snapshot, -1)
        entry.snapshot = snapshot
        self._count(snapshot, 1)

    def _drop_rows(self) -> None:
        """Drop rows that a slot also has."""
        found = [entry for entry in self._entries.values() if entry.snapshot.rows is not None]
        found = [entry for entry in found if self.on_device(entry.snapshot)]
        for entry in found:
            self._replace(entry, replace(entry.snapshot, rows=None))

    def _count(self, snapshot: Snapshot, by: int) -> None:
        """Add or subtract a snapshot's bytes; shared rows count while any snapshot has them."""
        self.nbytes += by * snapshot.state_nbytes
        for block in snapshot.rows or ():
            before = self._holders[block]
            self._holders[block] += by
            self.nbytes += block.nbytes * (bool(before + by) - bool(before))
            if not before + by:
                del self._holders[block]

    def plan(self, ids: Ids, start: int, boundaries: Sequence[int], first_answer: int = 0) -> list[int]:
        """Positions, start < p < len(ids), at which to take snapshots while prefilling ids[start:].

        Args:
            boundaries: Message starts. Used are those up to the first answer (instructions shared by conversations), the
                last two (where the next turn continues, with or without this turn's answer as generated), and one in every
                few thousand tokens, for edits of the history.
        """
        if self.budget <= 0:
            return []
        inner = sorted(b for b in set(boundaries) if 0 < b < len(ids))
        points = {*inner[:1], *(b for b in inner if b <= first_answer), *inner[-2:]}
        for at in range((start // INTERVAL + 1) * INTERVAL, len(ids), INTERVAL):
            near = [b for b in inner if abs(b - at) <= INTERVAL // 2]
            points.add(min(near, key=lambda b: abs(b - at), default=at))
        prompt = np.asarray(ids, np.int32)
        points.update(common_prefix(prompt, other) for other in self._recent)
        # a bare prompt may come again with another seed; the rest is one small pass
        last_boundary = inner[-1] if inner else len(ids) - 1 - (len(ids) - 1 - start) % FINEST
        points.add(last_boundary)
        self._recent.append(prompt)
        kept: list[int] = []
        for point in sorted(points):
            far = point - max(start, kept[-1] if kept else 0) >= MIN_GAP
            if start < point < len(ids) and (far or (point == last_boundary and point >= MIN_GAP)):
                kept.append(point)
        return kept


def common_prefix(a: Ids, b: Ids) -> int:
    """How many leading tokens are equal."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(np.asarray(a[:n], np.int32) != np.asarray(b[:n], np.int32))
    return int(differ[0]) if len(differ) else n


def _key(ids: Ids) -> bytes:
    return np.asarray(ids, np.int32).tobytes()
