"""Several generations on one engine: who reads, who writes, who waits, round by round.

A round admits who waits, reads a piece of the oldest prompt, and steps all texts that are being written, in one pass of the
target. A generation is a generator of events that yields a `Wish` where it wants a step; so one is cancelled, fails or ends
without the others noticing. Two designs were weighed: a thread per generation that meets the others at a barrier needs no wishes,
but every step would wait for the slowest thread to wake, and a generation that dies inside a lock would stop all.

Rounds are made by a thread of their own (`start`), or by whoever reads events, one caller at a time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import ConfigError, ContextOverflowError, DflashError, NoRoomError, as_exception
from .events import Begin, Event, Finish, Progress, Usage
from .generation import Wish
from .pace import LONGEST, Pace
from .prefix_cache import common_prefix
from .prompts import Prepared
from .seat import Seat, Seats

if TYPE_CHECKING:
    from ..engine.place import Place
    from ..engine.step import Run, Step
    from ..state.snapshot import Snapshot

log = logging.getLogger("dflash_ggml")
T = TypeVar("T")

ROOM = 256  # tokens of an answer that rows are taken for at once
LEAST_ROOM = 32  # where there are not as many
SHARED = 64  # tokens of another prompt, still being read, that are worth waiting for

Make = Callable[[Seat], Generator[Any, Any, None]]


class Task:
    """One generation, from waiting to its end."""

    def __init__(self, prepared: Prepared, make: Make, should_stop: Callable[[], bool] | None) -> None:
        self.prepared, self.make, self.should_stop = prepared, make, should_stop
        self.events: deque[Event] = deque()
        self.error: BaseException | None = None
        self.ended = self.abandoned = False
        self.seat: Seat | None = None
        self.generator: Generator[Any, Any, None] | None = None
        self.run: Run | None = None  # what it wants a step of
        self.parked: Snapshot | None = None
        self.left: Seat | None = None  # where it was before it was parked
        self.n_tokens = 0  # that were emitted
        self.is_short = False  # of rows that others have

    @property
    def ids(self) -> tuple[int, ...]:
        return self.prepared.ids

    @property
    def is_reading(self) -> bool:
        """Whether its prompt is being taken in."""
        return self.seat is not None and self.run is None

    @property
    def is_written(self) -> bool:
        """Whether it is on the device and wants steps."""
        return self.run is not None and self.parked is None


class Scheduler:
    """Runs generations side by side on the places of an engine."""

    def __init__(self, seats: Seats) -> None:
        self.seats = seats
        self.engine = seats.engine
        self.pace = Pace()
        self._waiting: deque[Task] = deque()
        self._running: list[Task] = []  # in the order in which they began, parked ones included
        self._changed = threading.Condition()
        self._driving = threading.Lock()
        self._driver: threading.Thread | None = None  # who makes a round now
        self._thread: threading.Thread | None = None
        self._closed = False
        self._borrowers = 0  # who wait for the wheel
        self._owed = False  # a round, to those who run: somebody has borrowed since the last
        self.passes = self.columns = self.sequences = self.emitted = self.parkings = 0
        self.seconds = 0.0

    # ---- from any thread

    def events(
        self,
        prepared: Prepared,
        make: Make,
        should_stop: Callable[[], bool] | None = None,
    ) -> Generator[Event, None, None]:
        """The events of one generation. Closing the iterator ends it within one step."""
        task = self.submit(prepared, make, should_stop)
        try:
            while True:
                batch, ended = self._taken(task)
                yield from batch
                if ended:
                    if task.error is not None:
                        raise task.error
                    return
        finally:
            self.abandon(task)

    def submit(self, prepared: Prepared, make: Make, should_stop: Callable[[], bool] | None = None) -> Task:
        """Queue a generation; `make(seat)` builds its events once it has a place."""
        task = Task(prepared, make, should_stop)
        with self._changed:
            if self._closed:
                raise ConfigError("the session is closed")
            self._waiting.append(task)
            self._changed.notify_all()
        return task

    def abandon(self, task: Task) -> None:
        """Nobody reads any more."""
        task.abandoned = True
        if not task.ended and self._thread is None and self._driver is not threading.current_thread():
            with self._driving:
                self._drop()

    def _taken(self, task: Task) -> tuple[list[Event], bool]:
        """The next events of a task, and whether it has ended."""
        while True:
            with self._changed:
                if self._thread is not None:
                    while not task.events and not task.ended:
                        self._changed.wait()
                if task.events or task.ended:
                    batch = list(task.events)
                    task.events.clear()
                    return batch, task.ended
            if self.is_driven_here():
                raise ConfigError(
                    "this call came from inside a step on the same model; make it after the step"
                )
            with self._driving:
                if not task.events and not task.ended:
                    self.round()

    def borrow(self, work: Callable[[Place], T], room: int = 1) -> T:
        """Do something with a free place, with rows for `room` tokens, between two rounds; waits for one.

        Where texts are being written they have a round after each, and what it took of their time is owed to them as that of
        prompts is.
        """
        room = max(min(room, self.engine.n_ctx), 1)
        if self.is_driven_here():
            raise ConfigError("this call came from inside a step on the same model; make it after the step")
        with self._changed:
            self._borrowers += 1
        try:
            while True:
                with self._changed:
                    while self._thread is not None and not self._closed and not self._lends:
                        self._changed.wait(0.05)
                    if self._closed:
                        raise ConfigError("the session is closed")
                with self._driving:
                    seat = self._lent(room) if self._lends else None
                    if seat is not None:
                        return self._used(seat, work)
                    if self._thread is None:
                        self.round()
        finally:
            with self._changed:
                self._borrowers -= 1
                self._changed.notify_all()

    @property
    def _lends(self) -> bool:
        """Whether the wheel is free for those who borrow a place."""
        if not (self._waiting or self._running):
            return True
        writing = any(task.is_written for task in list(self._running))
        return not self._owed and (self.pace.may_read or not writing)

    def _lent(self, room: int) -> Seat | None:
        """A seat to borrow; None where running texts hold it, or the rows: their next round may change that."""
        busy = bool(self._waiting or self._running)
        if any(task.is_short for task in self._running):
            seat = None
        else:
            seat = self.seats.take((), room)
        if seat is None and not busy:
            raise NoRoomError(f"no cache rows for {room} tokens are free; lower --parallel")
        self._owed = busy
        return seat

    def _used(self, seat: Seat, work: Callable[[Place], T]) -> T:
        """What is done with a borrowed seat; those who write have waited for it."""
        beside = any(task.is_written for task in self._running)
        built, began = self.engine.run_counts()["graphs"], time.perf_counter()
        try:
            return work(seat.engine)
        finally:
            self.seats.give_back(seat)
            if beside and self.engine.run_counts()["graphs"] == built:
                self.pace.lent(time.perf_counter() - began)

    def is_driven_here(self) -> bool:
        """Whether the caller is inside a round."""
        return self._driver is threading.current_thread()

    @property
    def counts(self) -> dict[str, int]:
        """Generations that run, that wait for a place, and of the running those that are parked."""
        with self._changed:
            parked = sum(task.parked is not None for task in self._running)
            return {"running": len(self._running) - parked, "waiting": len(self._waiting) + parked}

    def start(self) -> None:
        """Make rounds in a thread of their own from now on."""
        self._thread = threading.Thread(target=self._rounds, name="dflash-rounds", daemon=True)
        self._thread.start()

    def _rounds(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (
                    not (self._waiting or self._running) or (self._borrowers and self._lends)
                ):
                    self._changed.wait()
                if self._closed:
                    return
            with self._driving:
                try:
                    self.round()
                except BaseException as error:  # a fault of ours; whoever comes next is answered all the same
                    log.exception("a round failed")
                    self._end_all(as_exception(error))

    def _end_all(self, error: Exception) -> None:
        for task in [*self._queued(), *self._running]:
            self._end(task, error)

    def close(self) -> None:
        """End all generations, and give up the places."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self.clear(DflashError("the session was closed before this answer had ended"))

    def clear(self, error: Exception) -> None:
        """End all generations with this error, and give up the places."""
        with self._driving:
            self._end_all(error)
            self.seats.close()

    # ---- by whoever drives

    def round(self) -> None:
        """Admit, read, step. The caller has the wheel."""
        self._driver = threading.current_thread()
        try:
            self._drop()
            self._admit()
            self._read()
            self._step()
        finally:
            self._driver = None
            with self._changed:
                self._owed = False
                self._changed.notify_all()

    def _drop(self) -> None:
        """End those that nobody reads, and those that were asked to stop while they could not ask."""
        for task in [*self._queued(), *self._running]:
            if task.abandoned:
                self._end(task)
                continue
            try:
                stops = task.generator is None or task.parked is not None
                if not (stops and task.should_stop is not None and task.should_stop()):
                    continue
            except Exception as error:  # noqa: BLE001 - told to who asked
                self._end(task, error)
                continue
            if task.parked is None:
                n = len(task.ids)
                usage = Usage(n, 0, 0, 0, 0, 0, 0, 0.0, 0.0, "plain", 0)
                task.events.extend((Begin(n, 0), usage, Finish("cancelled")))
                self._end(task)
            else:
                from ..engine.step import Step

                assert task.run is not None
                task.run.finish, task.parked = "cancelled", None
                self._advance(task, Step((), "prefill"))

    def _queued(self) -> list[Task]:
        """Those that wait for a place; more may come meanwhile."""
        with self._changed:
            return list(self._waiting)

    def _admit(self) -> None:
        """Parked texts go on first, oldest first; then whoever waits, as long as there are places. Nobody while a text that is
        being written is short of rows: they would be taken from under it."""
        if any(task.is_short for task in self._running):
            return
        for task in [task for task in self._running if task.parked is not None]:
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
            with self._changed:
                self._waiting.remove(task)
                self._running.append(task)
            task.seat = seat
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
        if seat is None and not any(task.seat is not None for task in self._running):
            task.error = NoRoomError(
                f"no cache rows for a prompt of {len(task.ids)} tokens are free; lower --parallel"
            )
            with self._changed:
                self._waiting.remove(task)
            self._end(task, task.error)
        return seat

    def _is_read_elsewhere(self, task: Task) -> bool:
        """Whether another prompt that is being read has much in common with this one: it is read once."""
        if getattr(task.prepared.request, "prompt_logprobs", False):
            return False
        for other in self._running:
            if not other.is_reading or other.seat is None:
                continue
            shared = min(common_prefix(other.ids, task.ids), len(task.ids) - 1, len(other.ids) - 1)
            if other.seat.engine.n_tokens < shared and shared >= self.seats.known(task.ids) + SHARED:
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
        """A piece of a prompt that was not `seen` yet: of the oldest, or of one that a piece is enough for; the seconds that it
        took."""
        reading = [task for task in self._running if task.is_reading and task not in seen]
        if not reading:
            return 0.0
        beside = any(task.is_written and not task.is_short for task in self._running)
        if beside and not self.pace.may_read:
            return 0.0
        self.seats.piece = self.pace.most() if beside else None
        piece = self.seats.piece or self.engine.batches.limit

        def left(task: Task) -> int:
            assert task.seat is not None
            return len(task.ids) - task.seat.engine.n_tokens

        task = next((task for task in reading if left(task) <= piece), reading[0])
        seen.add(task)
        built = self.engine.run_counts()["graphs"]
        began, before = time.perf_counter(), left(task)
        self._advance(task)
        took = time.perf_counter() - began
        if task.seat is not None and (n := before - left(task)) > 0:
            self.pace.read(n, took, beside, self.engine.run_counts()["graphs"] == built)
        return took

    def _step(self) -> None:
        """One step of all that are being written."""
        tasks = [task for task in self._running if task.is_written]
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
            self._count(steps, took)
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

    def _count(self, steps: list[Step | Exception], seconds: float) -> None:
        done = [step for step in steps if not isinstance(step, Exception)]
        self.passes += 1
        self.sequences += len(done)
        self.columns += sum([step.n_draft + 1 for step in done])
        self.emitted += sum([len(step.tokens) for step in done])
        self.seconds += seconds

    def _make_room(self, task: Task, error: NoRoomError) -> None:
        """A text needs rows that others have: idle ones go, then the newest are parked until there is room again. It takes the
        rows at once, before those whom they were of come back for them."""
        while task.is_written and not self._grows(task):
            if self.seats.shrink():
                continue
            written = [other for other in self._running if other.is_written]
            if len(written) > 1:
                self._park(written[-1])
            elif any(other.is_reading for other in self._running):
                return
            elif task.seat is not None and task.seat.engine.first_slot:
                self._park(task)  # alone, behind rows that are free: it goes on at the first
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
        self.parkings += 1
        self.seats.give_back(seat)
        self.seats.leave(seat)

    def _resume(self, task: Task) -> bool:
        """Let a parked text go on, or end with its error; False where there are too few rows."""
        assert task.parked is not None and task.run is not None and task.left is not None
        parked, run = task.parked, task.run
        try:
            free = self.seats.take(parked.tokens, min(len(parked.tokens) + ROOM, self.engine.n_ctx))
            if free is None and any(other.seat is not None for other in self._running):
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
        with self._changed:
            task.error, task.ended, task.run, task.parked = error, True, None, None
            task.is_short = False
            self._changed.notify_all()
            if task in self._running:
                self._running.remove(task)
            if task in self._waiting:
                self._waiting.remove(task)
        if task.seat is not None:
            self.seats.give_back(task.seat)
            task.seat = None
