"""Tests of pinned host memory that devices copy to."""

from __future__ import annotations

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
