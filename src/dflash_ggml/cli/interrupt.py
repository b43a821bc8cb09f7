"""Ctrl-C handling: stop between two steps, or immediately if pressed again."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import NoReturn

from .writer import PLAIN


def leave() -> NoReturn:
    """End the process at once with exit code 130, and reset the terminal's dimmed text."""
    if os.isatty(1):
        os.write(1, PLAIN.encode() + b"\n")
    os._exit(130)


class Interrupt:
    """While open, the first SIGINT sets `asked` and the second ends the process with exit code 130.

    Python calls signal handlers between bytecodes, so not before the current pass ends. The second signal must not wait for
    that: a thread reads the pipe to which the interpreter writes each signal at once. Main thread only; ValueError
    elsewhere.

    Args:
        on_first, on_second: Called in that thread for each of the two signals, the second before the process ends.
    """

    def __init__(
        self, on_first: Callable[[], None] = lambda: None, on_second: Callable[[], None] = lambda: None
    ) -> None:
        self.asked = False
        self._on_first, self._on_second = on_first, on_second

    def __enter__(self) -> Interrupt:
        self._handler = signal.signal(signal.SIGINT, lambda signum, frame: None)
        self._pipe, into = os.pipe()
        os.set_blocking(into, False)
        self._into = into
        self._wakeup = signal.set_wakeup_fd(into)
        self._thread = threading.Thread(target=self._watch, name="interrupt", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        signal.signal(signal.SIGINT, self._handler)
        os.close(self._into)  # which ends the thread
        self._thread.join()
        os.close(self._pipe)

    def _watch(self) -> None:
        while byte := os.read(self._pipe, 1):
            if byte[0] == signal.SIGINT:
                if self.asked:
                    self._on_second()
                    leave()
                self.asked = True
                self._on_first()
