"""Several jobs of one request: each is queued when the previous one has ended, so that other clients get their share; earlier if
slots are free and no other request is waiting."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator
from typing import Any

from .errors import ApiError
from .worker import Job, Worker

FULL_SECONDS = 0.2  # interval of attempts to queue the next job if the queue is full

Work = Callable[[Any, Callable[[], bool]], Iterator[Any]]


class Series:
    """Behaves like one job with the events of all, in order. The first is queued at once.

    Raises:
        ApiError: As submit does.
    """

    def __init__(self, worker: Worker[Any], client: Hashable, works: Iterable[Work]) -> None:
        self.client = client
        self._worker = worker
        self._works = deque(works)
        self._gone = False
        self._jobs: deque[Job[Any]] = deque()  # the current job, and those queued ahead
        if self._works:
            self._jobs.append(worker.submit(client, self._works.popleft()))

    def cancel(self) -> None:
        """Cancel running and waiting jobs, and queue no others."""
        self._gone = True
        for job in self._jobs:
            self._worker.abandon(job)

    async def batches(self) -> AsyncIterator[list[Any]]:
        """The events of all jobs in order, in batches of those available.

        Raises:
            ApiError: One failed or was cancelled with a reason.
        """
        try:
            while self._jobs:
                self._queue_ahead()
                async for batch in self._jobs[0].batches():
                    yield batch
                    self._queue_ahead()
                self._jobs.popleft()
                if self._gone:
                    return
                if not self._jobs and self._works:
                    self._jobs.append(await self._queued(self._works.popleft()))
        finally:
            for job in self._jobs:
                self._worker.abandon(job)

    def _queue_ahead(self) -> None:
        """Queue another job if it would run at once without delaying other requests."""
        worker = self._worker
        if self._works and not self._gone and not worker.waiting and worker.running < worker.slots:
            try:
                self._jobs.append(worker.submit(self.client, self._works[0]))
            except ApiError:  # try again later
                return
            self._works.popleft()

    async def _queued(self, work: Work) -> Job[Any]:
        while True:
            try:
                return self._worker.submit(self.client, work)
            except ApiError as error:
                if error.code not in ("queue_full", "client_queue_full"):
                    raise
                # a request in progress takes precedence over later ones
                await asyncio.sleep(FULL_SECONDS)
