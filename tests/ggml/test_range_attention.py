"""Attention over ranges with sinks on the CPU against float64: the ways that its columns and types of K and V take."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_ggml.ggml.device import F16, F32, I32, Device
from dflash_ggml.ggml.graph import Graph
from dflash_ggml.ggml.store import Workspace
from reference import tree_ops as ref

N_KV = 1280


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("type_", [F32, F16])
@pytest.mark.parametrize("n", [1, 2, 5, 90])
@pytest.mark.parametrize("window", [None, 128, 700])
def test_a_sink_counts_once(n: int, window: int | None, type_: int, threads: int) -> None:
    """One column over 512 rows and more of float16 is shared out among threads."""
    d, heads, kv_heads = 48, 6, 2
    rng = np.random.default_rng([n, window or 0])
    q = rng.normal(0, 2, (heads, n, d)).astype(np.float32)
    k, v = rng.normal(size=(2, kv_heads, N_KV, d)).astype(np.float16).astype(np.float32)
    sinks = rng.uniform(-2, 6, heads).astype(np.float32)
    sinks[:2] = 300, -300  # one beside which all scores vanish
    end = N_KV - 100 - n + 1 + np.arange(n)
    first = np.maximum(end - window, 0) if window else 0 * end
    if n > 2:
        first[2] = end[2]  # sees nothing
    device = Device.cpu(threads)
    workspace, g = Workspace(device), Graph(device, 32)
    kinds = {"q": (F32, q), "k": (type_, k), "v": (type_, v), "sinks": (F32, sinks)}
    tensors = {name: g.input(name, kind, *x.shape[::-1]) for name, (kind, x) in kinds.items()}
    y = g.range_attention(
        *(tensors[name] for name in "qkv"), g.input("ranges", I32, n, 2), 0.3, tensors["sinks"]
    )
    g.output(y, "y")
    g.place(workspace)
    for name, (_, x) in kinds.items():
        g.inputs[name].array[...] = x.reshape(g.inputs[name].array.shape)
    g.inputs["ranges"].array[...] = np.stack([first, end]).reshape(g.inputs["ranges"].array.shape)
    g.run()
    found = device.read(g.outputs["y"]).reshape(n, heads, d)
    k, v = (x.transpose(1, 0, 2) for x in (k, v))
    exact = ref.range_attention(q.transpose(1, 0, 2), k, v, np.stack([first, end]), 0.3, sinks)
    assert (found[first == end] == 0).all()
    # rows one by one over float16 are summed in float16
    error = 1e-5 if type_ == F32 or n == 90 else 1e-2
    np.testing.assert_allclose(found, exact, atol=error * np.abs(exact).max())
    for thing in (g, workspace, device):
        thing.close()
