"""Tests of halves of every layer on two GPUs against one. Skipped where there are fewer than two; GGML_CUDA_DEVICES=2 shows one
card as two, whose kernels wait for each other on one card then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from dflash_ggml.config import EngineConfig
from dflash_ggml.ggml.device import F32, list_devices
from dflash_ggml.models.qwen35 import Qwen35
from reference.engine_kit import Solo, fresh, generate
from reference.toys import write_pair

GPUS = [d.name for d in list_devices() if d.name.startswith("CUDA")]
pytestmark = pytest.mark.skipif(len(GPUS) < 2, reason="fewer than two CUDA devices in this build or machine")
PROMPT = np.random.default_rng(0).integers(0, 60, 200).tolist()
# halves are whole blocks of 256, and two value heads read each key head
SIZES: dict[str, Any] = {
    "n_embd": 256,
    "n_ff": 512,
    "n_layers": 8,
    "n_heads": 8,
    "n_kv_heads": 2,
    "head_dim": 128,
}
HEADS: dict[str, Any] = {"state": 128, "ssm_k_heads": 4, "ssm_v_heads": 8}
MODES = ("plain", "chain", "tree")


@pytest.fixture(scope="module", params=[Type.F32, Type.Q8_0, Type.Q4_K], ids=lambda kind: kind.name)
def engines(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[tuple[Solo, Solo]]:
    pair = write_pair(tmp_path_factory.mktemp("gpus"), 7, request.param, **SIZES, **HEADS)
    config = EngineConfig(*pair, n_ctx=2048, calibrate="never")
    halves = replace(config, device=tuple(GPUS[:2]), split_mode="tensor")
    with Solo.load(replace(config, device=(GPUS[0],))) as one, Solo.load(halves) as two:
        yield one, two


def rounds(engines: tuple[Solo, Solo]) -> bool:
    """Whether activations are rounded to so few bits that a toy's text may part."""
    return engines[0].passes.weights["blk.0.ffn_down.weight"].type != F32


def test_two_give_what_one_gives(engines: tuple[Solo, Solo]) -> None:
    """But for the rounding of sums in two parts, and of the activations that are quantised behind them."""
    for ids in (PROMPT[:1], PROMPT[:40], PROMPT):
        rows = [fresh(engine, ids).logits.copy() for engine in engines]
        np.testing.assert_allclose(*rows, rtol=0, atol=0.05 * rows[0].std())
    for mode in MODES:
        a, b = (generate(fresh(engine, PROMPT), max_tokens=60, mode=mode) for engine in engines)
        assert a[:8] == b[:8] or rounds(engines)


def test_repeated_runs_are_identical(engines: tuple[Solo, Solo]) -> None:
    """With new graphs, captured ones, and after a snapshot was put back. Trees follow what was learned of the draft: other widths
    round otherwise."""
    two = engines[1]
    outputs = [generate(fresh(two, PROMPT), max_tokens=60, mode="plain") for _ in range(4)]
    assert outputs == outputs[:1] * 4
    snapshot = fresh(two, PROMPT).snapshot(True)
    two.reset()
    two.restore(snapshot)
    assert generate(two, max_tokens=60, mode="plain") == outputs[0]


def test_the_plan_is_exact(engines: tuple[Solo, Solo]) -> None:
    two = engines[1]
    found, planned = two.nbytes, two.memory.all_parts
    for name, size in planned.items():
        if size and not name.startswith(("graphs", "lent experts", "wide matmuls")):
            assert found[name] == size, name


def test_both_end_with_the_same_bits(engines: tuple[Solo, Solo], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a captured graph is replayed."""
    monkeypatch.setattr(
        Qwen35,
        "_trunk",
        lambda self, g, batch, *args, whole=Qwen35._trunk: g.output(
            whole(self, g, batch, *args), f"x{batch.rank}"
        ),
    )
    two = engines[1]
    two.passes.graphs.clear()
    for mode in MODES:
        generate(fresh(two, PROMPT), max_tokens=20, mode=mode)
    compared = [graph for _, graph in two.passes.graphs if "x1" in graph.outputs]
    assert len(compared) >= 3
    for graph in compared:
        for _ in range(5):
            graph.run()
            a, b = (two.device.read(graph.outputs[f"x{rank}"]) for rank in (0, 1))
            np.testing.assert_array_equal(a, b)
    two.passes.graphs.clear()
