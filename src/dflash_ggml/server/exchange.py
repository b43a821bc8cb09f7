"""One generating request from queue to response: streamed or whole, cancelled when the client disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import anyio
from sse_starlette import EventSourceResponse
from sse_starlette.sse import SendTimeoutError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ..errors import DflashError
from .dialect import ApiCall
from .embeddings import EmbeddingCall
from .errors import ApiError, from_exception
from .notes import HEADER
from .series import Series

log = logging.getLogger(__name__)

# seconds that a stream's status line waits for the first event, so that early failures get a status
HEAD_SECONDS = 5.0
PING_SECONDS = 10.0  # interval of comment lines that keep idle streams open through proxies
NEVER_SECONDS = 1e9
SHUTDOWN_SECONDS = 2.0  # seconds between the end of draining and closing connections
CLIENT_GONE = 499


class _JobStream(EventSourceResponse):
    """A stream that always ends its job: when read to the end, disconnected, or never started."""

    def __init__(self, job: Series, drain_seconds: float, **options: Any) -> None:
        # After SIGTERM running answers continue; the worker cancels them in time, and that error is sent too.
        grace = drain_seconds + SHUTDOWN_SECONDS
        super().__init__(shutdown_event=anyio.Event(), shutdown_grace_period=grace, **options)
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            log.warning("a client stopped reading its stream; its request was cancelled")
        finally:
            self._job.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _first_of(request: Request, task: asyncio.Task[Any], seconds: float | None) -> bool:
    """Wait for `task`, at most `seconds`; False if the client disconnects first."""
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return task.done() or not gone.done()
    finally:
        gone.cancel()
        with suppress(asyncio.CancelledError):
            await gone


async def respond(
    request: Request, call: ApiCall | EmbeddingCall, job: Series, *, drain_seconds: float, send_seconds: float
) -> Response:
    """The response to a queued job.

    Raises:
        ApiError: The job failed before anything was sent.
    """
    notes = call.notes.header
    headers = {HEADER: notes} if notes else {}
    batches = job.batches()
    if isinstance(call, EmbeddingCall) or not call.stream:
        return await _whole(request, call, job, batches, headers)
    head = asyncio.ensure_future(anext(batches))
    try:
        present = await _first_of(request, head, HEAD_SECONDS)
        if head.done() and head.exception() is not None:
            raise from_exception(head.exception() or AssertionError())
    except BaseException:
        job.cancel()
        head.cancel()
        raise
    if not present:
        job.cancel()
        head.cancel()
        return Response(status_code=CLIENT_GONE)
    return _JobStream(
        job,
        drain_seconds,
        content=_encoded(call, head, batches),
        headers=headers,
        media_type="application/x-ndjson" if call.lines else "text/event-stream",
        # a comment would be no JSON line
        ping=NEVER_SECONDS if call.lines else PING_SECONDS,
        sep="\n",
        send_timeout=send_seconds,
    )


async def _encoded(
    call: ApiCall, head: asyncio.Task[list[Any]], batches: AsyncIterator[list[Any]]
) -> AsyncIterator[bytes]:
    """The encoded stream of a job whose first events are `head`; events available at once are sent in one piece."""
    encoder, parts = call.encoder, list[bytes]()
    try:
        batch = await head
        while True:
            for event in batch:
                parts += encoder.feed(event)
            if parts:
                yield b"".join(parts)
                parts = []
            batch = await anext(batches)
    except StopAsyncIteration:
        return
    except (ApiError, DflashError) as error:
        parts += encoder.error(from_exception(error))
        yield b"".join(parts)
    finally:
        head.cancel()


async def _whole(
    request: Request,
    call: ApiCall | EmbeddingCall,
    job: Series,
    batches: AsyncIterator[list[Any]],
    headers: dict[str, str],
) -> Response:
    async def collect() -> None:
        async for batch in batches:
            for event in batch:
                for _ in call.encoder.feed(event):
                    pass

    task = asyncio.ensure_future(collect())
    try:
        if not await _first_of(request, task, None):
            return Response(status_code=CLIENT_GONE)
        await task
        return JSONResponse(call.encoder.body(), headers=headers)
    finally:
        job.cancel()
        task.cancel()
