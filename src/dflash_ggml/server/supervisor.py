"""Supervisor of the engine process (`--supervise`): starts the process, and restarts it after a crash."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import cast

from ..errors import DflashError
from .errors import EngineLost
from .remote_runner import Channel, RemoteRunner
from .runner import Progress, Runner

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Supervised:
    """Opens runners in separate processes, which call `opener`: a dataclass of plain data.

    Attributes:
        tries: Consecutive processes that may die while loading.
        first_wait, longest_wait: Seconds before the next start, doubled each time until a process has lived for
            `settled` seconds.
    """

    opener: object
    tries: int = 4
    first_wait: float = 0.5
    longest_wait: float = 15.0
    settled: float = 60.0
    _deaths: int = 0  # consecutive short-lived processes
    _opened_at: float | None = None  # None: none has been opened yet
    _loading: Channel | None = None
    _ended: threading.Event = field(default_factory=threading.Event)

    def __call__(self, progress: Progress) -> Runner:
        """Open a runner in a new process.

        Raises:
            EngineLost: `tries` consecutive processes died while loading.
            Exception: The exception of loading, the first time.
        """
        if self._opened_at is not None:
            self._wait(self._opened_at)
        for tried in range(1, self.tries + 1):
            began = time.monotonic()
            try:
                runner = self._started(progress)
            except (DflashError, OSError) as error:
                known = not isinstance(error, EngineLost) and self._opened_at is None
                if known or self._ended.is_set() or tried == self.tries:
                    raise
                log.warning("%s; trying again (%d of %d)", error, tried + 1, self.tries)
                progress("restart", tried, self.tries)
                self._wait(began)
            else:
                self._opened_at = time.monotonic()
                return runner
        raise AssertionError("unreachable")

    def abort(self) -> None:
        """Stop opening: end a loading process, and interrupt a wait."""
        self._ended.set()
        loading = self._loading
        if loading is not None:
            loading.kill()

    def _wait(self, began: float) -> None:
        self._deaths = 1 if time.monotonic() - began > self.settled else self._deaths + 1
        self._ended.wait(min(self.longest_wait, self.first_wait * 2 ** (self._deaths - 1)))

    def _started(self, progress: Progress) -> Runner:
        self._loading = channel = Channel()
        try:
            if self._ended.is_set():
                raise EngineLost("the server is shutting down")
            return cast(Runner, RemoteRunner(channel, channel.open(self.opener, progress)))
        except BaseException:
            channel.close(0)
            raise
        finally:
            self._loading = None
