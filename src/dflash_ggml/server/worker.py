"""Worker threads: one loads the engine, runs requests and frees it; with several slots, more threads run requests, one per
slot.

A runner that can be lost (`watch`, for an engine in another process) is reopened; until then no request waits.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from typing import Any, Generic, TypeVar

from .errors import ApiError, EngineLost, from_exception, shutting_down
from .fairqueue import ClientFull, FairQueue, QueueClosed, QueueFull
from .runner import Progress

log = logging.getLogger(__name__)
B = TypeVar("B")


class _End:
    """Last entry of a job's event queue: how the job ended."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Job(Generic[B]):
    """One request: `work(runner, cancelled)` yields events in a worker thread, `batches()` receives them.

    Created in the reading event loop, which is woken once for all unread events.
    """

    def __init__(self, client: Hashable, work: Callable[[B, Callable[[], bool]], Iterator[Any]]) -> None:
        self.client = client
        self.work = work
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._waiting: list[Any] = []  # unread events
        self._arrived = asyncio.Event()  # the first of them
        self._cancelled = threading.Event()
        self.reason: ApiError | None = None

    @property
    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        return self._cancelled.is_set()

    def cancel(self, reason: ApiError | None = None) -> None:
        """Cancel the job at its next step; its reader gets `reason` (None: it has no reader)."""
        if not self._cancelled.is_set():
            self.reason = reason
            self._cancelled.set()

    def emit(self, event: Any) -> None:
        """Pass an event to the reader; called in a worker thread."""
        with self._lock:
            self._waiting.append(event)
            is_first = len(self._waiting) == 1
        try:
            if is_first:
                self._loop.call_soon_threadsafe(self._arrived.set)
        except RuntimeError:  # the reader's event loop is closed
            self.cancel()

    async def batches(self) -> AsyncIterator[list[Any]]:
        """The events in order, in batches of those available, until the job ends.

        Raises:
            ApiError: It failed or was cancelled with a reason.
        """
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            with self._lock:
                batch, self._waiting = self._waiting, []
            end = batch.pop() if batch and isinstance(batch[-1], _End) else None
            if batch:
                yield batch
            if end is not None:
                if end.error is not None:
                    raise from_exception(end.error) from end.error
                return


class Worker(Generic[B]):
    """Runs queued jobs, as many at once as the runner has slots; calls `open_runner(progress)` first, its `close()` last.

    on_finished gets the seconds of every job; on_failed is called if the runner cannot be opened.
    """

    def __init__(
        self, open_runner: Callable[[Progress], B], *, queue_limit: int = 256, client_limit: int | None = None
    ) -> None:
        self._open = open_runner
        self._queue_limits = queue_limit, client_limit
        self._queue: FairQueue[Job[B]] = FairQueue(queue_limit, client_limit)
        self.on_finished: Callable[[float], None] = lambda seconds: None
        self.on_failed: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._main, name="dflash-inference", daemon=True)
        self._ready = threading.Event()
        self._draining = False
        self._current: list[Job[B]] = []
        self._seconds = 1.0  # moving mean of a job's duration, for Retry-After
        self._lock = threading.Lock()
        self.runner: B | None = None
        self.failure: BaseException | None = None
        self.loading: tuple[str, int, int] = ("start", 0, 0)

    def start(self) -> None:
        """Start the thread, which loads the model."""
        self._thread.start()

    def wait_ready(self, timeout: float | None = None) -> bool:
        """Wait until the runner is open; re-raises a failure to open it."""
        done = self._ready.wait(timeout)
        if self.failure is not None:
            raise self.failure
        return done

    @property
    def ready(self) -> bool:
        """Whether requests are accepted."""
        return self.runner is not None and not self._draining

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Running requests."""
        return len(self._current)

    @property
    def slots(self) -> int:
        """Most concurrent requests."""
        return getattr(self.runner, "parallel", 1)

    @property
    def load(self) -> dict[str, float]:
        """Totals of `Runner.load`; empty with a single slot."""
        runner: Any = self.runner
        try:
            return dict(runner.load()) if runner is not None and self.slots > 1 else {}
        except EngineLost:
            return {}

    def retry_after(self) -> int:
        """Estimated seconds until a place in the queue is free: waiting jobs times their mean duration, by slots."""
        return max(1, min(60, math.ceil(self._seconds * (self.waiting + self.running) / self.slots)))

    def require_ready(self) -> B:
        """The open runner.

        Raises:
            ApiError: 503 while it is loading or shutting down.
        """
        if self.failure is not None:
            raise ApiError(503, f"the model could not be loaded: {self.failure}", code="model_failed")
        if self._draining:
            raise shutting_down()
        if self.runner is None:
            stage, done, total = self.loading
            share = f" ({stage}, {100 * done // total}%)" if total else f" ({stage})"
            raise ApiError(503, f"the model is loading{share}", code="loading", retry_after=2, retry=True)
        return self.runner

    def submit(self, client: Hashable, work: Callable[[B, Callable[[], bool]], Iterator[Any]]) -> Job[B]:
        """Queue a job.

        Raises:
            ApiError: 503 with Retry-After when full, loading or shutting down, 429 for the client's limit.
        """
        self.require_ready()
        job = Job(client, work)
        try:
            self._queue.put(client, job)
        except QueueFull as error:
            status, code = (
                (429, "client_queue_full") if isinstance(error, ClientFull) else (503, "queue_full")
            )
            raise ApiError(
                status, f"{error}; try again later", code=code, retry_after=self.retry_after(), retry=True
            ) from None
        except QueueClosed:
            self.require_ready()
            raise shutting_down() from None
        return job

    def abandon(self, job: Job[B]) -> None:
        """Drop a job without reader: remove it from the queue, or cancel it at its next step."""
        job.cancel()
        self._queue.remove(job.client, job)

    def drain(self) -> None:
        """Accept no more jobs, refuse waiting ones, and let running ones continue. Thread-safe."""
        self._draining = True
        gone = shutting_down()
        for job in self._queue.close():
            job.cancel(gone)
            job.emit(_End(gone))

    def cancel_running(self) -> None:
        """Cancel running jobs at their next step, with an error for their readers."""
        for job in list(self._current):
            job.cancel(shutting_down())

    def stop(self, timeout: float = 30.0) -> bool:
        """Drain, cancel running jobs, and close the runner; True if the threads end within `timeout` seconds."""
        self.drain()
        self.cancel_running()
        abort = getattr(self._open, "abort", None)
        if abort is not None:
            abort()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _main(self) -> None:
        try:
            while not self._draining and (runner := self._opened()) is not None:
                queue = self._queue
                self.runner = runner
                watch = getattr(runner, "watch", None)
                if watch is not None:
                    watch(self._on_lost)
                if self._ready.is_set():
                    log.warning("ready again")
                self._ready.set()
                others = [
                    threading.Thread(
                        target=self._serve, args=(queue, runner), name=f"dflash-request-{i}", daemon=True
                    )
                    for i in range(1, self.slots)
                ]
                try:
                    for thread in others:
                        thread.start()
                    self._serve(queue, runner)
                finally:
                    self.runner = None
                    for thread in others:
                        thread.join()
                    close = getattr(runner, "close", None)
                    if close is not None:
                        close()
        finally:
            self._ready.set()

    def _opened(self) -> B | None:
        try:
            return self._open(self._on_progress)
        except BaseException as error:  # noqa: BLE001 - reported to every caller
            if isinstance(error, EngineLost) and self._draining:  # closed intentionally
                return None
            log.error("could not start: %s", error)
            self.failure = error
            self._queue.close()
            self.on_failed()
            return None

    def _serve(self, queue: FairQueue[Job[B]], runner: B) -> None:
        while (job := queue.get()) is not None:
            self._current.append(job)
            try:
                self._run(job, runner)
            finally:
                self._current.remove(job)
            del job  # an idle thread must not keep the last request's buffers alive

    def _on_lost(self, how: str) -> None:
        """The runner was lost: refuse waiting jobs. Running jobs fail by themselves."""
        log.error("%s%s", how, "" if self._draining else "; it is started again")
        self.loading = ("restart", 0, 0)
        self.runner = None
        lost, self._queue = self._queue, FairQueue(*self._queue_limits)
        if self._draining:
            self._queue.close()
        gone = ApiError(503, f"{how}; it is started again", code="loading", retry_after=2, retry=True)
        for job in lost.close():
            job.cancel(gone)
            job.emit(_End(gone))

    def _on_progress(self, stage: str, done: int, total: int) -> None:
        self.loading = (stage, done, total)

    def _run(self, job: Job[B], runner: B) -> None:
        started = time.monotonic()
        error: BaseException | None = None
        events: Iterator[Any] = iter(())
        try:
            events = job.work(runner, lambda: job.cancelled)
            # a cancelled job ends within one step, after counting its usage
            for event in events:
                if not job.cancelled:
                    job.emit(event)
        except Exception as caught:
            error = caught
            if from_exception(caught).status >= 500 and not isinstance(caught, EngineLost):
                log.exception("a request failed")
        finally:
            close = getattr(events, "close", None)
            if close is not None:
                close()
        job.emit(_End(error or job.reason))
        seconds = time.monotonic() - started
        self._seconds += 0.2 * (seconds - self._seconds)
        self.on_finished(seconds)
