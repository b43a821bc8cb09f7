"""One generation at a time on one engine: whoever comes second waits, or replaces a stream that nobody is reading."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ..errors import ConfigError, DflashError

T = TypeVar("T")

_POLL_S = 0.5  # a thread that ends tells nobody: those who wait for it look this often


class Turns:
    """Serialises generators, and calls that change the state, on one engine.

    Another thread's call waits until the running generator is finished or closed, or its thread has ended. A call in
    the thread that left a stream unfinished cannot wait for itself: it closes that stream, whose next() then raises
    DflashError. A call from inside a step (a processor, a callback) can do neither: it is refused with ConfigError.
    """

    def __init__(self, inside: Callable[[], bool] = lambda: False) -> None:
        """inside: whether the caller is in the middle of something that this turn would wait for."""
        self._inside = inside
        self._free = threading.Condition()
        self._owner: threading.Thread | None = None
        self._current: Generator[object, None, None] | _Call | None = None

    def run(self, inner: Generator[T, None, None]) -> Generator[T, None, None]:
        """Yield from `inner` while holding the turn; it is taken at the first next() and given back at the end."""
        self._take(inner)
        try:
            while True:
                if self._current is not inner:
                    raise DflashError(
                        "this stream was cut off: a later call on the same model began before it ended"
                    )
                self._owner = threading.current_thread()
                try:
                    item = next(inner)
                except StopIteration:
                    return
                yield item
        finally:
            inner.close()
            self._give_back(inner)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """The turn for one call that streams nothing."""
        call = _Call()
        self._take(call)
        try:
            yield
        finally:
            self._give_back(call)

    def _take(self, mine: Generator[object, None, None] | _Call) -> None:
        me = threading.current_thread()
        if self._inside():
            raise ConfigError("this call came from inside a step on the same model; make it after the step")
        with self._free:
            while (current := self._current) is not None and self._owner is not None:
                if self._owner is me and getattr(current, "gi_running", False):
                    raise ConfigError(
                        "this call came from inside a step on the same model; make it after the step"
                    )
                if self._owner is me or not self._owner.is_alive():
                    self._current = None
                    current.close()
                else:
                    self._free.wait(_POLL_S)
            self._current, self._owner = mine, me

    def _give_back(self, mine: Generator[object, None, None] | _Call) -> None:
        with self._free:
            if self._current is mine:
                self._current = None
                self._free.notify()


class _Call:
    """Holds a turn as a generator does that is never suspended."""

    gi_running = True

    def close(self) -> None:
        """Nothing is left to be closed when its thread has ended."""
