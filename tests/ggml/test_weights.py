"""Tests of loading weights to a device."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_ggml.errors import ModelFileError
from dflash_ggml.ggml.bindings import lib
from dflash_ggml.ggml.device import BF16, F16, F32, Device, list_devices
from dflash_ggml.ggml.graph import Graph
from dflash_ggml.ggml.store import Workspace
from dflash_ggml.ggml.weights import Source, Weights, bf16_as_f16

Q8_0 = lib.GGML_TYPE_Q8_0


def bf16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def test_bf16_becomes_float16():
    values = np.array([0.5, -3.0, 1024.0, 0.0], np.float32)
    out = bf16_as_f16("w", Source(BF16, (4,), bf16(values)))
    assert out.type == F16 and np.array_equal(np.frombuffer(out.data, np.float16).astype(np.float32), values)


def test_bf16_beyond_float16_is_refused():
    with pytest.raises(ModelFileError, match="tensor w"):
        bf16_as_f16("w", Source(BF16, (1,), bf16(np.array([1e30], np.float32))))


def test_other_types_pass_through():
    s = Source(F32, (1,), np.zeros(4, np.uint8))
    assert bf16_as_f16("w", s) is s


@pytest.mark.parametrize("aligned", [True, False])
def test_mapped_and_copied_tensors_read_the_same(aligned):
    """Matmuls are right whether ggml uses the file's bytes in place or, misaligned, a copy."""
    device = Device.cpu(1)
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(5, 64)).astype(np.float32)
    room = np.zeros(matrix.nbytes + 64, np.uint8)
    at = -room.ctypes.data % 32 + (0 if aligned else 4)
    room[at : at + matrix.nbytes] = matrix.view(np.uint8).reshape(-1)
    weights = Weights(device, {"w": Source(F32, (64, 5), room[at : at + matrix.nbytes])})
    wanted = weights.wanted
    assert weights.fill().nbytes == wanted
    g = Graph(device, 16)
    x = g.input("x", F32, 64)
    y = g.output(g.mul_mat(weights["w"], x))
    workspace = Workspace(device)
    g.place(workspace)
    vector = rng.normal(size=64).astype(np.float32)
    g.inputs["x"].array[:] = vector
    g.run()
    np.testing.assert_allclose(device.read(y), matrix @ vector, rtol=1e-5, atol=1e-5)
    for thing in (g, workspace, weights, device):
        thing.close()


@pytest.mark.parametrize("blocks", [1, 2, 8])
@pytest.mark.parametrize("columns", [1, 2, 3, 5, 8, 9, 12, 13, 16, 23, 32, 189])
def test_rows_of_few_blocks_multiply_right(blocks: int, columns: int):
    """Results land where other values lay before, as they do in memory that graphs share."""
    device = Device.cpu(1)
    rng = np.random.default_rng(0)
    k, rows = 32 * blocks, 64
    quants = rng.integers(-127, 128, (rows, blocks, 32)).astype(np.int8)
    scales = rng.uniform(0.01, 0.02, (rows, blocks, 1)).astype(np.float16)
    data = np.concatenate([scales.view(np.int8), quants], 2).reshape(-1).view(np.uint8)
    weights = Weights(device, {"w": Source(Q8_0, (k, rows), np.ascontiguousarray(data))}).fill()
    g = Graph(device, 16)
    x = g.input("x", F32, k, columns)
    y = g.output(g.mul_mat(weights["w"], x))
    workspace = Workspace(device)
    g.place(workspace)
    device.write(y, np.full((columns, rows), 1e30, np.float32))
    values = rng.normal(size=(columns, k)).astype(np.float32)
    g.inputs["x"].array[:] = values
    g.run()
    expected = values @ (quants * scales.astype(np.float32)).reshape(rows, k).T
    np.testing.assert_allclose(
        device.read(y).reshape(columns, rows), expected, atol=0.02 * np.abs(expected).max()
    )
    for thing in (g, workspace, weights, device):
        thing.close()


def test_a_device_is_found():
    assert any(not d.is_gpu for d in list_devices())
