"""One generation at a time on one engine: whoever comes second waits, or replaces a stream that nobody is reading."""

from __future__ import annotations

import threading
from collections.abc import Generator
from typing import TypeVar

from ..errors import DflashError

T = TypeVar("T")


class Turns:
    """Serialises generators that share an engine.

    Another thread's call waits until the running generator is finished or closed. A call in the thread that left a
    stream unfinished cannot wait for itself: it closes that stream, whose next() then raises DflashError.
    """

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._owner: int | None = None
        self._current: Generator[object, None, None] | None = None

    def run(self, inner: Generator[T, None, None]) -> Generator[T, None, None]:
        """Yield from `inner` while holding the turn; it is taken at the first next() and given back at the end."""
        self._take(inner)
        try:
            while True:
                if self._current is not inner:
                    raise DflashError(
                        "this stream was cut off: a later call on the same model began before it ended"
                    )
                self._owner = threading.get_ident()
                try:
                    item = next(inner)
                except StopIteration:
                    return
                yield item
        finally:
            self._give_back(inner)

    def _take(self, inner: Generator[T, None, None]) -> None:
        with self._free:
            if self._current is not None and self._owner == threading.get_ident():
                abandoned, self._current = self._current, None
                abandoned.close()
            while self._current is not None:
                self._free.wait()
            self._current, self._owner = inner, threading.get_ident()

    def _give_back(self, inner: Generator[T, None, None]) -> None:
        inner.close()
        with self._free:
            if self._current is inner:
                self._current = None
                self._free.notify()
