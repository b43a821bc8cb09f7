"""A round of generations on one engine: who reads, who writes, who waits.

A round admits who waits, reads a piece of the oldest prompt, and steps all texts that are being written, in one pass of the
target. A generation is a generator of events that yields a `Wish` where it wants a step; so one is cancelled, fails or ends
without the others noticing. Two designs were weighed: a thread per generation that meets the others at a barrier needs no wishes,
but every step would wait for the slowest thread to wake, and a generation that dies inside a lock would stop all.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import ContextOverflowError, DflashError, NoRoomError, as_exception
from .events import Begin, Finish, Progress, Usage
from .generation import Wish
from .pace import LONGEST, Pace
from .prefix_cache import common_prefix
from .seat import Seat, Seats
from .task import Task

if TYPE_CHECKING:
    from ..engine.step import Step

log = logging.getLogger("dflash_ggml")

ROOM = 256  # tokens of an answer that rows are taken for at once
LEAST_ROOM = 32  # where there are not as many
SHARED = 64  # tokens of another prompt, still being read, that are worth waiting for


@dataclass(slots=True)
class Tally:
    """Sums over all passes so far; sequences: texts in them. parkings: texts that had to leave for a while."""

    passes: int = 0
    columns: int = 0
    sequences: int = 0
    emitted: int = 0
    parkings: int = 0
    seconds: float = 0.0

    def add(self, steps: list[Step | Exception], seconds: float) -> None:
        """One pass of so many seconds, and what came of it for each text."""
        done = [step for step in steps if not isinstance(step, Exception)]
        self.passes += 1
        self.sequences += len(done)
        self.columns += sum([step.n_draft + 1 for step in done])
        self.emitted += sum([len(step.tokens) for step in done])
        self.seconds += seconds


class Rounds:
    """The generations that wait and run on the places of an engine. Rounds are made by one thread at a time."""

    def __init__(self, seats: Seats) -> None:
        self.seats, self.engine = seats, seats.engine
        self.pace, self.tally = Pace(), Tally()
        self.waiting: deque[Task] = deque()
        self.running: list[Task] = []  # in the order in which they began, parked ones included
        self.changed = threading.Condition()  # held while the two change; told of events and ends

    @property
    def counts(self) -> dict[str, int]:
        """Generations that run, that wait for a place, and of the running those that are parked."""
        with self.changed:
            parked = sum(task.parked is not None for task in self.running)
            return {"running": len(self.running) - parked, "waiting": len(self.waiting) + parked}

    @property
    def is_busy(self) -> bool:
        """Whether anybody waits or runs."""
        return bool(self.waiting or self.running)

    def make(self) -> None:
        """One round: admit, read, step."""
        self.drop()
        self._admit()
        self._read()
        self._step()

    def drop(self) -> None:
        """End those that nobody reads, and those that were asked to stop while they could not ask."""
        for task in [*self._queued(), *self.running]:
            if task.abandoned:
                self._end(task)
                continue
            try:
                waits = task.generator is None or task.parked is not None or task.is_reading or task.is_short
                if not (waits and task.should_stop is not None and task.should_stop()):
                    continue
            except Exception as error:  # noqa: BLE001 - told to who asked
                self._end(task, error)
                continue
            if task.is_reading and task.n_read:
                self._advance(task)  # it asks too before it reads on
            elif task.parked is None and not task.is_short:
                n = len(task.ids)
                usage = Usage(n, 0, 0, 0, 0, 0, 0, 0.0, 0.0, "plain", 0)
                task.events.extend((Begin(n, 0), usage, Finish("cancelled")))
                self._end(task)
            else:
                from ..engine.step import Step

                assert task.run is not None
                task.run.finish, task.parked, task.is_short = "cancelled", None, False
                self._advance(task, Step((), "prefill"))

    def end_all(self, error: Exception) -> None:
        """End all generations with this error."""
        for task in [*self._queued(), *self.running]:
            try:
                self._end(task, error)
            except Exception:  # its reader has been told by now; those of the others wait
                log.exception("a place could not be given back")

    def _queued(self) -> list[Task]:
        """Those that wait for a place; more may come meanwhile."""
        with self.changed:
            return list(self.waiting)

    def _admit(self) -> None:
        """Parked texts go on first, oldest first; then whoever waits, as long as there are places. Nobody while a text that is
        being written is short of rows: they would be taken from under it."""
        if any(task.is_short for task in self.running):
            return
        for task in [task for task in self.running if task.parked is not None]:
            if not self._resume(task):
                return
        while True:
            waiting = [task for task in self._queued() if not self._is_read_elsewhere(task)]
            if not waiting:
                return
            task = waiting[0]
            try:
                seat = self._seat(task)
            except Exception as error:  # noqa: BLE001 - told to who asked
                self._end(task, error)
                continue
            if seat is None and not task.ended:
                return
            if seat is None:
                continue
            with self.changed:
                self.waiting.remove(task)
                self.running.append(task)
            task.seat = seat
            known = 0 if _is_read_whole(task) else seat.known(task.ids)
            task.n_left = len(task.ids) - known  # the seat has its last text until the first piece is read
            try:
                task.generator = task.make(seat)
            except Exception as error:  # noqa: BLE001 - told to who asked
                self._end(task, error)

    def _seat(self, task: Task) -> Seat | None:
        """A seat for a waiting task. A prompt that finds no room though it is alone has its error."""
        limit = task.prepared.request.max_tokens
        answer = ROOM if limit is None or limit < 0 else min(limit, ROOM)
        n, most = len(task.ids), self.engine.n_ctx
        seat = self.seats.take(task.ids, min(n + answer, most))
        if seat is None and answer > LEAST_ROOM:
            seat = self.seats.take(task.ids, min(n + LEAST_ROOM, most))
        if seat is None and not any(task.seat is not None for task in self.running):
            task.error = NoRoomError(
                f"no cache rows for a prompt of {len(task.ids)} tokens are free; lower --parallel"
            )
            with self.changed:
                self.waiting.remove(task)
            self._end(task, task.error)
        return seat

    def _is_read_elsewhere(self, task: Task) -> bool:
        """Whether another prompt that is being read has much in common with this one: it is read once."""
        if _is_read_whole(task):
            return False
        for other in self.running:
            if not other.is_reading or other.seat is None:
                continue
            shared = min(common_prefix(other.ids, task.ids), len(task.ids) - 1, len(other.ids) - 1)
            if len(other.ids) - other.n_left < shared and shared >= self.seats.known(task.ids) + SHARED:
                other.seat.keep_at(shared)
                return True
        return False

    def _read(self) -> None:
        """A piece of each prompt, as many as the others may wait for."""
        seen, spent = set[Task](), 0.0
        took = self._read_piece(seen)
        while took and spent + took < LONGEST:
            spent += took
            self._admit()
            took = self._read_piece(seen)

    def _read_piece(self, seen: set[Task]) -> float:
        """A piece of a prompt that was not `seen` yet: of one that is short, or of the oldest; the seconds that it took.

        One that has been read to its end waits for nobody: its logits are there, and it has its first token in this round.
        """
        reading = [task for task in self.running if task.is_reading and task not in seen]
        if not reading:
            return 0.0
        beside = any(task.is_written and not task.is_short for task in self.running)
        task = next((task for task in reading if not task.n_left), None)
        if task is None and beside:
            reading = [task for task in reading if self._may_go_on(task)] if self.pace.may_read else []
            if not reading:
                return 0.0
        self.seats.piece = self.pace.most() if beside else None
        piece = self.seats.piece or self.engine.batches.limit
        if task is None:
            task = reading[self.pace.turn([task.n_left <= piece or self._is_short(task) for task in reading])]
        seen.add(task)
        built = self.engine.run_counts()["graphs"]
        began, before = time.perf_counter(), task.n_read
        self._advance(task)
        took = time.perf_counter() - began
        if (n := task.n_read - before) > 0:
            self.pace.read(n, took, beside, self.engine.run_counts()["graphs"] == built, task.account)
            if task.is_reading and not task.n_left:
                self._advance(task)
        return took

    def _is_short(self, task: Task) -> bool:
        """Whether a prompt is read before older ones that are long."""
        return task.account is not None and self.pace.is_short(task.account, task.n_left)

    def _may_go_on(self, task: Task) -> bool:
        """Whether a prompt may be read on beside texts that are being written."""
        if task.account is None:
            task.account = self.pace.opened()
        return self.pace.may_go_on(task.account, task.n_left)

    def _step(self) -> None:
        """One step of all that are being written."""
        tasks = [task for task in self.running if task.is_written]
        if not tasks:
            return
        began = time.perf_counter()
        try:
            steps = self.engine.step([task.run for task in tasks if task.run is not None])
        except Exception as error:  # noqa: BLE001 - the pass broke: all of them end
            for task in tasks:
                self._advance(task, error=error)
            return
        took = time.perf_counter() - began
        short = list[tuple[Task, NoRoomError]]()
        if not all(isinstance(step, NoRoomError) for step in steps):
            self.pace.stepped(took)
            self.tally.add(steps, took)
        for task, step in zip(tasks, steps):
            task.is_short = isinstance(step, NoRoomError)
            if isinstance(step, NoRoomError):
                short.append((task, step))
            elif isinstance(step, Exception):
                self._advance(task, error=step)
            else:
                task.n_tokens += len(step.tokens)
                self._advance(task, step)
        for task, reason in short:  # once all have their steps: who is parked has none under way
            try:
                self._make_room(task, reason)
            except Exception as failure:  # noqa: BLE001 - told to who asked
                self._fail(task, failure)

    # ---- where rows are short

    def _make_room(self, task: Task, error: NoRoomError) -> None:
        """A text needs rows that others have: idle ones go, then the newest are parked until there is room again. It takes the
        rows at once, before those whom they were of come back for them."""
        while task.is_written and not self._grows(task):
            if self.seats.shrink():
                continue
            written = [other for other in self.running if other.is_written]
            if len(written) > 1:
                self._park(written[-1])
            elif any(other.is_reading for other in self.running):
                return
            else:
                self._advance(task, error=ContextOverflowError(str(error)))

    def _grows(self, task: Task) -> bool:
        """Whether a text gets rows to go on with."""
        assert task.seat is not None
        place = task.seat.engine
        if not place.grow(min(place.n_tokens + ROOM, place.n_ctx)) and not place.grow(place.n_tokens + 1):
            return False
        task.is_short = False
        return True

    def _park(self, task: Task) -> None:
        """Take a text off the device; it goes on where it was."""
        seat = task.seat
        assert seat is not None
        task.is_short = False
        try:
            parked = seat.engine.snapshot()
        except Exception as error:  # noqa: BLE001 - told to who asked
            self._fail(task, error)
            return
        task.parked, task.seat, task.left = parked, None, seat
        self.tally.parkings += 1
        self.seats.give_back(seat)
        self.seats.leave(seat)

    def _resume(self, task: Task) -> bool:
        """Let a parked text go on, or end with its error; False where there are too few rows."""
        assert task.parked is not None and task.run is not None and task.left is not None
        parked, run = task.parked, task.run
        try:
            free = self.seats.take(parked.tokens, min(len(parked.tokens) + ROOM, self.engine.n_ctx))
            if free is None and any(other.seat is not None for other in self.running):
                return False
            if free is None:
                raise NoRoomError(
                    f"no cache rows for a text of {len(parked.tokens)} tokens are free; lower --parallel"
                )
            task.seat = seat = self.seats.exchange(free, task.left)
            seat.park()
            seat.restore(parked)
            seat.engine.resume(run)
            seat.spent()
        except Exception as error:  # noqa: BLE001 - told to who asked
            self._fail(task, error)
        task.parked = None
        return True

    def _fail(self, task: Task, error: Exception) -> None:
        """End a text with an error; its place, if it has one, is left in order."""
        task.parked = None
        if task.seat is None:
            self._end(task, error)
        else:
            self._advance(task, error=error)

    # ---- one generation

    def _advance(self, task: Task, step: Step | None = None, error: Exception | None = None) -> None:
        """Let a generation go on until it has read a piece, wants a step, or ends."""
        generator, task.run = task.generator, None
        assert generator is not None
        try:
            item = generator.throw(error) if error is not None else generator.send(step)
            while True:
                if isinstance(item, Wish):
                    task.run = item.run
                    return
                task.events.append(item)
                if isinstance(item, Progress) and item.stage == "prefill":
                    task.n_read, task.n_left = item.done, item.total - item.done
                    return
                item = next(generator)
        except StopIteration:
            self._end(task)
        except (KeyboardInterrupt, SystemExit):
            self._end(task, DflashError("the generation was interrupted"))
            raise
        except BaseException as failure:  # noqa: BLE001 - told to who asked
            self._end(task, as_exception(failure))

    def _end(self, task: Task, error: BaseException | None = None) -> None:
        if task.generator is not None:
            try:
                task.generator.close()
            except Exception:  # whoever reads it is told all the same
                log.exception("a generation could not be closed")
        with self.changed:
            task.error, task.ended, task.run, task.parked = error, True, None, None
            task.is_short = False
            self.changed.notify_all()
            if task in self.running:
                self.running.remove(task)
            if task in self.waiting:
                self.waiting.remove(task)
        if task.seat is not None:
            self.seats.give_back(task.seat)
            task.seat = None


def _is_read_whole(task: Task) -> bool:
    """Whether a prompt is read from its start, whatever is known of it."""
    return bool(getattr(task.prepared.request, "prompt_logprobs", False))
