"""Tests of every kind of draft on a GPU against the same draft on the CPU. Skipped where this build or machine has no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.tree import spine
from dflash_ggml.ggml.device import list_devices
from reference import toys
from reference.engine_kit import Solo, fresh, generate

GPUS = [d for d in list_devices() if d.is_gpu]
pytestmark = pytest.mark.skipif(not GPUS, reason="no GPU in this build or machine")
# float16 caches and other matmul kernels: log-probabilities of random weights spread over about 10
TOLERANCE = {"F16": 0.1, "Q8_0": 0.5, "BF16": 0.5}
SHAPE: dict[str, Any] = {
    "n_vocab": 4000,
    "n_embd": 256,
    "n_ff": 512,
    "head_dim": 128,
    "n_rot": 32,
    "n_heads": 4,
}
SHAPE |= {"n_kv_heads": 2, "state": 128, "rank": 256, "selector_top_k": 15}
KINDS: dict[str, dict[str, Any]] = {
    "dflash2": {"draft": "dflash2", "window": 64, "causal": False, "block_size": 8},
    "dflash2-kernel4": {
        "draft": "dflash2",
        "window": 64,
        "conv_kernel": 4,
        "block_size": 10,
        "draft_rot": 64,
    },
    "dspark": {"draft": "dspark", "block_size": 7, "yarn": 4.0, "confidence": True},
    "dspark-gated": {"draft": "dspark", "gated": True, "from_anchor": False},
    "dspark-reduced": {"draft": "dspark", "n_draft_vocab": 2000},
    "own-tables": {"own_tables": True, "block_size": 16},
    "mtp": {"nextn": True},
}


@pytest.fixture(scope="module", params=[(kind, name) for kind in KINDS for name in TOLERANCE], ids="-".join)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Solo, Solo, float]]:
    """An engine on the CPU, one on the GPU, and how much numbers may differ."""
    kind, name = request.param
    folder: Path = tmp_path_factory.mktemp("drafts")
    files = toys.write_pair(folder, 30, toys.GGMLQuantizationType[name], **SHAPE | KINDS[kind])
    draft = None if kind == "mtp" else files[1]
    config = {"n_ctx": 512, "n_threads": 4, "calibrate": "never", "budget": 15}
    with (
        Solo.load(EngineConfig(files[0], draft, n_gpu_layers=0, **config)) as cpu,
        Solo.load(EngineConfig(files[0], draft, **config)) as gpu,
    ):
        assert gpu.device.is_gpu
        yield cpu, gpu, TOLERANCE[name]


def test_lattices_and_outputs(pair: tuple[Solo, Solo, float]) -> None:
    """The same candidates up to near-ties, and output that no mode changes beyond the rounding of widths."""
    cpu, gpu, tolerance = pair
    ids = np.random.default_rng(0).integers(0, cpu.n_vocab - 4, 100).tolist()
    found = []
    for engine in (cpu, gpu):
        fresh(engine, ids)
        engine.sequence.pending = 7
        assert engine.drafter is not None
        found.append(engine.drafter.propose([engine.sequence], 15)[0])
    a, b = found
    assert a.ids.shape == b.ids.shape
    # where all before agree, as its numbers hang on them
    for depth in range(len(a.ids)):
        np.testing.assert_allclose(a.log_probs[depth], b.log_probs[depth], atol=tolerance)
        if a.ids[depth, 0] != b.ids[depth, 0]:
            assert a.log_probs[depth, 0] - a.log_probs[depth, 1] < 2 * tolerance
            break
        shared = np.intersect1d(a.ids[depth], b.ids[depth], return_indices=True)
        assert len(shared[0]) >= a.ids.shape[1] // 2
    chain = spine(7, b, len(b.ids)).tokens
    assert len(chain) == len(b.ids) + 1
    plain = generate(fresh(gpu, ids), max_tokens=60, mode="plain")
    for mode in ("chain", "tree"):
        tokens = generate(fresh(gpu, ids), max_tokens=60, mode=mode)
        assert len(tokens) == 60
        assert tolerance > 0.2 or tokens[:5] == plain[:5]
    assert gpu.sequence.statistics.drafted > 0


def test_graphs_are_built_once(pair: tuple[Solo, Solo, float]) -> None:
    _, gpu, _ = pair
    generate(fresh(gpu, [5] * 40), max_tokens=40, mode="tree")
    built = gpu.run_counts()["graphs"]
    generate(fresh(gpu, [9] * 40), max_tokens=40, mode="tree")
    assert gpu.run_counts()["graphs"] <= built + 2  # paths of other lengths
