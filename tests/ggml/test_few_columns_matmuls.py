"""Tests of matmuls with few columns on a GPU: non-finite inputs, replays, minima of any size. Skipped elsewhere."""

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


BLOCKS = {  # bytes of a 256-block, and where its FP16 scales are
    Type.Q4_K: (144, [0, 2]),
    Type.Q5_K: (176, [0, 2]),
    Type.Q6_K: (210, [208]),
    Type.IQ4_XS: (136, [0]),
    Type.Q8_0: (272, list(range(0, 272, 34))),
}


def random_blocks(rng: np.random.Generator, kind: Type, rows: int, k: int) -> np.ndarray:
    """Blocks of random bytes with finite scales, [rows, k/256, bytes of a block]."""
    size, scales = BLOCKS[kind]
    data = rng.integers(0, 256, (rows, k // 256, size), dtype=np.uint8)
    for at in scales:
        d = rng.uniform(1e-4, 1e-3, (rows, k // 256, 1)).astype(np.float16)
        data[..., at : at + 2] = d.view(np.uint8)
    return data


def product(x: np.ndarray, data: np.ndarray, kind: Type) -> np.ndarray:
    """The matmul in float64: x [n, k], the weights' blocks as above."""
    return x.astype(np.float64) @ dequantize(data.reshape(len(data), -1), kind).astype(np.float64).T


class Matmul:
    """A matmul of its own graph: weights [rows, k], input [n, k]."""

    def __init__(self, gpu: Device, kind: Type, data: np.ndarray, n: int) -> None:
        self.gpu, self.rows, self.n = gpu, data.shape[0], n
        k = 256 * data.shape[1]
        self.weights = Weights(gpu, {"w": Source(kind.value, (k, self.rows), data.reshape(-1))}).fill()
        self.graph, self.workspace = Graph(gpu, 16), Workspace(gpu)
        self.graph.output(self.graph.mul_mat(self.weights["w"], self.graph.input("x", F32, k, n)), "y")
        self.graph.place(self.workspace)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        self.graph.inputs["x"].array.reshape(x.shape)[...] = x
        self.graph.run()
        return self.gpu.read(self.graph.outputs["y"]).reshape(self.n, self.rows).copy()

    def close(self) -> None:
        self.graph.close()
        self.workspace.close()
        self.weights.close()


@pytest.mark.parametrize("n", [2, 8, 16, 24, 32, 64])
@pytest.mark.parametrize(
    "odd", [0x7FC00000, 0xFFFFFFFF, 0x7F800000, 0xFF800000], ids=["NaN", "all bits", "inf", "-inf"]
)
def test_non_finite_values_stay_in_their_column(gpu: Device, n: int, odd: int) -> None:
    """Blocks mark a partial sum as missing with the bits of a NaN; no input may produce these bits, or the kernel would hang."""
    rows, k = 200, 5120
    rng = np.random.default_rng(n)
    data = quantize(0.02 * rng.standard_normal((rows, k)).astype(np.float32), Type.Q8_0)
    data = data.view(np.uint8).reshape(rows, k // 256, -1)
    x = rng.standard_normal((n, k)).astype(np.float32)
    strange = x.copy()
    strange[1].view(np.uint32)[::7] = odd
    matmul = Matmul(gpu, Type.Q8_0, data, n)
    found = [matmul(given) for given in (x, strange, x, strange, x)]
    matmul.close()

    others = np.arange(n) != 1
    assert nmse(found[0], product(x, data, Type.Q8_0)) < 1e-4
    for y in found[1:]:
        np.testing.assert_array_equal(y[others], found[0][others])
    np.testing.assert_array_equal(found[4], found[0])


@pytest.mark.parametrize("n", [16, 24, 32, 48, 64])
@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_replays_give_the_same_bits(gpu: Device, kind: Type, n: int) -> None:
    """Blocks whose warps do not wait for each other read the activations of their step, never those of the next."""
    rows, k = 34816, 5120  # smaller matrices showed such a fault in few launches
    rng = np.random.default_rng(n)
    data = random_blocks(rng, kind, rows, k)
    x = rng.standard_normal((n, k)).astype(np.float32)
    matmul = Matmul(gpu, kind, data, n)
    first = matmul(x)
    wrong = sum(not np.array_equal(matmul(x).view(np.uint32), first.view(np.uint32)) for _ in range(150))
    matmul.close()
    some = slice(None, None, 64)
    exact = product(x, data[some], kind)
    assert nmse(first[:, some], exact) < 1e-6
    assert wrong == 0


@pytest.mark.parametrize("n", [8, 24, 32, 64])
@pytest.mark.parametrize("kind", [Type.Q4_K, Type.Q5_K], ids=lambda kind: kind.name)
def test_minima_of_any_size(gpu: Device, kind: Type, n: int) -> None:
    """Some kernels divide the minima of a block by its scale, which may be zero, or as small as FP16 has numbers."""
    pairs = [
        (1e-3, 0),
        (1e-3, -1e-2),
        (-1e-3, 1e-2),
        (0, 1e-2),
        (0, 0),
        (6e-8, 1e-2),
        (6e-8, 1),
        (6e-8, 6e4),
        (1, 6e-8),
    ]
    cases = np.array(pairs, np.float16)  # d, dmin of a row
    rows, k = 64 * len(cases), 512
    rng = np.random.default_rng(n)
    data = random_blocks(rng, kind, rows, k)
    scales = np.tile(cases, (64, 1))
    data[..., :4] = scales.view(np.uint8).reshape(rows, 1, 4)
    x = rng.standard_normal((n, k)).astype(np.float32)
    matmul = Matmul(gpu, kind, data, n)
    found = matmul(x)
    matmul.close()
    exact = product(x, data, kind)
    for i, case in enumerate(cases):
        if not case.any():
            np.testing.assert_array_equal(found[:, i :: len(cases)], 0)
        else:
            assert nmse(found[:, i :: len(cases)], exact[:, i :: len(cases)]) < 1e-6, case
