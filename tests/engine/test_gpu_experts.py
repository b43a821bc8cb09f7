"""Tests of targets with experts on a GPU against the same on the CPU. Skipped where this build or machine has no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.ggml.device import list_devices
from reference import toys
from reference.engine_kit import Solo, fresh, generate

GPUS = [d for d in list_devices() if d.is_gpu]
pytestmark = pytest.mark.skipif(not GPUS, reason="no GPU in this build or machine")
SHAPE: dict[str, Any] = {
    "n_vocab": 300,
    "n_embd": 256,
    "n_ff": 256,
    "n_ff_shared": 256,
    "n_experts": 64,
    "n_used": 8,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 128,
    "n_rot": 32,
    "state": 128,
    "ssm_v_heads": 4,
    "own": 3.0,
    "nextn": True,
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen35moe": {"arch": "qwen35moe"},
    "one-matrix": {"arch": "qwen35moe", "joined": True, "n_used": 3},
    "qwen3next": {"arch": "qwen3next", "n_used": 10},
}
# root mean square of the difference of logits, as a part of their deviation: where two experts score alike, kernels choose apart.
# Against float32 on the CPU it is up to 0.16 with Q4_K; that of another model would be 1.4
TOLERANCE = {"F16": 0.15, "Q8_0": 0.35, "Q4_K": 0.35}


@pytest.fixture(scope="module", params=[(kind, name) for kind in KINDS for name in TOLERANCE], ids="-".join)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Solo, Solo, float]]:
    """An engine on the CPU, one on the GPU, and how much logits may differ."""
    kind, name = request.param
    folder: Path = tmp_path_factory.mktemp("experts")
    target, draft = toys.write_pair(folder, 31, toys.GGMLQuantizationType[name], **SHAPE | KINDS[kind])
    config = {"n_ctx": 512, "n_threads": 4, "calibrate": "never", "budget": 31}
    with (
        Solo.load(EngineConfig(target, draft, n_gpu_layers=0, **config)) as cpu,
        Solo.load(EngineConfig(target, draft, **config)) as gpu,
    ):
        yield cpu, gpu, TOLERANCE[name]


@pytest.mark.parametrize("parts", [(150,), (1,) * 12, (2, 3, 5, 8, 9, 16, 17, 33, 57)], ids=str)
def test_logits(pair: tuple[Solo, Solo, float], parts: tuple[int, ...]) -> None:
    """Behind batches of every width that has kernels of its own."""
    cpu, gpu, tolerance = pair
    ids = np.random.default_rng(0).integers(0, cpu.n_vocab - 4, sum(parts)).tolist()
    fresh(cpu, ids)
    gpu.reset()
    for end, size in zip(np.cumsum(parts), parts, strict=True):
        gpu.prefill(ids[end - size : end])
    off = gpu.logits - cpu.logits
    assert np.sqrt(np.mean(off**2)) < tolerance * cpu.logits.std()


def test_modes(pair: tuple[Solo, Solo, float]) -> None:
    """Trees of every width write what plain decoding writes, up to a near-tie that kernels of another width round differently;
    graphs are built once."""
    _, gpu, tolerance = pair
    ids = np.random.default_rng(1).integers(0, gpu.n_vocab - 4, 60).tolist()
    plain = generate(fresh(gpu, ids), max_tokens=48, mode="plain")
    for budget in (1, 7, 15, 31):
        tokens = generate(fresh(gpu, ids), max_tokens=48, mode="tree", budget=budget)
        assert len(tokens) == 48
        fork = next((i for i, (a, b) in enumerate(zip(plain, tokens, strict=True)) if a != b), None)
        if fork is not None:
            row = fresh(gpu, ids + plain[:fork]).logits
            assert row[plain[fork]] - row[tokens[fork]] < 2 * tolerance * row.std()
    built = gpu.run_counts()["graphs"]
    generate(fresh(gpu, ids[::-1]), max_tokens=48, mode="tree", budget=31)
    assert gpu.run_counts()["graphs"] <= built + 3  # paths of other lengths


def test_the_head_drafts(pair: tuple[Solo, Solo, float]) -> None:
    """Its layer of experts too: the best candidates are the CPU's, mostly."""
    cpu = pair[0]
    ids = np.random.default_rng(2).integers(0, cpu.n_vocab - 4, 40).tolist()
    target = cpu.config.model
    config = {"n_ctx": 256, "n_threads": 4, "calibrate": "never"}
    found = []
    for layers in (0, -1):
        with Solo.load(EngineConfig(target, n_gpu_layers=layers, **config)) as engine:
            fresh(engine, ids).sequence.pending = 7
            assert engine.drafter is not None and engine.drafter.name == "mtp"
            found.append(engine.drafter.propose([engine.sequence], 15)[0])
    shared = np.intersect1d(found[0].ids[0], found[1].ids[0])
    assert len(shared) >= found[0].ids.shape[1] // 2
