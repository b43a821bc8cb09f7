"""Tests of host memory that devices copy to."""

from __future__ import annotations

import threading

import pytest

from dflash_ggml.ggml import device
from dflash_ggml.ggml.device import Buffers


def test_host_memory_is_used_again_once_nothing_refers_to_it():
    buffers = Buffers()
    first = buffers.take(64)
    first[:] = 7
    where, view = first.ctypes.data, first[8:16]
    del first
    other = buffers.take(64)
    assert other.ctypes.data != where and view.tolist() == [7] * 8
    del view
    assert buffers.take(64).ctypes.data == where
    assert buffers.take(32).nbytes == 32


def touched() -> None:
    """Wait for the threads that touch buffers."""
    for thread in threading.enumerate():
        if thread.name == "dflash-buffers":
            thread.join()


def test_buffers_are_touched_ahead_as_far_as_memory_goes() -> None:
    buffers = Buffers()
    buffers.warm({64: 3, 5000: 9}, 64 * 3 + 5000 * 2 + 4999)
    touched()
    assert buffers.free_nbytes == 64 * 3 + 5000 * 2
    held = [buffers.take(5000) for _ in range(2)]
    assert buffers.free_nbytes == 64 * 3
    buffers.warm({5000: 2}, 64 + 10_000)  # the other size goes, as far as it must
    touched()
    assert buffers.free_nbytes == 64 + 10_000
    del held
    assert buffers.keep({64: 5}, 5200) == {64: 5}
    assert buffers.free_nbytes == 64, "no other buffer fits beside five of these"
    buffers.keep({}, 0)
    assert buffers.free_nbytes == 0
    buffers.warm({64: 3}, -1)
    touched()
    assert buffers.free_nbytes == 0


def test_no_buffer_is_added_once_they_are_not_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers, began, go_on = Buffers(), threading.Event(), threading.Event()

    class Waiting:
        def __setitem__(self, *_: object) -> None:
            began.set()
            assert go_on.wait(60)

    with monkeypatch.context() as patch:
        patch.setattr(device.np, "empty", lambda *_: Waiting())
        buffers.warm({64: 2}, 1000)
        assert began.wait(60)
        buffers.keep({64: 2}, 1000)
        go_on.set()
        touched()
    assert buffers.free_nbytes == 0


def test_a_lack_of_memory_ends_the_touching(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise MemoryError

    buffers = Buffers()
    with monkeypatch.context() as patch:
        patch.setattr(device.np, "empty", none)
        buffers.warm({64: 2}, 1000)
        touched()
    assert buffers.free_nbytes == 0
    buffers.warm({64: 1}, 1000)
    touched()
    assert buffers.free_nbytes == 64, "later calls start again"
