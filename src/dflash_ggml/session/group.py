"""Calls that one caller has run side by side, each in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from ..errors import DflashError

T = TypeVar("T")


class Group:
    """Marks the threads whose generations run beside each other; any other thread's wait for their turn as ever.

    A flag of the session was the other design: other threads' calls would join the group, and be broken off at its end.
    """

    def __init__(self, here: threading.local) -> None:
        """here: where a thread's group is noted."""
        self._here = here
        self._stopped = threading.Event()

    def run(self, call: Callable[[], T]) -> T:
        """A call as one of the group, in this thread. One that ends with more than an error stops them all."""
        self._here.group = self
        try:
            return call()
        except BaseException as error:
            if not isinstance(error, Exception):
                self.stop()
            raise
        finally:
            self._here.group = None

    def stop(self) -> None:
        """End the generations of all calls within a step, and let none begin."""
        self._stopped.set()

    def check(self) -> None:
        """Raise DflashError once the group was stopped."""
        if self._stopped.is_set():
            raise DflashError("this answer was given up: the call that it is part of was interrupted")

    def or_stopped(self, should_stop: Callable[[], bool] | None) -> Callable[[], bool]:
        """A generation's own reason to stop, or the group's."""
        if should_stop is None:
            return self._stopped.is_set
        return lambda: self._stopped.is_set() or should_stop()
