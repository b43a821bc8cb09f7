"""Matmuls with interleaved rows of weights (patch 27): right, and with the same bits at any width.

Inputs are multiples of a power of two, so that their quantisation to 8 bits loses nothing; the reference is float64.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize

from dflash_ggml.ggml.device import F32, Device, cpu_features
from dflash_ggml.ggml.graph import Graph
from dflash_ggml.ggml.store import Workspace
from dflash_ggml.ggml.weights import Source, Weights, has_matmul_layout

KINDS = {Type.Q4_1: 4, Type.Q8_0: 2}  # bytes of scales before the quants of a block
WIDTHS = (37, 17, 16, 9, 8, 7, 6, 5, 4, 3, 2, 1)


@pytest.fixture(params=[1, 3])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    with_threads = Device.cpu(request.param)
    last = with_threads.matmul_buffer_types()[-1:]  # that of AMX comes before it
    monkeypatch.setattr(with_threads, "matmul_buffer_types", lambda: last)
    yield with_threads
    with_threads.close()


def blocks(kind: Type, rows: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Any quants, the least one too, and scales of both signs."""
    scales = KINDS[kind]
    size = scales + (16 if kind == Type.Q4_1 else 32)
    data = rng.integers(0, 256, (rows, k // 32, size)).astype(np.uint8)
    values = rng.normal(0, 0.05, (rows, k // 32, scales // 2)).astype(np.float16)
    data[..., :scales] = values.view(np.uint8)
    return data.reshape(rows, -1)


def columns(n: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Blocks of whole numbers up to 127, which each block has, times a power of two; one of zeros alone."""
    x = rng.integers(-60, 61, (n, k // 32, 32)).astype(np.float32)
    x[:, :, 5] = 127
    x *= 2.0 ** rng.integers(-9, 3, (n, k // 32, 1))
    x[0, 0] = 0
    return x.reshape(n, k)


def multiply(device: Device, weights: Weights, x: np.ndarray) -> np.ndarray:
    workspace, g = Workspace(device), Graph(device, 16)
    g.output(g.mul_mat(weights["w"], g.input("x", F32, *x.shape[::-1])), "y")
    g.place(workspace)
    g.inputs["x"].array[...] = x.reshape(g.inputs["x"].array.shape)
    g.run()
    found = device.read(g.outputs["y"]).reshape(*x.shape[:-1], -1)
    g.close()
    workspace.close()
    return found


@pytest.mark.parametrize("shape", [(576, 48), (96, 208), (64, 40)], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_matmuls_of_every_width(device: Device, kind: Type, shape: tuple[int, int]) -> None:
    k, rows = shape
    rng = np.random.default_rng(k + rows)
    data, x = blocks(kind, rows, k, rng), columns(WIDTHS[0], k, rng)
    source = Source(kind.value, shape, data.reshape(-1))
    is_repacked = has_matmul_layout(device, source)
    if {"AVX2", "FMA", "F16C", "REPACK"} <= set(cpu_features()):
        assert is_repacked == (rows % 16 == 0)
    weights = Weights(device, {"w": source}).fill()
    matrix = dequantize(data, kind).astype(np.float64)
    exact, size = x.astype(np.float64) @ matrix.T, np.abs(x).astype(np.float64) @ np.abs(matrix.T)
    widest = multiply(device, weights, x)
    for width in WIDTHS:
        found = multiply(device, weights, x[:width])
        assert (np.abs(found - exact[:width]) <= 2e-6 * size[:width] + 1e-30).all()
        if is_repacked:
            np.testing.assert_array_equal(found, widest[:width])
    weights.close()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_several_matrices_of_columns(device: Device, kind: Type) -> None:
    rng = np.random.default_rng(1)
    data, x = blocks(kind, 32, 128, rng), columns(15, 128, rng)
    weights = Weights(device, {"w": Source(kind.value, (128, 32), data.reshape(-1))}).fill()
    together = multiply(device, weights, x)
    np.testing.assert_allclose(
        multiply(device, weights, x.reshape(3, 5, 128)).reshape(15, 32), together, rtol=1e-5, atol=1e-4
    )
    weights.close()
