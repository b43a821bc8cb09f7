"""Tests of matmuls in 8-bit floats on a GPU that has them, against their rounding in numpy. Skipped elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from dflash_ggml.engine.kernel_tuning import FP8_COLUMNS
from dflash_ggml.ggml.device import F32, Device, list_devices
from dflash_ggml.ggml.graph import Graph
from dflash_ggml.ggml.store import Workspace
from dflash_ggml.ggml.weights import Source, Weights
from reference.e4m3 import nmse, rounded

GPUS = [d for d in list_devices() if d.is_gpu]
pytestmark = pytest.mark.skipif(not GPUS, reason="no GPU in this build or machine")


@pytest.fixture(scope="module")
def gpu() -> Iterator[Device]:
    device = Device(GPUS[0])
    if not device.has_fp8_matmuls:
        device.close()
        pytest.skip("no kernels for 8-bit floats here")
    yield device
    device.close()


def multiply(
    gpu: Device, kind: Type, matrix: NDArray[np.float32], x: NDArray[np.float32], n_allowed: int = 1
) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """The product on the device, twice by the same graph, and the dequantised matrix."""
    rows, k = matrix.shape
    data = quantize(matrix, kind)
    weights = Weights(gpu, {"w": Source(kind.value, (k, rows), data.view(np.uint8).reshape(-1))}).fill()
    g, workspace = Graph(gpu, 16), Workspace(gpu)
    g.output(g.mul_mat(weights["w"], g.input("x", F32, k, len(x))), "y")
    assert g.allow_fp8(list(weights.values())) == n_allowed
    g.place(workspace)
    g.inputs["x"].array[...] = x.reshape(g.inputs["x"].array.shape)
    for _ in range(4):  # the last ones replay a CUDA graph
        g.run()
        found = gpu.read(g.outputs["y"]).reshape(len(x), rows)
    g.close()
    for thing in (workspace, weights):
        thing.close()
    return found, dequantize(data, kind).astype(np.float64)


def normal(rows: int, k: int, n: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    rng = np.random.default_rng(rows)
    return (
        0.02 * rng.standard_normal((rows, k)).astype(np.float32),
        rng.standard_normal((n, k)).astype(np.float32),
    )


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0, Type.Q5_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("shape", [(2048, 2048), (512, 17408), (256, 36864), (4112, 1088)], ids=str)
def test_a_product_is_that_of_the_rounded_operands(gpu: Device, kind: Type, shape: tuple[int, int]) -> None:
    matrix, x = normal(*shape, FP8_COLUMNS + 3)
    found, w = multiply(gpu, kind, matrix, x)
    columns = x.astype(np.float64)
    emulated = rounded(columns) @ rounded(w.astype(np.float16).astype(np.float64)).T
    of_rounding, of_sums = nmse(found, columns @ w.T), nmse(found, emulated)
    print(f"{kind.name} {shape}: NMSE {of_rounding:.2e}, beside the rounding {of_sums:.2e}")
    assert 8e-4 < of_rounding < 2e-3, "below that it was not rounded to 8 bits"
    assert of_sums < 5e-5


def test_few_columns_are_not_rounded(gpu: Device) -> None:
    matrix, x = normal(2048, 2048, FP8_COLUMNS - 1)
    found, w = multiply(gpu, Type.Q8_0, matrix, x)
    assert nmse(found, x.astype(np.float64) @ w.T) < 1e-5


@pytest.mark.parametrize("factor", [1e-20, 1e6, 1e30])
def test_any_scale_will_do(gpu: Device, factor: float) -> None:
    matrix, x = normal(2048, 2048, FP8_COLUMNS)
    x *= np.float32(factor)
    found, w = multiply(gpu, Type.Q8_0, matrix, x)
    assert nmse(found / factor, (x / factor).astype(np.float64) @ w.T) < 2e-3


@pytest.mark.parametrize(
    ("value", "holds"),
    [
        (0.0, lambda y: (y == 0).all()),
        (np.nan, lambda y: np.isnan(y).all()),
        (np.inf, lambda y: np.isnan(y).all()),
    ],
    ids=["zeros", "NaN", "infinity"],
)
def test_a_column_of_zeros_or_of_no_numbers_is_alone(
    gpu: Device, value: float, holds: Callable[[NDArray[np.float32]], bool]
) -> None:
    matrix, x = normal(2048, 2048, FP8_COLUMNS)
    if value == 0.0:
        x[7] = 0
    else:
        x[7, 1000] = value
    found, w = multiply(gpu, Type.Q8_0, matrix, x)
    assert holds(found[7])
    others = np.delete(np.arange(len(x)), 7)
    assert nmse(found[others], x[others].astype(np.float64) @ w.T) < 2e-3
