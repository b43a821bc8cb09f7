"""Tests of K/V caches of layers with several row lengths: rows read back as written, unused rows cost nothing, a commit moves
all parts."""

from __future__ import annotations

import os

import numpy as np
import pytest

from dflash_ggml.errors import ConfigError, DeviceError
from dflash_ggml.ggml.device import F16, F32, Device
from dflash_ggml.ggml.store import Workspace
from dflash_ggml.state.kv import KvCache, kv_bucket
from dflash_ggml.state.kv_type import KvType
from dflash_ggml.state.spec import Conv, Delta, KvLayer, Recurrent, StateSpec
from dflash_ggml.state.state import TargetState, commit_graph

LAYERS = (KvLayer(2, 8), KvLayer(4, 8, window=64), KvLayer(2, 8), KvLayer(1, 48))


@pytest.fixture()
def device():
    with_one_thread = Device.cpu(1)
    yield with_one_thread
    with_one_thread.close()


@pytest.mark.parametrize("type_", [F16, F32])
def test_layers_of_several_shapes(device, type_):
    kv_type = KvType(type_, type_)
    cache = KvCache(device, LAYERS, kv_type, 512)
    rng = np.random.default_rng(0)
    dtype = np.float16 if type_ == F16 else np.float32
    written = []
    for i, layer in enumerate(LAYERS):
        for t in (cache.layer(i).keys, cache.layer(i).values):
            assert tuple(t.ne)[:2] == (layer.row, 512)
            assert not device.read(t).any()
            written.append(rng.normal(size=(512, layer.row)).astype(dtype))
            device.write(t, written[-1])
    for t, rows in zip(cache.slices, written, strict=True):
        assert np.array_equal(device.read(t, rows.size).reshape(rows.shape), rows)
    assert cache.nbytes == StateSpec(LAYERS).kv_bytes(512, kv_type)
    cache.close()


def test_unwritten_rows_take_no_memory(device):
    """And read as zeros: attention multiplies them with weights of zero."""
    before = resident()
    cache = KvCache(device, (KvLayer(8, 128),) * 4, KvType(F16, F16), 1 << 17)
    assert cache.nbytes == 2 << 30
    for t in cache.slices:
        device.write(t, np.ones((256, 1024), np.float16))
        assert not device.read(t, 1 << 20, offset=t.nb[1] * 100_000).any()
    taken = resident() - before
    assert 4 << 20 <= taken < 64 << 20  # of 2 GiB, what was written and the pages around it
    cache.close()
    assert resident() - before < 4 << 20


def resident() -> int:
    """Bytes of this process that lie in memory."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_rows_that_no_machine_has_are_refused(device):
    with pytest.raises(DeviceError, match="no room for"):
        KvCache(device, LAYERS, KvType(F16, F16), 1 << 50)


def test_a_commit_moves_the_rows_of_every_layer(device):
    """A model without recurrent layers, with rows of three lengths."""
    state = TargetState(device, StateSpec(LAYERS), KvType(F32, F32), 256, 8, 0)
    rng = np.random.default_rng(1)
    slices = [t for _, cache in state.caches for t in cache.slices]
    assert len(slices) == 2 * len(LAYERS)
    before = [rng.normal(size=(256, t.ne[0])).astype(np.float32) for t in slices]
    for t, rows in zip(slices, before):
        device.write(t, rows)
    g = commit_graph(device, state, 4, 4).place(Workspace(device))
    for prefix, cache in state.caches:
        g.inputs[f"{prefix}to"].array[:] = range(100, 104)
        for i in range(len(cache.wholes)):
            g.inputs[f"{prefix}from{i}"].array[:] = 100, 102, 105, 103
    g.run()
    for t, rows in zip(slices, before):
        after = device.read(t).reshape(rows.shape)
        assert np.array_equal(after[100:104], rows[[100, 102, 105, 103]])
        assert np.array_equal(np.delete(after, range(100, 104), 0), np.delete(rows, range(100, 104), 0))
    g.close()
    state.close()


def test_indices_count_each_kind_of_layer():
    """Layers of one window are a kind: they share a ring."""
    recurrent = Recurrent(Conv(4, 64), Delta(16, 1, 2))
    spec = StateSpec((recurrent, LAYERS[0], recurrent, recurrent, LAYERS[1]))
    assert spec.kind_index == (0, 0, 1, 2, 0) and len(spec.kv) == 2 and len(spec.recurrent) == 3


def test_recurrent_layers_of_several_shapes_are_refused():
    shapes = (Recurrent(Conv(4, 64), Delta(16, 1, 2)), Recurrent(Conv(4, 64), Delta(16, 2, 2)))
    with pytest.raises(ConfigError, match="several shapes"):
        StateSpec(shapes)


def test_buckets_rise_and_hold():
    for rows in range(1, 20_000, 37):
        for on_gpu, least in ((False, 256), (True, 1024)):
            assert rows <= kv_bucket(rows, on_gpu) <= max(least, rows + rows // 4 + least)
