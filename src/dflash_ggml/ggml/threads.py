"""Number of compute threads on a shared machine.

ggml's threads spin at barriers, some hundred times a pass: if one of them waits for a core, all others wait for it. The system
reports how long each thread was runnable without a core: almost zero if each has its own. Only compute threads are measured:
threads that load files or write answers wait while the former poll, which says nothing about other processes. Measuring pass
times instead would require a reference on an idle machine. Involuntary context switches are cheaper to read, but count a
low-priority process like any other; sleeping barriers (both tried, bench/notes-cpu.md) halve the speed of an idle machine or
help little.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from threading import get_native_id

from .bindings import ffi, lib

WINDOW = 0.1  # seconds of computing per decision
IDLE = 0.5  # seconds without computing after which a measurement is discarded
SHARED_FROM = 0.2  # total waiting seconds per second from which the cores count as shared
# seconds of computing without waiting before one more thread is tried; longer after failures
RETRY_AFTER_S = 1.0, 30.0
_TASKS = "/proc/self/task"
_POLL = 2  # polling for the next graph before sleeping, in 131,072 pauses: about 10 ms on a Xeon; ggml's default: 50


def tasks() -> frozenset[str]:
    """Thread ids of this process; empty if the system does not report them."""
    try:
        return frozenset(os.listdir(_TASKS))
    except OSError:  # another system, or no file can be opened
        return frozenset()


def waited(threads: Iterable[str]) -> float:
    """Seconds that these threads were runnable without a core; 0 if the system does not report it."""
    total = 0
    for thread in threads:
        try:
            with open(f"{_TASKS}/{thread}/schedstat") as file:
                total += int(file.read().split()[1])
        except (OSError, IndexError, ValueError):  # the thread has just ended, or there are no statistics
            continue
    return total * 1e-9


class ThreadCount:
    """The number of threads for the next pass, between 1 and `most`; pure bookkeeping."""

    def __init__(self, most: int) -> None:
        self.most = self.now = most
        self._unshared_s = 0.0
        self._wait_s = RETRY_AFTER_S[0]
        self._trying = False
        self._step = 1

    def judge(self, seconds: float, waited: float) -> int:
        """Decide the number of threads, given seconds of computing and of waiting for cores.

        One fewer if the cores are shared, since others mostly need one; then twice as many fewer each time, up to a quarter;
        one more after a time without waiting, which grows after failures.
        """
        trying, self._trying = self._trying, False
        if waited > SHARED_FROM * seconds:
            if trying:
                self._wait_s = min(2 * self._wait_s, RETRY_AFTER_S[1])
            self.now = max(1, self.now - min(self._step, max(1, self.now // 4)))
            self._step *= 2
            self._unshared_s = 0.0
            return self.now
        self._step = 1
        if trying:
            self._wait_s = RETRY_AFTER_S[0]
        self._unshared_s += seconds
        if self.now < self.most and self._unshared_s >= self._wait_s:
            self.now, self._unshared_s, self._trying = self.now + 1, 0.0, True
        return self.now


class Pool:
    """ggml's threads of one CPU backend; the thread that computes is one of them."""

    def __init__(self, backend, n_threads: int) -> None:
        self._backend, self._pool, self.n_threads = backend, ffi.NULL, 0
        self._workers: frozenset[str] = frozenset()
        self._process = os.getpid()
        self.resize(n_threads)

    def in_this_process(self) -> None:
        """Create the threads: a forked child inherits the pool, but only the forking thread."""
        if self._process == os.getpid():
            return
        self._process = os.getpid()
        # joining threads that do not exist would block forever
        n, self._pool, self.n_threads = self.n_threads, ffi.NULL, 0
        self.resize(n)

    def resize(self, n_threads: int) -> None:
        """Set the number of threads from the next graph on."""
        if n_threads == self.n_threads:
            return
        params = ffi.new("struct ggml_threadpool_params *", lib.ggml_threadpool_params_default(n_threads))
        params.poll = _POLL
        before = tasks()
        old, self._pool, self.n_threads = self._pool, lib.ggml_threadpool_new(params), n_threads
        self._workers = tasks() - before  # one started elsewhere in this moment does little harm
        lib.ggml_backend_cpu_set_n_threads(self._backend, n_threads)
        lib.ggml_backend_cpu_set_threadpool(self._backend, self._pool)
        if old != ffi.NULL:
            lib.ggml_threadpool_free(old)

    def waited(self) -> float:
        """Seconds that its threads, and the calling one, were runnable without a core."""
        return waited([str(get_native_id()), *self._workers])

    def close(self) -> None:
        """End the threads; the backend must be gone."""
        if self._pool != ffi.NULL and self._process == os.getpid():
            lib.ggml_threadpool_free(self._pool)
        self._pool = ffi.NULL
