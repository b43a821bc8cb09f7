"""Tests of the expert layer against numpy in float64, and of the order of its nodes, which the GPU's fusions match. 2
seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize

from dflash_ggml.ggml.bindings import ffi, lib
from dflash_ggml.ggml.device import F32, Device
from dflash_ggml.ggml.graph import Graph
from dflash_ggml.ggml.store import Workspace
from dflash_ggml.ggml.weights import Source, Weights
from dflash_ggml.models.experts import Experts, expert_block, mixture
from reference.expert_files import mixture as numpy_mixture
from reference.model_files import quantize

QWEN = Experts(n_embd=64, n_experts=12, n_used=3, n_ff=32, n_ff_shared=32)
LAGUNA = replace(QWEN, gated_shared=False, scoring="sigmoid", biased=True, scale=2.5)
KINDS = {
    "softmax": QWEN,
    "sigmoid, bias, scale": LAGUNA,
    "sigmoid, plain": replace(LAGUNA, biased=False, scale=1.0),
    "no shared expert": replace(QWEN, n_ff_shared=0),
    "softmax with bias": replace(QWEN, biased=True),
    "not normalised": replace(QWEN, normalised=False, scale=0.5),
    "one of three": Experts(n_embd=32, n_experts=3, n_used=1, n_ff=64, n_ff_shared=32),
    "all of five": Experts(n_embd=32, n_experts=5, n_used=5, n_ff=32),
    "one of one": Experts(n_embd=32, n_experts=1, n_used=1, n_ff=32),
    "chosen, clamped": Experts(n_embd=64, n_experts=12, n_used=4, n_ff=32, scoring="chosen", limit=1.5),
}


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    device = Device.cpu(1, reference=True)
    yield device
    device.close()


def arrays(experts: Experts, joined: bool = False, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights in numpy's order of dimensions."""
    rng = np.random.default_rng(seed)
    shapes = experts.tensors(joined)
    if experts.limit and not joined:  # such experts have biases, and no file has their matrices joined
        shapes |= {name.replace("weight", "bias"): shape[1:] for name, shape in shapes.items()}
    return {
        f"blk.0.{name}": (rng.standard_normal(shape[::-1]) / np.sqrt(shape[0])).astype(np.float32)
        for name, shape in shapes.items()
    }


def run(device: Device, experts: Experts, w: dict[str, Source], x: np.ndarray) -> np.ndarray:
    weights = Weights(device, w).fill()
    workspace, g = Workspace(device), Graph(device, 256)
    g.output(mixture(g, weights, "blk.0.", g.input("x", F32, *x.shape[::-1]), experts), "out")
    g.place(workspace)
    g.inputs["x"].array[...] = x.reshape(g.inputs["x"].array.shape)
    g.run()
    out = device.read(g.outputs["out"]).reshape(x.shape)
    for thing in (g, workspace, weights):
        thing.close()
    return out


def sources(w: dict[str, np.ndarray]) -> dict[str, Source]:
    return {name: Source(F32, x.shape[::-1], x.view(np.uint8).reshape(-1)) for name, x in w.items()}


def packed(w: dict[str, np.ndarray], kind: Type) -> dict[str, Source]:
    """`sources` with the experts' matrices quantised."""
    found = sources(w)
    for name in w:
        if expert_block(name) is not None:
            data = quantize(w[name], kind).reshape(-1)
            found[name] = Source(kind.value, w[name].shape[::-1], data)
    return found


def expected(experts: Experts, w: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    names = {name.removeprefix("blk.0."): a for name, a in w.items()}
    how = experts.scoring, experts.normalised, experts.scale, experts.limit
    return numpy_mixture(names, x, experts.n_used, *how)


@pytest.mark.parametrize("columns", [1, 9])
@pytest.mark.parametrize("joined", [False, True], ids=["separate", "joined"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_numpy(device: Device, kind: str, joined: bool, columns: int) -> None:
    experts = KINDS[kind]
    w = arrays(experts, joined)
    x = np.random.default_rng(1).standard_normal((columns, experts.n_embd)).astype(np.float32)
    found = run(device, experts, sources(w), x)
    np.testing.assert_allclose(found, expected(experts, w, x), atol=3e-6)


def test_scales_of_experts(device: Device) -> None:
    w = arrays(QWEN)
    rng = np.random.default_rng(2)
    for part in ("gate", "up", "down"):
        w[f"blk.0.ffn_{part}_exps.scale"] = rng.uniform(0.3, 3, QWEN.n_experts).astype(np.float32)
    x = rng.standard_normal((5, QWEN.n_embd)).astype(np.float32)
    np.testing.assert_allclose(run(device, QWEN, sources(w), x), expected(QWEN, w, x), atol=1e-5)


@pytest.mark.parametrize(
    "kind", [Type.Q8_0, Type.Q4_0, Type.Q4_K, Type.MXFP4, Type.NVFP4], ids=lambda kind: kind.name
)
@pytest.mark.parametrize("reference", [True, False], ids=["plain kernels", "best kernels"])
def test_quantised_experts(kind: Type, reference: bool) -> None:
    """In whatever layout the device holds them, near what the unpacked weights give. Activations are rounded to 8 bits: experts
    are chosen in float32, so that cannot choose others."""
    experts = replace(QWEN, n_embd=256, n_ff=256, n_ff_shared=0)
    w = arrays(experts)
    unpacked = dict(w)
    for name in w:
        if expert_block(name) is not None:
            unpacked[name] = dequantize(quantize(w[name], kind), kind).reshape(w[name].shape)
    x = np.random.default_rng(3).standard_normal((6, experts.n_embd)).astype(np.float32)
    device = Device.cpu(2, reference=reference)
    found, wanted = run(device, experts, packed(w, kind), x), expected(experts, unpacked, x)
    device.close()
    assert (found - wanted).std() < 0.02 * wanted.std()


def test_a_column_does_not_depend_on_the_width(device: Device) -> None:
    """In reference mode, bit for bit: greedy decoding and a tree of any width agree on the strength of it."""
    w = sources(arrays(LAGUNA))
    x = np.random.default_rng(4).standard_normal((40, LAGUNA.n_embd)).astype(np.float32)
    whole = run(device, LAGUNA, w, x)
    for width in (1, 2, 7, 16, 33):
        np.testing.assert_array_equal(run(device, LAGUNA, w, x[:width]), whole[:width])


@pytest.mark.parametrize("name", ["ffn_gate_inp.weight", "exp_probs_b.bias"])
def test_a_router_that_is_partly_nan_picks_something(device: Device, name: str) -> None:
    """The output is non-finite, and nothing else happens: a sort of such logits may leave its bounds."""
    experts = replace(LAGUNA, n_experts=200)
    w = arrays(experts)
    w[f"blk.0.{name}"][::3] = np.nan
    x = np.random.default_rng(5).standard_normal((8, experts.n_embd)).astype(np.float32)
    found = run(device, experts, sources(w), x)
    assert found.shape == x.shape
    if name.startswith("ffn"):
        assert np.isnan(found).all()


def ops(experts: Experts, joined: bool = False, scaled: bool = False) -> list[str]:
    """Names of the operations in their order, for a GPU."""
    device = Device.cpu(1)
    g = Graph(device, 256)
    w = {f"blk.0.{name}": g.input(name, F32, *shape) for name, shape in experts.tensors(joined).items()}
    if scaled:
        for part in ("gate", "up", "down"):
            w[f"blk.0.ffn_{part}_exps.scale"] = g.input(part, F32, experts.n_experts)
    g.expand(mixture(g, w, "blk.0.", g.input("x", F32, experts.n_embd, 4), experts))
    nodes = [lib.ggml_graph_node(g.cgraph, i) for i in range(g.n_nodes)]
    found = [ffi.string(lib.ggml_op_desc(node)).decode() for node in nodes]
    g.close()
    device.close()
    return found


NORM = ["RESHAPE", "SUM_ROWS", "CLAMP", "DIV", "RESHAPE"]
SUM = ["MUL", "VIEW", "VIEW", "VIEW", "ADD", "ADD"]


def test_nodes_stand_in_the_order_of_the_fusions() -> None:
    router = ["MUL_MAT", "SOFT_MAX", "RESHAPE", "ARGSORT", "VIEW", "GET_ROWS", *NORM]
    found = ops(QWEN)
    assert found[: len(router)] == router
    rest = found[len(router) :]
    assert rest[:5] == ["RESHAPE", "MUL_MAT_ID", "MUL_MAT_ID", "SWIGLU", "MUL_MAT_ID"]
    assert rest[5:11] == SUM
    assert rest[11:] == ["MUL_MAT", "MUL_MAT", "SWIGLU", "MUL_MAT", "MUL_MAT", "SIGMOID", "MUL", "ADD"]


def test_scales_stand_in_the_order_of_the_fusions() -> None:
    scale = ["MUL_MAT_ID", "RESHAPE", "REPEAT", "GET_ROWS", "MUL"]
    found = ops(replace(QWEN, n_ff_shared=0), scaled=True)
    assert found[12:] == [*scale, *scale, "SWIGLU", *scale, *SUM]


def test_experts_are_recognised_by_name() -> None:
    assert expert_block("blk.12.ffn_gate_up_exps.weight") == 12
    assert expert_block("blk.0.ffn_down_exps.scale") == 0, "a number for each of them"
    assert expert_block("blk.7.ffn_gate_exps.bias") == 7, "a row for each of them"
    for name in (
        "blk.0.ffn_gate_inp.weight",
        "blk.0.ffn_gate_shexp.weight",
        "blk.0.ffn_down_exps.input_scale",
    ):
        assert expert_block(name) is None
