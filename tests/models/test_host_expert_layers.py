"""Tests of experts in host memory: the layer's output is bitwise that with experts on the device. 2 seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from test_experts import KINDS, QWEN, arrays, packed, run, sources

from dflash_ggml.ggml.bindings import ffi
from dflash_ggml.ggml.device import F32, Device
from dflash_ggml.ggml.graph import Graph
from dflash_ggml.ggml.store import Workspace
from dflash_ggml.ggml.weights import Source, Weights
from dflash_ggml.models import experts as layer
from dflash_ggml.models.experts import Experts, expert_block, mixture
from reference.deferred import defer, part_memory


@pytest.fixture(scope="module")
def alone() -> Iterator[Device]:
    device = Device.cpu(1, reference=True)
    yield device
    device.close()


@pytest.fixture
def pair() -> Iterator[Device]:
    device = Device.cpu(1, reference=True)
    device.join(Device.cpu(1, reference=True), is_host=True)
    yield device
    device.close()


def run_kept(device: Device, experts: Experts, w: dict[str, Source], x: np.ndarray) -> tuple[np.ndarray, int]:
    """What the layer gives, and how often the host computed."""
    assert device.host is not None
    weights = Weights(device, w, on_host=[n for n in w if expert_block(n) is not None]).fill()
    workspace, g, parts = Workspace(device), Graph(device, 256), []
    g.output(mixture(g, weights, "blk.0.", g.input("x", F32, *x.shape[::-1]), experts), "out")
    g.place(workspace)
    g.inputs["x"].array[...] = x.reshape(g.inputs["x"].array.shape)
    compute = device.host.compute
    device.host.compute = lambda part: parts.append(part) or compute(part)  # type: ignore[method-assign]
    g.run()
    out = device.read(g.outputs["out"]).reshape(x.shape)
    for thing in (g, workspace, weights):
        thing.close()
    return out, len(parts)


@pytest.mark.parametrize("columns", [1, 9])
@pytest.mark.parametrize("joined", [False, True], ids=["separate", "joined"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_host_computes_the_same_bits(alone, pair, kind: str, joined: bool, columns: int) -> None:
    experts = KINDS[kind]
    w = sources(arrays(experts, joined))
    x = np.random.default_rng(1).standard_normal((columns, experts.n_embd)).astype(np.float32)
    found, parts = run_kept(pair, experts, w, x)
    assert parts == 1
    np.testing.assert_array_equal(found, run(alone, experts, w, x))


@pytest.mark.parametrize("experts", [QWEN, KINDS["chosen, clamped"]], ids=["scales", "biases"])
@pytest.mark.parametrize("joined", [False, True], ids=["separate", "joined"])
def test_for_many_columns_the_matrices_are_copied(
    alone, pair, monkeypatch, joined: bool, experts: Experts
) -> None:
    monkeypatch.setattr(layer, "COPY_COLUMNS", 8)
    w = arrays(experts, joined)
    for part in ("gate_up", "down") if joined else ("gate", "up", "down"):
        w[f"blk.0.ffn_{part}_exps.scale"] = np.linspace(0.5, 2, experts.n_experts, dtype=np.float32)
    for columns, host_parts in ((7, 1), (8, 0)):
        x = np.random.default_rng(columns).standard_normal((columns, experts.n_embd)).astype(np.float32)
        found, parts = run_kept(pair, experts, sources(w), x)
        assert parts == host_parts
        np.testing.assert_array_equal(found, run(alone, experts, sources(w), x))


@pytest.mark.parametrize("copied", [False, True], ids=["sent", "copied"])
def test_nothing_is_read_before_it_is_there(alone, monkeypatch, copied: bool) -> None:
    """On a device that computes as late as it may, with its shared expert behind what the host waits for."""
    monkeypatch.setattr(layer, "COPY_COLUMNS", 1 if copied else 100)
    device = defer(monkeypatch)
    w, x = sources(arrays(QWEN)), np.random.default_rng(2).standard_normal((9, 64)).astype(np.float32)
    weights = Weights(device, w, on_host=[n for n in w if expert_block(n) is not None]).fill()
    workspace, g = Workspace(device), Graph(device, 512)
    y = g.input("x", F32, 64, 9)
    for _ in range(3):
        y = mixture(g, weights, "blk.0.", y, QWEN)
    g.output(y, "out")
    part_memory(device, g)
    g.place(workspace)
    g.inputs["x"].array[...] = x
    for _ in range(2):
        g.run()
    device.synchronize()
    found = device.read(g.outputs["out"]).reshape(x.shape)
    for thing in (g, workspace, weights, device):
        thing.close()
    for _ in range(3):
        x = run(alone, QWEN, w, x)
    np.testing.assert_array_equal(found, x)


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0], ids=lambda kind: kind.name)
def test_rows_of_any_length_are_copied(alone, pair, monkeypatch, kind: Type) -> None:
    """Rows of 96 quantised values, beyond which a GPU reads. It clears nothing behind a view, so none is copied."""
    monkeypatch.setattr(layer, "COPY_COLUMNS", 1)
    to_device, views = Graph.to_device, []

    def copy(g: Graph, t, like=None):
        twin = to_device(g, t, like)
        views.append(twin.view_src != ffi.NULL)
        return twin

    monkeypatch.setattr(Graph, "to_device", copy)
    experts = replace(QWEN, n_ff=96)
    w = packed(arrays(experts), kind)
    x = np.random.default_rng(0).standard_normal((2, experts.n_embd)).astype(np.float32)
    found, parts = run_kept(pair, experts, w, x)
    assert parts == 0 and views == [False] * 3
    np.testing.assert_array_equal(found, run(alone, experts, w, x))
