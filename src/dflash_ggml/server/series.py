"""Several jobs of one request: each is queued when the one before it has ended, so that other clients come between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator
from typing import Any

from .errors import ApiError
from .worker import Job, Worker

FULL_SECONDS = 0.2  # between two tries to queue the next job where the queue is full

Work = Callable[[Any, Callable[[], bool]], Iterator[Any]]


class Series:
    """Seen from outside one job, whose events are those of all. The first is queued at once; raises ApiError as submit does."""

    def __init__(self, worker: Worker[Any], client: Hashable, works: Iterable[Work]) -> None:
        self.client = client
        self._worker = worker
        self._works = iter(works)
        self._gone = False
        first = next(self._works, None)
        self._job: Job[Any] | None = None if first is None else worker.submit(client, first)

    def cancel(self) -> None:
        """Nobody reads any more: end the job that runs or waits, and queue no other."""
        self._gone = True
        if self._job is not None:
            self._worker.abandon(self._job)

    async def events(self) -> AsyncIterator[Any]:
        """The events of all jobs in order; raises ApiError if one failed or was cancelled with a reason."""
        while self._job is not None:
            async for event in self._job.events():
                yield event
            work = next(self._works, None)
            if work is None or self._gone:
                return
            self._job = await self._queued(work)

    async def _queued(self, work: Work) -> Job[Any]:
        while True:
            try:
                return self._worker.submit(self.client, work)
            except ApiError as error:
                if error.code not in ("queue_full", "client_queue_full"):
                    raise
                # what has been begun is not given up for those who came later
                await asyncio.sleep(FULL_SECONDS)
