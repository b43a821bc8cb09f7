"""Brings an engine's state to a prompt: goes on from what is live, restores a snapshot, or starts over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .disk_cache import SHORTEST, DiskCache
from .prefix_cache import PrefixCache, common_prefix

ROWS_AT_ONCE = 32  # of a vocabulary of 250,000 that is 32 MB

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.place import Place
    from ..state.snapshot import Snapshot


class PromptState:
    """The engine's state seen as a prefix of token ids; the only place that resets or restores it.

    disk: keeps prefixes that are about to be lost, beyond this process. The engine may be a place of one: then the cache is
    shared with others, and `held` knows what any of them can restore.
    """

    def __init__(
        self,
        engine: Engine | Place,
        cache: PrefixCache,
        disk: DiskCache | None = None,
        held: Callable[[Snapshot], bool] | None = None,
    ) -> None:
        self.engine = engine
        self._held = held
        # positions of the prompt that is being taken in, or is about to be, at which to keep a snapshot
        self._wanted = set[int]()
        self.cache = cache
        self.disk = disk
        self._row_valid = False  # whether engine.logits belongs to the last committed token

    def pieces(self, left: int) -> int:
        """Tokens of the next pass over a prompt of which so many are left."""
        return self.engine.batches.next(left)

    def restore(self, snapshot: Snapshot) -> None:
        """Put a snapshot back; raises ConfigError if the engine cannot."""
        self.engine.restore(snapshot)
        self._row_valid = False

    def reset(self) -> None:
        """An empty context."""
        self.engine.reset()
        self._row_valid = False

    def evaluated(self) -> None:
        """The caller has prefilled: the engine's logits are those of its last token."""
        self._row_valid = True

    def holds(self, ids: Sequence[int] | NDArray[np.int32]) -> bool:
        """Whether the state is exactly ids, with the logits after them."""
        live = self.engine.tokens
        return self._row_valid and len(live) == len(ids) and common_prefix(live, ids) == len(ids)

    def spent(self) -> None:
        """The engine is about to decode from its logits: they are gone afterwards."""
        self._row_valid = False

    def seek(self, ids: Sequence[int]) -> int:
        """Make the state the longest known prefix of ids; its length, which is len(ids) only with valid logits."""
        live = self.engine.tokens
        shared = common_prefix(live, ids)
        goes_on = shared == len(live) and (shared < len(ids) or (self._row_valid and shared > 0))
        kept = self.cache.best(ids, len(ids) - 1, self.engine.can_restore)
        start = shared if goes_on else len(kept.tokens) if kept is not None else 0
        if kept is not None and len(kept.tokens) > start:
            goes_on, start = False, len(kept.tokens)
        if self._from_disk(ids, live, shared, start):
            start = self.engine.n_tokens
        elif not goes_on:
            self._park(live, shared)
            if kept is None:
                self.reset()
            else:
                self.restore(kept)
        if start:
            self.cache.hits += 1
        else:
            self.cache.misses += 1
        return start

    def advance(
        self,
        ids: Sequence[int],
        start: int,
        boundaries: Sequence[int],
        should_stop: Callable[[], bool] | None,
    ) -> Iterator[int]:
        """Prefill ids[start:] in pieces, keeping snapshots on the way; yields how many tokens are in after each."""
        self._wanted.update(self.cache.plan(ids, start, boundaries))
        position = start
        try:
            while position < len(ids):
                if should_stop is not None and should_stop():
                    return
                stop = min((at for at in self._wanted if at > position), default=len(ids))
                end = position + self.pieces(stop - position)
                self._row_valid = False
                self.engine.prefill(ids[position:end])
                self._row_valid = True
                position = end
                if position in self._wanted:
                    self.cache.put(self.engine.snapshot(with_rows=False))
                yield position
        finally:
            self._wanted.clear()
        self.cache.sweep(self._held or self.engine.can_restore)

    def keep_at(self, position: int) -> None:
        """Keep a snapshot of the prompt that is being taken in, or is about to be, where another one parts from it."""
        self._wanted.add(position)

    def keep_nowhere(self) -> None:
        """The prompt that was about to be taken in will not be."""
        self._wanted.clear()

    def rows(self, ids: Sequence[int]) -> Iterator[list[NDArray[np.float32]]]:
        """From an empty context, the logits rows float32 [V] after each token, some at a time."""
        self.reset()
        for at in range(0, len(ids), ROWS_AT_ONCE):
            rows: list[NDArray[np.float32]] = []
            self.engine.prefill(ids[at : at + ROWS_AT_ONCE], take_row=rows.append)
            self._row_valid = True
            yield rows

    def keep(self) -> None:
        """The process is about to end: bring the last conversation's prefix to the disk, and wait until all is there."""
        if self.disk is not None:
            self._park(self.engine.tokens, 0)
            self.disk.close()

    def park(self) -> None:
        """The text is about to be lost: complete its last snapshot, if there is one."""
        self._park(self.engine.tokens, 0)

    def _from_disk(self, ids: Sequence[int], live: Sequence[int], shared: int, start: int) -> bool:
        """Restore a prefix from the disk if that saves enough over `start` tokens."""
        if self.disk is None or self.disk.longest(ids, len(ids) - 1) < start + SHORTEST:
            return False
        kept = self.disk.load(ids, len(ids) - 1)
        if kept is None or len(kept.tokens) < start + SHORTEST or len(kept.tokens) > self.engine.n_ctx:
            return False
        self._park(live, shared)
        self.restore(kept)
        return True

    def _park(self, live: Sequence[int], shared: int) -> None:
        """Another conversation will write over this one's K/V rows: complete its last snapshot with them.

        The last snapshot, not the live state, because a template may render the answer after it differently.
        """
        last = self.cache.best(live, len(live), self.engine.can_restore)
        if last is not None and last.rows is None and len(last.tokens) > shared:
            self.engine.restore(last)
            whole = self.engine.snapshot(with_rows=True)
            self.cache.put(whole)
            if self.disk is not None:
                self.disk.put(whole)
