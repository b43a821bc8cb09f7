"""Tests of a job's events on their way from the worker's thread to the reader in the event loop."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the server extra is not installed")

from dflash_ggml.errors import ConfigError
from dflash_ggml.server.errors import ApiError
from dflash_ggml.server.exchange import _encoded
from dflash_ggml.server.worker import Job, _End


def emitted(job: Job[Any], events: list[Any]) -> None:
    """Emit these in another thread, to the end."""
    thread = threading.Thread(target=lambda: [job.emit(event) for event in events])
    thread.start()
    thread.join()


def test_waiting_events_are_delivered_in_one_wakeup(monkeypatch: pytest.MonkeyPatch) -> None:
    async def read() -> tuple[list[list[Any]], int]:
        loop, calls = asyncio.get_running_loop(), []
        wake = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *call: (calls.append(call), wake(*call)))
        job: Job[Any] = Job("me", lambda runner, cancelled: iter(()))
        batches, found = job.batches(), []
        emitted(job, [1, 2, 3])
        found.append(await anext(batches))
        emitted(job, [4])
        found.append(await anext(batches))
        emitted(job, [5, _End(None)])
        found += [batch async for batch in batches]
        return found, len(calls)

    assert asyncio.run(read()) == ([[1, 2, 3], [4], [5]], 3)


def test_an_error_comes_after_the_events_before_it() -> None:
    async def read() -> list[Any]:
        job: Job[Any] = Job("me", lambda runner, cancelled: iter(()))
        emitted(job, [1, 2, _End(ConfigError("no such thing"))])
        found: list[Any] = []
        with pytest.raises(ApiError, match="no such thing"):
            async for batch in job.batches():
                found += batch
        return found

    assert asyncio.run(read()) == [1, 2]


def test_what_could_be_encoded_is_sent_before_the_error() -> None:
    def feed(event: int) -> Any:
        if event == 3:
            raise ApiError(500, "three")
        yield b"%d;" % event

    async def read() -> list[bytes]:
        encoder = SimpleNamespace(feed=feed, error=lambda error: iter([b"error"]))
        job: Job[Any] = Job("me", lambda runner, cancelled: iter(()))
        batches = job.batches()
        emitted(job, [1, 2])
        head = asyncio.ensure_future(anext(batches))
        pieces = _encoded(SimpleNamespace(encoder=encoder), head, batches)  # type: ignore[arg-type]
        found = [await anext(pieces)]
        emitted(job, [4, 3, 5, _End(None)])
        return found + [piece async for piece in pieces]

    assert asyncio.run(read()) == [b"1;2;", b"4;error"]
