"""Attention of few columns over a float32 cache (patch 28) against float64; what a mask hides may be anything finite."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_ggml.ggml.device import F16, F32, Device
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
