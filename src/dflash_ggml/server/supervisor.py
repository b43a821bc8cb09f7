"""Starts the engine process, and starts it again: what opens a runner where the server was given `--supervise`."""

from __future__ import annotations

import logging
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

from ..errors import DflashError
from .engine_process import HELD_BACK
from .engine_side import Progress
from .errors import EngineLost
from .frames import Link
from .remote_runner import Channel, RemoteRunner

log = logging.getLogger(__name__)

# CUDA does not survive a fork, so it is a fresh interpreter; the path is ours, so that the current folder is not in it
_START = (
    "import sys; fd = int(sys.argv[1]); sys.path[:] = sys.argv[2:]; "
    "from dflash_ggml.server.engine_process import main; main(fd)"
)


@dataclass(slots=True)
class Supervised:
    """Opens runners in processes of their own, with `opener` called there; it must be picklable.

    tries: processes that may die in a row while they load. first_wait, longest_wait: seconds before the next start, doubled
    each time until a process has lived for `settled` seconds.
    """

    opener: object
    tries: int = 4
    first_wait: float = 0.5
    longest_wait: float = 15.0
    settled: float = 60.0
    _deaths: int = 0  # in a row, of processes that did not live long
    _opened_at: float | None = None  # None: none has been open yet
    _loading: Channel | None = None
    _ended: threading.Event = field(default_factory=threading.Event)

    def __call__(self, progress: Progress) -> RemoteRunner:
        """A runner on a fresh process. Raises EngineLost when `tries` of them died, or what loading raised the first time."""
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
        """Open no more: a process that is loading is ended, a wait cut short."""
        self._ended.set()
        loading = self._loading
        if loading is not None:
            loading.kill()

    def _wait(self, began: float) -> None:
        self._deaths = 1 if time.monotonic() - began > self.settled else self._deaths + 1
        self._ended.wait(min(self.longest_wait, self.first_wait * 2 ** (self._deaths - 1)))

    def _started(self, progress: Progress) -> RemoteRunner:
        self._loading = channel = self._spawned()
        try:
            if self._ended.is_set():
                raise EngineLost("the server is shutting down")
            runner = RemoteRunner(channel, channel.opened(progress))
        except BaseException:
            channel.close(0)
            raise
        finally:
            self._loading = None
        return runner

    def _spawned(self) -> Channel:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-c", _START, str(theirs.fileno()), *sys.path]
        # what a thread holds back, its children hold back from their first instruction on
        before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        link = Link(ours.detach())
        channel = Channel(process, link)
        with suppress(OSError):  # it has ended already: whoever waits for the model is told
            link.send_bytes(pickle.dumps((self.opener, logging.getLogger().getEffectiveLevel())))
        return channel
