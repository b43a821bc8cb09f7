"""Several generations on one engine, from any thread: who is queued, who makes rounds, who has a place between two of them.

Rounds (`rounds.py`) are made by a thread of their own (`start`), or by whoever reads events, one caller at a time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from ..errors import ConfigError, DflashError, NoRoomError, as_exception
from .events import Event
from .prompts import Prepared
from .rounds import Rounds
from .seat import Seat, Seats
from .task import Make, Task

if TYPE_CHECKING:
    from ..engine.place import Place

log = logging.getLogger("dflash_ggml")
T = TypeVar("T")


class Scheduler:
    """Runs generations side by side on the places of an engine."""

    def __init__(self, seats: Seats) -> None:
        self.rounds = Rounds(seats)
        self.seats, self.engine = seats, seats.engine
        self._changed = self.rounds.changed
        self._driving = threading.Lock()
        self._driver: threading.Thread | None = None  # who has the wheel now
        self._thread: threading.Thread | None = None
        self._closed = False
        self._borrowers = 0  # who wait for the wheel
        self._untold = False  # that a round was made
        self._owed = False  # a round, to those who run: somebody has borrowed since the last

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
            self.rounds.waiting.append(task)
            self._changed.notify_all()
        return task

    def abandon(self, task: Task) -> None:
        """Nobody reads any more."""
        task.abandoned = True
        if not task.ended and self._thread is None and self._driver is not threading.current_thread():
            with self._wheel():
                self.rounds.drop()

    def _taken(self, task: Task) -> tuple[list[Event], bool]:
        """The next events of a task, and whether it has ended."""
        while True:
            if (
                self.is_driven_here() and not task.events and not task.ended
            ):  # they would be waited for for ever
                raise ConfigError(
                    "this call came from inside a step on the same model; make it after the step"
                )
            with self._changed:
                if self._thread is not None:
                    while not task.events and not task.ended:
                        self._changed.wait()
                if task.events or task.ended:
                    # one by one: others may come meanwhile, since who makes rounds has no lock of ours
                    return [task.events.popleft() for _ in range(len(task.events))], task.ended
            with self._wheel():
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
                with self._wheel():
                    seat = self._lent(room) if self._lends else None
                    if seat is not None:
                        return self._used(seat, work)
                    if self._thread is None:
                        self.round()
                with self._changed:  # the round that is owed now: its thread may be waiting for this borrower
                    self._changed.notify_all()
        finally:
            with self._changed:
                self._borrowers -= 1
                self._changed.notify_all()

    @property
    def _lends(self) -> bool:
        """Whether the wheel is free for those who borrow a place."""
        if not self.rounds.is_busy:
            return True
        writing = any(task.is_written for task in list(self.rounds.running))
        return not self._owed and (self.rounds.pace.may_read or not writing)

    def _lent(self, room: int) -> Seat | None:
        """A seat to borrow; None where running texts hold it, or the rows: their next round may change that."""
        busy = self.rounds.is_busy
        if any(task.is_short for task in self.rounds.running):
            seat = None
        else:
            seat = self.seats.take((), room)
        if seat is None and not busy:
            raise NoRoomError(f"no cache rows for {room} tokens are free; lower --parallel")
        self._owed = busy
        return seat

    def _used(self, seat: Seat, work: Callable[[Place], T]) -> T:
        """What is done with a borrowed seat; those who write have waited for it."""
        beside = any(task.is_written for task in self.rounds.running)
        built, began = self.engine.run_counts()["graphs"], time.perf_counter()
        try:
            return work(seat.engine)
        finally:
            self.seats.give_back(seat)
            if beside and self.engine.run_counts()["graphs"] == built:
                self.rounds.pace.lent(time.perf_counter() - began)

    @contextmanager
    def _wheel(self) -> Iterator[None]:
        """Have the wheel. It is known whose it is: what runs meanwhile must not wait for its own thread."""
        with self._driving:
            self._driver = threading.current_thread()
            try:
                yield
            finally:
                self._driver = None

    def is_driven_here(self) -> bool:
        """Whether the caller is inside a round, or what is done between two."""
        return self._driver is threading.current_thread()

    def start(self) -> None:
        """Make rounds in a thread of their own from now on."""
        self._thread = threading.Thread(target=self._drive, name="dflash-rounds", daemon=True)
        self._thread.start()

    def _drive(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (not self.rounds.is_busy or (self._borrowers and self._lends)):
                    if self._untold:
                        self._tell()
                    self._changed.wait()
                if self._closed:
                    return
            with self._driving:
                try:
                    self.round()
                except BaseException as error:  # a fault of ours; whoever comes next is answered all the same
                    log.exception("a round failed")
                    self.rounds.end_all(as_exception(error))

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
        with self._wheel():
            self.rounds.end_all(error)
            self.seats.close()

    def round(self) -> None:
        """A round by this caller, who has the wheel."""
        before, self._driver = self._driver, threading.current_thread()
        try:
            self.rounds.make()
        finally:
            self._driver, self._owed = before, False
            goes_on = self._thread is not None and not self._borrowers and self.engine.device.is_gpu
            if goes_on and any(task.is_written for task in self.rounds.running):
                self._untold = True
                self.engine.device.before_waiting(self._tell)
            else:
                self._tell()

    def _tell(self) -> None:
        """Wake those who wait for events. Of a round after which texts are written on at once, when the next one waits for a GPU:
        the interpreter runs one thread at a time, and the GPU would wait for all who were woken."""
        with self._changed:
            self._untold = False
            self._changed.notify_all()
