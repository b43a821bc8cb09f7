"""Slots of an engine as cached prefixes of prompts, with their shared prefix cache."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import NoRoomError
from .disk_cache import SHORTEST, DiskCache
from .prefix_cache import INTERVAL, MIN_GAP, Ids, PrefixCache, common_prefix

if TYPE_CHECKING:
    from ..decode.sequence import Sequence as Decoding
    from ..engine.engine import Engine
    from ..engine.slot import Slot
    from ..engine.step import Verify
    from ..state.snapshot import Snapshot

log = logging.getLogger("dflash_ggml")

LOGITS_AT_ONCE = 32  # of a vocabulary of 250,000 that is 32 MB

Logits = NDArray[np.float32]


class CachedSlot:
    """A slot of the engine with its cached prefix; only this class resets or restores it.

    Attributes:
        busy: Whether a generation has it.
        used: When it was last taken, counted in generations.
    """

    def __init__(self, slot: Slot, slots: Slots) -> None:
        self.slot, self.cache, self._slots = slot, slots.cache, slots
        self.busy, self.used = False, 0
        self._marks = set[int]()  # positions of the current prompt at which to take snapshots
        self._first_answer = 0  # position from which the conversation is unique
        self._has_ended = False  # whether the tokens end with a complete answer
        self.is_leaving = False  # whether its K/V rows are about to be overwritten
        self._has_logits = False  # whether the slot's logits belong to its last token
        self._unsaved = 0  # tokens of its prompt whose K/V rows are not in host memory

    @property
    def tokens(self) -> list[int]:
        """The committed tokens."""
        return self.slot.tokens

    @property
    def logits(self) -> Logits:
        """Logits float32 [n_vocab] after the last token of a prefill."""
        return self.slot.logits

    def holds(self, ids: Ids) -> bool:
        """Whether the slot holds exactly these tokens and the logits after them."""
        live = self.tokens
        return self._has_logits and len(live) == len(ids) == common_prefix(live, ids)

    def known(self, ids: Ids) -> int:
        """Leading tokens of a prompt that need no prefill here."""
        return self._prefix(ids, self.cache.longest)[0]

    def _prefix(self, ids: Ids, look: Callable[..., Snapshot | None]) -> tuple[int, Snapshot | None]:
        """The longest known prefix of a prompt, and its snapshot (None: the slot itself)."""
        live = self.tokens
        shared = common_prefix(live, ids)
        goes_on = shared == len(live) and (shared < len(ids) or (self._has_logits and shared > 0))
        start = shared if goes_on else 0
        kept = look(ids, len(ids) - 1, self.slot.can_restore)
        return (start, None) if kept is None or len(kept.tokens) <= start else (len(kept.tokens), kept)

    # ---- prefill

    def goes_on(self, ids: Ids) -> bool:
        """Whether a prompt continues the slot's conversation, or neither has one worth keeping."""
        live = self.tokens
        return not len(ids) or len(live) < SHORTEST or common_prefix(live, ids) >= self._first_answer

    def start(
        self, ids: Ids, boundaries: Sequence[int] = (), first_answer: int = 0, fresh: bool = False
    ) -> int:
        """Restore the longest known prefix of a prompt, and plan the snapshots of the rest.

        Args:
            ids: The prompt.
            boundaries: Positions at which messages start.
            first_answer: Position of the first answer; conversations that diverge after it count as one that was edited.
            fresh: Prefill all of it.

        Returns:
            The length of the prefix; the whole prompt's only if its logits are known.
        """
        if fresh:
            self.reset()
            self._first_answer = self._unsaved = 0
            return 0
        ids = np.asarray(ids, np.int32)
        live, cache = self.tokens, self.cache
        n, kept = self._prefix(ids, cache.best)
        if (loaded := self._from_disk(ids, n)) is not None:
            n, kept = len(loaded.tokens), loaded
        if kept is not None or n < len(live):
            self._save(common_prefix(live, ids))
            if kept is None:
                self.reset()
            else:
                self.restore(kept)
        self._marks.update(cache.plan(ids, n, boundaries, first_answer))
        self._first_answer, self._has_ended = first_answer, False
        self._unsaved = len(ids) - sum(block.n_tokens for block in cache.rows(ids))
        self._slots.warm_buffers()
        return n

    def mark(self, position: int) -> None:
        """Plan a snapshot where another prompt diverges from the current one."""
        self._marks.add(position)

    def prefill(
        self,
        ids: Sequence[int],
        most: int | None = None,
        logits: list[Logits] | None = None,
        join: Callable[[Verify], None] | None = None,
        others: int = 0,
    ) -> None:
        """Prefill the next chunk of the started prompt: at most so many tokens, up to the next snapshot.

        `logits` is called with those after every token of the chunk.

        Args:
            join: See `Slot.prefill`.
            others: Number of sequences that the same pass steps.
        """
        at = self.slot.n_tokens
        left = min((mark for mark in self._marks if mark > at), default=len(ids)) - at
        batches = self._slots.engine.batches
        n = batches.next(left)
        if logits is not None:
            n = min(n, LOGITS_AT_ONCE)
        elif join is not None:
            n = batches.joined(left, others, most or left)
        elif most is not None and left > most:
            n = min(n, most)
        self._append(ids[at : at + n], logits, join)
        if at + n in self._marks:
            self.cache.put(self.slot.snapshot(with_rows=False))
        if at + n == len(ids):
            self._marks.clear()
            self.cache.sweep(self._slots.can_restore)

    def _append(
        self,
        ids: Sequence[int],
        logits: list[Logits] | None = None,
        join: Callable[[Verify], None] | None = None,
    ) -> None:
        self._has_logits = False
        self.slot.prefill(ids, take_row=None if logits is None else logits.append, join=join)
        self._has_logits = True

    def load(self, ids: Sequence[int]) -> None:
        """Load exactly these tokens, with the logits after them."""
        self.start(ids)
        while not self.holds(ids) and ids:
            self.prefill(ids)

    def extend(self, ids: Sequence[int]) -> Iterator[Logits]:
        """Append tokens; yields the logits after each."""
        for at in range(0, len(ids), LOGITS_AT_ONCE):
            logits: list[Logits] = []
            self._append(ids[at : at + LOGITS_AT_ONCE], logits)
            yield from logits

    # ---- decoding

    def begin(self, **how: Any) -> Decoding:
        """Begin to decode, which consumes the logits.

        Args:
            how: Options of `Slot.begin`.
        """
        self._has_logits = False
        return self.slot.begin(**how)

    def resume(self, sequence: Decoding, snapshot: Snapshot) -> None:
        """Resume a preempted sequence."""
        self._save(0)
        self.restore(snapshot)
        self.slot.resume(sequence)

    # ---- state

    def reset(self) -> None:
        """Forget all tokens."""
        self._has_logits = self._has_ended = False
        self.slot.reset()

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot.

        Raises:
            ConfigError: Its K/V rows are gone, or its shape differs.
        """
        self._has_logits = self._has_ended = False
        bare = replace(snapshot, rows=None)
        if not self.slot.can_restore(bare):
            bare, self._slots.copies = snapshot, self._slots.copies + 1
        self.slot.restore(bare)

    def release(self) -> None:
        """End of the generation; the tokens stay until the slot is needed."""
        self._marks.clear()
        self.busy, self._has_ended = False, True

    def close(self, keep: bool, wait: bool = False) -> None:
        """Give the slot back to the engine.

        Args:
            keep: Cache the prefix for later prompts.
            wait: Wait for the disk.
        """
        try:
            if keep:
                self._save(0, wait)
        except Exception:  # the prefix is lost, but the cache rows are free
            log.exception("the prefix of a sequence could not be kept")
        self.slot.close()

    def _from_disk(self, ids: Ids, n: int) -> Snapshot | None:
        """A prefix on disk that is long enough to be worth loading over n known tokens."""
        disk, least = self._slots.disk, n + SHORTEST
        if disk is None or disk.longest(ids, len(ids) - 1) < least:
            return None
        kept = disk.load(ids, len(ids) - 1)
        return kept if kept is not None and least <= len(kept.tokens) <= self._slots.engine.n_ctx else None

    def _save(self, shared: int, wait: bool = False) -> None:
        """Complete the snapshots after `shared` tokens with their K/V rows, which are about to be overwritten: the longest one
        that has room, and those below it, which share its rows.

        Includes one of the whole answer, unless the conversation continues: then its template renders the answer differently.
        """
        live, cache, disk = self.tokens, self.cache, self._slots.disk
        if 0 < self._first_answer <= shared:
            return
        lost = [kept for kept in cache.without_rows(live) if len(kept.tokens) > shared]
        last = len(lost[0].tokens) if lost else 0
        self.is_leaving = True
        try:
            if self._has_ended and shared < self._first_answer and len(live) >= last + MIN_GAP:
                lost.insert(0, self.slot.snapshot(with_rows=False))
                cache.put(lost[0])
            for kept in lost:  # the longest that there is room for
                if self._complete(kept, shared):
                    break
            if disk is not None and lost and disk.takes(lost[0], self.slot.row_nbytes):
                self._slots.copies += 1
                whole = self.slot.completed(lost[0], cache.rows(lost[0].tokens))
                disk.put(whole, *spread(lost)[1:], wait=wait)
        finally:
            self.is_leaving = False

    def _complete(self, longest: Snapshot, shared: int) -> bool:
        """Give a cached snapshot, and those of its prefixes after `shared` tokens, their K/V rows; False if there is no room."""
        cache, slot = self.cache, self.slot
        if not cache.make_room(longest, slot.row_nbytes):
            return False
        known = cache.rows(longest.tokens)
        n = len(longest.tokens) - sum(block.n_tokens for block in known)
        self._slots.engine.device.buffers.keep(slot.buffers(n, 0), cache.budget - cache.nbytes)
        self._slots.copies += 1
        cache.put(slot.completed(longest, known))
        for kept in cache.without_rows(longest.tokens):
            if len(kept.tokens) > shared:
                cache.put(slot.completed(kept, cache.rows(kept.tokens)))
        return True

    def buffers(self) -> Counter[int]:
        """Number of host buffers of each size that snapshots of the current prompt will take."""
        n, at = self._unsaved, self.slot.n_tokens
        if n * self.slot.row_nbytes > self.cache.budget:
            n = 0  # they are not saved
        return self.slot.buffers(n, sum(mark > at for mark in self._marks) + (self._first_answer > 0))

    def restore_other(self, snapshot: Snapshot) -> None:
        """Load another slot's snapshot."""
        self._save(common_prefix(self.tokens, snapshot.tokens))
        self.restore(snapshot)


class Slots:
    """All open slots of an engine.

    Attributes:
        disk: Persistent prefix cache.
        copies: Number of copies of K/V rows to or from the host.
    """

    def __init__(self, engine: Engine, cache: PrefixCache, disk: DiskCache | None = None) -> None:
        self.engine, self.cache, self.disk = engine, cache, disk
        self.all: list[CachedSlot] = []
        self._given = self.copies = 0
        cache.on_device = self.on_device

    def on_device(self, snapshot: Snapshot) -> bool:
        """Whether some slot has the K/V rows of a snapshot."""
        bare = replace(snapshot, rows=None)
        return any(slot.slot.can_restore(bare) for slot in self.all if not slot.is_leaving)

    def can_restore(self, snapshot: Snapshot) -> bool:
        """Whether a snapshot can be restored anywhere."""
        return any(slot.slot.can_restore(snapshot) for slot in self.all)

    def warm_buffers(self) -> None:
        """Have the host memory touched that the prompts' snapshots will take, beside their prefill."""
        wanted = sum((slot.buffers() for slot in self.all), Counter[int]())
        self.engine.device.buffers.warm(wanted, self.cache.budget - self.cache.nbytes)

    def known(self, ids: Ids) -> int:
        """The longest prefix of a prompt that a free slot has."""
        return max([slot.known(ids) for slot in self.all if not slot.busy], default=0)

    def take(self, ids: Ids, room: int) -> CachedSlot | None:
        """A free slot with cache rows for `room` tokens: the one with the longest prefix of a prompt.

        None if all are taken, or too few rows are left.
        """
        ids = np.asarray(ids, np.int32)
        free = [slot for slot in self.all if not slot.busy]
        going_on = [slot for slot in free if slot.goes_on(ids)]
        best = max(going_on, key=lambda slot: (slot.known(ids), -slot.used), default=None)
        if best is None or best.known(ids) < MIN_GAP:
            first = next((slot for slot in going_on if slot.slot.state_index == 0), None)
            if first is not None and len(free) == len(self.all):
                best = first  # a lone sequence is fastest in state 0
            elif len(self.all) < self.engine.parallel:
                best = self._open(room)
            else:
                best = min(free, key=lambda slot: slot.used, default=None)
        while best is not None and not best.slot.grow(room):
            others = [slot for slot in free if slot is not best and slot in self.all]
            if not others:
                self.close_slot(best)
                best = self._open(room)
                break
            self.close_slot(min(others, key=lambda slot: slot.used))
        if best is None:
            return None
        self._share(ids, best)
        self._given += 1
        best.busy, best.used = True, self._given
        return best

    def _open(self, room: int) -> CachedSlot | None:
        """A new slot; closes idle ones if rows are short. A lone slot gets all rows at once."""
        while True:
            try:
                slot = CachedSlot(self.engine.open(None if self.engine.parallel == 1 else room), self)
            except NoRoomError:
                if not self.close_idle_slot():
                    return None
            else:
                self.all.append(slot)
                return slot

    def _share(self, ids: Ids, slot: CachedSlot) -> None:
        """Copy a prompt's prefix from another slot, instead of prefilling it again."""
        found = self.cache.longest(ids, len(ids) - 1, self.can_restore)
        if found is None or found.rows is not None or len(found.tokens) < slot.known(ids) + MIN_GAP:
            return
        holder = next(other for other in self.all if other.slot.can_restore(found))
        slot.restore_other(holder.slot.completed(found, self.cache.rows(found.tokens)))

    def close_slot(self, slot: CachedSlot, keep: bool = True, wait: bool = False) -> None:
        """Close a slot.

        Args:
            keep: Cache its prefix, in memory and on disk.
            wait: Wait for the disk.
        """
        self.all.remove(slot)
        slot.close(keep, wait)

    def close_idle_slot(self) -> bool:
        """Close the least recently used idle slot; False if none is idle."""
        idle = [slot for slot in self.all if not slot.busy]
        if idle:
            self.close_slot(min(idle, key=lambda slot: slot.used))
        return bool(idle)

    def close(self) -> None:
        """Close all slots, after writing prefixes to disk."""
        while self.all:
            self.close_slot(self.all[-1], keep=self.disk is not None, wait=True)
        if self.disk is not None:
            self.disk.close()


def spread(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """A selection of one prompt's snapshots (longest first): the longest, the shortest, and some between, far apart."""
    kept = list(snapshots[:1])
    for snapshot in snapshots[1:]:
        if snapshot is snapshots[-1] or len(kept[-1].tokens) - len(snapshot.tokens) >= INTERVAL:
            kept.append(snapshot)
    return kept
