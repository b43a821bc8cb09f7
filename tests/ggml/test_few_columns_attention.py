"""Attention of few columns over a float32 cache (patch 28) against float64, and of a column alone against it among others."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_ggml.ggml.device import F16, F32, I32, Device
from dflash_ggml.ggml.graph import Graph
from dflash_ggml.ggml.store import Workspace


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("heads, kv_heads", [(9, 3), (4, 2), (5, 5)])
@pytest.mark.parametrize("n", [2, 8, 21, 63])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_columns_see_what_the_mask_shows(
    n: int, heads: int, kv_heads: int, threads: int, has_sinks: bool
) -> None:
    d, n_kv, scale = 48, 256, 0.2
    rng = np.random.default_rng(n)
    q = rng.normal(size=(heads, n, d)).astype(np.float32)
    k, v = rng.normal(size=(2, kv_heads, n_kv, d)).astype(np.float32)
    shown = rng.random((n, n_kv)) < 0.3
    shown[:, :70] = True
    shown[:, 200:] = shown[0] = (
        False  # whole tiles of rows are hidden, and all but one row from the first column
    )
    shown[0, 131] = True
    k[:, 200:], v[:, 200:] = 1e30, -1e30
    sinks = rng.uniform(-2, 6, heads).astype(np.float32)
    sinks[:2] = 300, -300  # one beside which all scores vanish
    device = Device.cpu(threads)
    workspace, g = Workspace(device), Graph(device, 32)
    shapes = {"q": (F32, q), "k": (F32, k), "v": (F32, v)} | ({"sinks": (F32, sinks)} if has_sinks else {})
    tensors = {name: g.input(name, kind, *x.shape[::-1]) for name, (kind, x) in shapes.items()}
    mask = g.input("mask", F16, n_kv, n)
    y = g.attention(tensors["q"], tensors["k"], tensors["v"], mask, scale, sinks=tensors.get("sinks"))
    g.output(y, "y")
    g.place(workspace)
    for name, (_, x) in shapes.items():
        g.inputs[name].array[...] = x.reshape(g.inputs[name].array.shape)
    hidden = np.where(shown, 0, -np.inf).astype(np.float16)
    g.inputs["mask"].array[...] = hidden.reshape(g.inputs["mask"].array.shape)
    g.run()
    found = device.read(g.outputs["y"]).reshape(n, heads, d)
    for head in range(heads):
        one = head * kv_heads // heads
        scores = q[head].astype(np.float64) @ k[one].astype(np.float64).T * scale
        scores = np.where(shown, scores, -np.inf)
        sink = float(sinks[head]) if has_sinks else -np.inf
        top = np.maximum(scores.max(1, keepdims=True), sink)
        weight = np.exp(scores - top)
        exact = (weight / (weight.sum(1, keepdims=True) + np.exp(sink - top))) @ v[one].astype(np.float64)
        np.testing.assert_allclose(found[:, head], exact, rtol=1e-4, atol=1e-5)
    for thing in (g, workspace, device):
        thing.close()


def attention(device: Device, q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Of a plain pass's single column, whose rows are a range, or of a tree's, whose rows a mask shows; [n, heads, d]."""
    heads, n, d = q.shape
    workspace, g = Workspace(device), Graph(device, 32)
    values = {"q": q, "k": k, "v": v}
    tensors = {name: g.input(name, F32, *x.shape[::-1]) for name, x in values.items()}
    if n == 1:
        ranges = g.input("ranges", I32, n, 2)
        y = g.range_attention(*tensors.values(), ranges, d**-0.5)
    else:
        mask = g.input("mask", F16, k.shape[1], n)
        y = g.attention(*tensors.values(), mask, d**-0.5)
    g.output(y, "y")
    g.place(workspace)
    for name, x in values.items():
        g.inputs[name].array[...] = x.reshape(g.inputs[name].array.shape)
    if n == 1:
        g.inputs["ranges"].array.reshape(2, n)[...] = [[0], [seen.sum()]]
    else:
        g.inputs["mask"].array[...] = np.where(seen, 0, -np.inf).reshape(g.inputs["mask"].array.shape)
    g.run()
    found = device.read(g.outputs["y"]).reshape(n, heads, d)
    g.close()
    workspace.close()
    return found


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("heads, kv_heads", [(9, 3), (4, 2), (5, 5)])
@pytest.mark.parametrize("n_kv", [40, 64, 700])
def test_a_column_alone_has_the_bits_that_it_has_among_others(
    n_kv: int, heads: int, kv_heads: int, threads: int
) -> None:
    """So a chain gives the tokens of plain decoding, where matmuls do not depend on the width of a pass either."""
    d, n = 64, 6
    rng = np.random.default_rng(n_kv)
    q = rng.normal(size=(heads, n, d)).astype(np.float32)
    k, v = rng.normal(size=(2, kv_heads, 768, d)).astype(np.float32)
    seen = np.arange(768) < n_kv - n + 1 + np.arange(n)[:, None]
    device = Device.cpu(threads)
    together = attention(device, q, k, v, seen)
    for column in range(n):
        alone = attention(device, q[:, [column]], k, v, seen[[column]])
        np.testing.assert_array_equal(alone[0], together[column])
    device.close()
