"""Tests of matmuls in the CPU's reference mode: a column's bits do not depend on the columns beside it.

Greedy decoding is compared token for token with a tree of any width on the strength of this.
"""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.quants import quantize

from dflash_ggml.ggml.device import F32, Device
from dflash_ggml.ggml.graph import Graph
from dflash_ggml.ggml.store import Workspace
from dflash_ggml.ggml.weights import Source, Weights

WIDTHS = range(1, 34)
TOLERANCE = {Type.F32: 1e-5, Type.F16: 1e-2, Type.Q8_0: 0.1}


@pytest.mark.parametrize("shape", [(96, 40), (1024, 64), (1024, 67)], ids=str)
@pytest.mark.parametrize("kind", TOLERANCE, ids=lambda kind: kind.name)
def test_a_column_does_not_depend_on_the_width(kind: Type, shape: tuple[int, int]) -> None:
    k, rows = shape
    rng = np.random.default_rng(k)
    matrix = rng.standard_normal((rows, k)).astype(np.float32)
    x = rng.standard_normal((len(WIDTHS), k)).astype(np.float32)
    device = Device.cpu(2, reference=True)
    data = quantize(matrix, kind).view(np.uint8).reshape(-1)
    weights = Weights(device, {"w": Source(kind.value, (k, rows), data)}).fill()
    workspace, found = Workspace(device), []
    for width in WIDTHS:
        g = Graph(device, 16)
        g.output(g.mul_mat(weights["w"], g.input("x", F32, k, width)), "y")
        g.place(workspace)
        g.inputs["x"].array[...] = x[:width].reshape(g.inputs["x"].array.shape)
        g.run()
        found.append(device.read(g.outputs["y"]).reshape(width, rows))
        g.close()
    for width, product in zip(WIDTHS, found, strict=True):
        np.testing.assert_array_equal(product, found[-1][:width])
    np.testing.assert_allclose(found[-1], x @ matrix.T, atol=TOLERANCE[kind] * np.sqrt(k))
    for thing in (workspace, weights, device):
        thing.close()
