"""Reading and parsing of requests in threads, a few at a time, with a bounded number of bytes.

Threads suffice (docs/decisions/0006): tokenising in pieces and compiling a grammar release the interpreter's lock, a
template is Python that yields every switch interval, and the rest (parsing and checking one body) is bounded by
`limits`.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import anyio
from starlette.requests import ClientDisconnect, Request

from .encodings import check_encoding, decoded, too_large
from .errors import ApiError, bad_request, shutting_down
from .limits import Limits

T = TypeVar("T")

THREADS = 2 if (os.cpu_count() or 1) > 2 else 1  # each delays the event loop by a switch interval
LARGE = 1 << 20  # bytes of a body from which freed memory is returned to the system


class Intake:
    """Threads and byte accounting of one server. `read`, `release` and `end_reads` are for the event loop."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._pool = ThreadPoolExecutor(THREADS, "dflash-intake")
        self.held = 0  # bytes of unanswered requests' bodies
        self._reads = set[anyio.CancelScope]()  # tasks reading a body
        self._is_ending = False

    async def run(self, call: Callable[[], T]) -> T:
        """Run `call` in one of the threads, in order of the calls."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    async def read(self, request: Request) -> bytes:
        """Read a request's body, and decode a compressed one; it counts as held until `release(request)`.

        Raises:
            ApiError: 413 (too large, even if only declared), 503 (too many bytes held, or the server stops before the body is
                complete), 408 (timeout), 415 (unknown compression), 400 (the client disconnected).
        """
        limits, chunks = self._limits, list[bytes]()
        encoding = request.headers.get("content-encoding", "").strip().lower()
        check_encoding(encoding)
        size, announced = 0, request.headers.get("content-length", "")
        if announced.isdigit() and int(announced) > limits.body_bytes:
            raise too_large(limits.body_bytes)
        with anyio.move_on_after(limits.body_seconds) as reading:
            self._reads.add(reading)
            if self._is_ending:
                reading.cancel()
            try:
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > limits.body_bytes:
                        raise too_large(limits.body_bytes)
                    self._hold(request, len(chunk))
                    chunks.append(chunk)
            except ClientDisconnect:
                raise bad_request("the connection ended before the whole body was sent") from None
            finally:
                self._reads.remove(reading)
        if reading.cancelled_caught and self._is_ending:
            raise shutting_down()
        if reading.cancelled_caught:
            message = f"the body did not arrive within {limits.body_seconds:g} s"
            raise ApiError(408, message, code="body_timeout")
        body = b"".join(chunks)
        if encoding:
            body = await self.run(lambda: decoded(body, encoding, limits.body_bytes))
            self._hold(request, len(body) - size)
        return body

    def end_reads(self) -> int:
        """Refuse incomplete bodies, now and in future; returns how many there were."""
        self._is_ending = True
        for reading in self._reads:
            reading.cancel()
        return len(self._reads)

    def release(self, request: Request) -> None:
        """Release a request's bytes, once it is answered or has failed."""
        n = getattr(request.state, "held", 0)
        request.state.held = 0
        self.held -= n
        if n >= LARGE and self.held < LARGE:
            self._pool.submit(_trim)

    def close(self) -> None:
        """End the threads; waiting calls are dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _hold(self, request: Request, n: int) -> None:
        if self.held + n > self._limits.held_bytes:
            raise ApiError(
                503,
                f"the requests at hand hold {self._limits.held_bytes} bytes already; try again later",
                code="too_many_bytes",
                retry_after=1,
                retry=True,
            )
        self.held += n
        request.state.held = getattr(request.state, "held", 0) + n


def _trim() -> None:
    """Return freed memory to the system, which glibc would keep."""
    trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
