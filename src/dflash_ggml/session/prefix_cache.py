"""Cached prefixes: snapshots of the engine's state at places where a later prompt is likely to join.

A hybrid model's state cannot be cut back to a shorter prefix, so what can be reused is what was kept: the live state,
if the new prompt goes on from it, or a snapshot. Snapshots are taken during prefill, at message boundaries, every few
thousand tokens, and where an earlier prompt parted from this one. They are taken without their K/V rows, which stay in
the device's cache until another conversation writes over them; before that happens, one is completed with its rows.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ..state.snapshot import Snapshot

INTERVAL = 4096  # tokens between snapshots inside one long message
MIN_GAP = 32  # a snapshot must save at least this many tokens over the one before it
N_RECENT = 8  # prompts remembered to find where prompts part


class PrefixCache:
    """Snapshots by the tokens they hold, least recently used dropped first once `budget` bytes are exceeded."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.nbytes = 0
        self.hits = self.misses = 0
        self._entries: OrderedDict[bytes, Snapshot] = OrderedDict()
        self._recent: deque[NDArray[np.int32]] = deque(maxlen=N_RECENT)

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, snapshot: Snapshot) -> bool:
        """Keep a snapshot; False if it is larger than the whole budget."""
        if snapshot.nbytes > self.budget:
            return False
        key = _key(snapshot.tokens)
        if key in self._entries:
            self.nbytes -= self._entries.pop(key).nbytes
        self._entries[key] = snapshot
        self.nbytes += snapshot.nbytes
        while self.nbytes > self.budget:
            self.nbytes -= self._entries.popitem(last=False)[1].nbytes
        return True

    def best(self, ids: Sequence[int], limit: int, usable: Callable[[Snapshot], bool]) -> Snapshot | None:
        """The longest usable snapshot that is a prefix of ids[:limit]; it becomes the most recently used."""
        found = self.longest(ids, limit, usable)
        if found is not None:
            self._entries.move_to_end(_key(found.tokens))
        return found

    def longest(self, ids: Sequence[int], limit: int, usable: Callable[[Snapshot], bool]) -> Snapshot | None:
        """As `best`, for one who only looks."""
        wanted = _key(ids[:limit])
        for key in sorted((k for k in self._entries if wanted.startswith(k)), key=len, reverse=True):
            if usable(self._entries[key]):
                return self._entries[key]
        return None

    def sweep(self, usable: Callable[[Snapshot], bool]) -> None:
        """Drop the snapshots that can no longer be restored."""
        for key in [k for k, s in self._entries.items() if not usable(s)]:
            self.nbytes -= self._entries.pop(key).nbytes

    def clear(self) -> None:
        """Drop everything."""
        self._entries.clear()
        self._recent.clear()
        self.nbytes = 0

    def plan(self, ids: Sequence[int], start: int, boundaries: Sequence[int]) -> list[int]:
        """Positions, start < p < len(ids), at which to take snapshots while prefilling ids[start:].

        boundaries: message starts. Of these the first (after a system message: shared by all conversations) and the
        last two (where the next turn joins, with or without this turn's answer as it was written) are taken.
        """
        if self.budget <= 0:
            return []
        inner = sorted(b for b in set(boundaries) if 0 < b < len(ids))
        points = set(inner[:1] + inner[-2:])
        points.update(range((start // INTERVAL + 1) * INTERVAL, len(ids), INTERVAL))
        prompt = np.asarray(ids, np.int32)
        points.update(common_prefix(prompt, other) for other in self._recent)
        if not inner:
            points.add(len(ids) - 1)  # a bare prompt: the same one again, with another seed
        self._recent.append(prompt)
        kept: list[int] = []
        last_boundary = inner[-1] if inner else len(ids) - 1
        for point in sorted(points):
            far = point - max(start, kept[-1] if kept else 0) >= MIN_GAP
            if start < point < len(ids) and (far or (point == last_boundary and point >= MIN_GAP)):
                kept.append(point)
        return kept


def common_prefix(a: Sequence[int] | NDArray[np.int32], b: Sequence[int] | NDArray[np.int32]) -> int:
    """How many leading tokens are equal."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(np.asarray(a[:n], np.int32) != np.asarray(b[:n], np.int32))
    return int(differ[0]) if len(differ) else n


def _key(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, np.int32).tobytes()
