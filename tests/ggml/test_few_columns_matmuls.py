"""Tests of matmuls with few columns on a GPU: non-finite inputs, and replays. Skipped elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize

from dflash_ggml.ggml.device import F32, Device, list_devices
from dflash_ggml.ggml.graph import Graph
from dflash_ggml.ggml.store import Workspace
from dflash_ggml.ggml.weights import Source, Weights
from reference.e4m3 import nmse

GPUS = [d for d in list_devices() if d.is_gpu]
pytestmark = pytest.mark.skipif(not GPUS, reason="no GPU in this build or machine")


@pytest.fixture(scope="module")
def gpu() -> Iterator[Device]:
    device = Device(GPUS[0])
    yield device
    device.close()


@pytest.mark.parametrize("n", [2, 8, 16, 24, 32, 64])
@pytest.mark.parametrize(
    "odd", [0x7FC00000, 0xFFFFFFFF, 0x7F800000, 0xFF800000], ids=["NaN", "all bits", "inf", "-inf"]
)
def test_non_finite_values_stay_in_their_column(gpu: Device, n: int, odd: int) -> None:
    """Blocks mark a partial sum as missing with the bits of a NaN; no input may produce these bits, or the kernel would hang."""
    rows, k = 200, 5120
    rng = np.random.default_rng(n)
    data = quantize(0.02 * rng.standard_normal((rows, k)).astype(np.float32), Type.Q8_0)
    x = rng.standard_normal((n, k)).astype(np.float32)
    weights = Weights(gpu, {"w": Source(Type.Q8_0.value, (k, rows), data.view(np.uint8).reshape(-1))}).fill()
    g, workspace = Graph(gpu, 16), Workspace(gpu)
    g.output(g.mul_mat(weights["w"], g.input("x", F32, k, n)), "y")
    g.place(workspace)
    given = g.inputs["x"].array.reshape(n, k)
    found = []
    for value in [None, odd, None, odd, None]:
        given[...] = x
        if value is not None:
            given[1].view(np.uint32)[::7] = value
        g.run()
        found.append(gpu.read(g.outputs["y"]).reshape(n, rows).copy())
    g.close()
    for thing in (workspace, weights):
        thing.close()

    others = np.arange(n) != 1
    assert nmse(found[0], x.astype(np.float64) @ dequantize(data, Type.Q8_0).astype(np.float64).T) < 1e-4
    for y in found[1:]:
        np.testing.assert_array_equal(y[others], found[0][others])
    np.testing.assert_array_equal(found[4], found[0])
