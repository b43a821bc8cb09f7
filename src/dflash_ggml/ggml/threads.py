"""Number of compute threads on a machine that others use too.

A graph goes from barrier to barrier, and ggml's threads spin there: where one of them waits for a core, all others wait for it,
some hundred times a pass. The system tells how long each thread was ready to run and had no core: next to nothing where each
has its own. Only those that compute are asked: what loads files or writes answers beside them waits while they poll, and says
nothing of others. Timing passes instead would need to know what they take alone. Involuntary context switches, which are
cheaper to ask for, count a polite background process like a greedy one; barriers that sleep (both tried, bench/notes-cpu.md)
cost half the speed of an idle machine or help little.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from threading import get_native_id

from .bindings import ffi, lib

WINDOW = 0.1  # seconds of computing that are judged at once
IDLE = 0.5  # seconds without computing; what this process's other threads waited for then says nothing
CROWDED = 0.2  # seconds that all threads together waited for cores, per second, from which on the cores are taken to be shared
# seconds of computing without crowding before one more thread is tried; after failures longer
PATIENCE = 1.0, 30.0
_TASKS = "/proc/self/task"
_POLL = 2  # how long a thread polls for the next graph before it sleeps, in 131,072 pauses: about 10 ms on a Xeon; ggml: 50


def tasks() -> frozenset[str]:
    """The threads of this process, as the system numbers them; none where it does not tell."""
    try:
        return frozenset(os.listdir(_TASKS))
    except OSError:  # another system, or no file can be opened
        return frozenset()


def waited(threads: Iterable[str]) -> float:
    """Seconds that these threads were ready to run and had no core, so far; 0 where the system does not tell."""
    total = 0
    for thread in threads:
        try:
            with open(f"{_TASKS}/{thread}/schedstat") as file:
                total += int(file.read().split()[1])
        except (OSError, IndexError, ValueError):  # it has just ended, or nothing is kept
            continue
    return total * 1e-9


class ThreadCount:
    """The number of threads for the next pass, between 1 and `most`; pure bookkeeping."""

    def __init__(self, most: int) -> None:
        self.most = self.now = most
        self._calm = 0.0
        self._patience = PATIENCE[0]
        self._trying = False
        self._step = 1

    def judge(self, seconds: float, waited: float) -> int:
        """After so many seconds of computing, in which threads waited so long for cores: how many go on.

        One fewer where it is crowded, for of many cores others mostly want one; twice as many each time that it
        still is, up to a quarter; one more after a calm time, which grows when that was too many.
        """
        trying, self._trying = self._trying, False
        if waited > CROWDED * seconds:
            if trying:
                self._patience = min(2 * self._patience, PATIENCE[1])
            self.now = max(1, self.now - min(self._step, max(1, self.now // 4)))
            self._step *= 2
            self._calm = 0.0
            return self.now
        self._step = 1
        if trying:
            self._patience = PATIENCE[0]
        self._calm += seconds
        if self.now < self.most and self._calm >= self._patience:
            self.now, self._calm, self._trying = self.now + 1, 0.0, True
        return self.now


class Pool:
    """ggml's threads of one CPU backend; the thread that computes is one of them."""

    def __init__(self, backend, n_threads: int) -> None:
        self._backend, self._pool, self.n_threads = backend, ffi.NULL, 0
        self._workers: frozenset[str] = frozenset()
        self._process = os.getpid()
        self.resize(n_threads)

    def in_this_process(self) -> None:
        """Have threads: a forked child has inherited the pool, but only the thread that forked."""
        if self._process == os.getpid():
            return
        self._process = os.getpid()
        # ending threads that are not there would wait for ever
        n, self._pool, self.n_threads = self.n_threads, ffi.NULL, 0
        self.resize(n)

    def resize(self, n_threads: int) -> None:
        """Another number of threads from the next graph on."""
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
        """Seconds that its threads, and the one that asks, were ready to run and had no core, so far."""
        return waited([str(get_native_id()), *self._workers])

    def close(self) -> None:
        """End the threads; the backend must be gone."""
        if self._pool != ffi.NULL and self._process == os.getpid():
            lib.ggml_threadpool_free(self._pool)
        self._pool = ffi.NULL
