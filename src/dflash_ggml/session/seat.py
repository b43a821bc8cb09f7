"""Places of an engine and what is known of the texts that stand there, with the prefix cache that they share."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import NoRoomError
from .disk_cache import DiskCache
from .prefix_cache import MIN_GAP, PrefixCache, common_prefix
from .prompt_state import PromptState

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.place import Place
    from ..state.snapshot import Snapshot

log = logging.getLogger("dflash_ggml")


class Seat(PromptState):
    """A place and its text. busy: a generation has it. used: when it was last given to one, in generations."""

    engine: Place

    def __init__(self, place: Place, seats: Seats) -> None:
        super().__init__(place, seats.cache, seats.disk, seats.held)
        self._seats = seats
        self.busy, self.used = False, 0

    def pieces(self, left: int) -> int:
        most = self._seats.piece
        return (
            self.engine.batches.next(left)
            if most is None or left < most
            else min(most, self.engine.batches.next(left))
        )

    def _park(self, live: Sequence[int], shared: int) -> None:
        # the text itself stays as it is: a generation that is parked goes on from it
        last = self.cache.best(live, len(live), self.engine.can_restore)
        if last is not None and last.rows is None and len(last.tokens) > shared:
            whole = self.engine.completed(last)
            self.cache.put(whole)
            if self.disk is not None:
                self.disk.put(whole)

    def known(self, ids: Sequence[int]) -> int:
        """How much of a prompt is here."""
        live = self.engine.tokens
        shared = common_prefix(live, ids)
        here = shared if shared == len(live) and (shared < len(ids) or self.holds(ids)) else 0
        kept = self.cache.longest(ids, len(ids) - 1, self.engine.can_restore)
        return max(here, len(kept.tokens) if kept is not None else 0)


class Seats:
    """All seats of an engine. piece: tokens of a pass over a prompt, while others write; None: as many as are fast."""

    def __init__(self, engine: Engine, cache: PrefixCache, disk: DiskCache | None = None) -> None:
        self.engine, self.cache, self.disk = engine, cache, disk
        self.piece: int | None = None
        self.all: list[Seat] = []
        self._given = 0

    def held(self, snapshot: Snapshot) -> bool:
        """Whether a snapshot can be restored anywhere."""
        return any(seat.engine.can_restore(snapshot) for seat in self.all)

    def known(self, ids: Sequence[int]) -> int:
        """The longest prefix of a prompt that need not be read again."""
        return max([seat.known(ids) for seat in self.all if not seat.busy], default=0)

    def take(self, ids: Sequence[int], room: int) -> Seat | None:
        """A free seat for a prompt, with rows for `room` tokens: the one that holds most of it, with what others hold of it too.

        None where all are taken, or what they hold leaves too few rows.
        """
        free = [seat for seat in self.all if not seat.busy]
        best = max(free, key=lambda seat: (seat.known(ids), -seat.used), default=None)
        if best is None or best.known(ids) < MIN_GAP:
            first = next((seat for seat in free if seat.engine.lane == 0), None)
            if first is not None and len(free) == len(self.all):
                best = first  # a text that is alone is fastest there
            elif len(self.all) < self.engine.parallel:
                best = self._opened(room)  # where that fails, nobody is idle any more
        while best is not None and not best.engine.grow(room):
            others = [seat for seat in free if seat is not best and seat in self.all]
            if others:
                self.leave(min(others, key=lambda seat: seat.used))
            else:
                self.leave(best)
                best = self._opened(room)
                break
        if best is None:
            return None
        self._bring(ids, best)
        self._given += 1
        best.busy, best.used = True, self._given
        return best

    def _opened(self, room: int) -> Seat | None:
        """A seat that is new. Idle ones are given up where rows are short."""
        while True:
            try:
                seat = Seat(self.engine.open(room), self)
            except NoRoomError:
                idle = [seat for seat in self.all if not seat.busy]
                if not idle:
                    return None
                self.leave(min(idle, key=lambda seat: seat.used))
            else:
                self.all.append(seat)
                return seat

    def _bring(self, ids: Sequence[int], seat: Seat) -> None:
        """Let a seat have what another one holds of a prompt: a common prefix is read once."""
        there = seat.known(ids)
        found = self.cache.longest(ids, len(ids) - 1, self.held)
        if found is None or found.rows is not None or len(found.tokens) < there + MIN_GAP:
            return
        holder = next(other for other in self.all if other.engine.can_restore(found))
        self.cache.put(holder.engine.completed(found))

    def give_back(self, seat: Seat) -> None:
        """A generation has ended; its text stays until the seat is needed."""
        seat.keep_nowhere()
        seat.busy = False

    def exchange(self, new: Seat, old: Seat) -> Seat:
        """Let a seat that was left stand where a new one does: whoever has it need not know."""
        old.engine, old.busy, old.used = new.engine, True, new.used
        self.all[self.all.index(new)] = old
        return old

    def leave(self, seat: Seat) -> None:
        """Give a seat's rows back; what later prompts may go on from is kept."""
        try:
            seat.park()
        except Exception:  # a prompt is read again; whoever needs the rows has them
            log.exception("the prefix of a text could not be kept")
        self.all.remove(seat)
        seat.engine.close()

    def shrink(self) -> bool:
        """Give up the idle seat that was used longest ago; False if none is idle."""
        idle = [seat for seat in self.all if not seat.busy]
        if idle:
            self.leave(min(idle, key=lambda seat: seat.used))
        return bool(idle)

    def close(self) -> None:
        """Give up all seats."""
        while self.all:
            self.leave(self.all[-1])
