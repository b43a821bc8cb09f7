"""Experts in the host's memory beside a GPU, against all of them on it. Skipped where this build or machine has no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from dflash_ggml.config import ALL_LAYERS, EngineConfig
from dflash_ggml.engine.declared import DRIVER
from dflash_ggml.engine.engine import Engine
from dflash_ggml.ggml.device import HOST, list_devices
from dflash_ggml.models.experts import LENT
from dflash_ggml.state.memory import MARGIN
from reference.engine_kit import fresh, text
from reference.toys import MOE_VARIANTS, write_pair

GPUS = [d for d in list_devices() if d.is_gpu]
pytestmark = pytest.mark.skipif(not GPUS, reason="no GPU in this build or machine")
SIZES = MOE_VARIANTS[21] | {"n_embd": 512}
# widths of an expert. ggml's kernels read beyond quantised rows that are no multiple of 512; ours do not take those of 160
WIDTHS = (512, 768, 160)
PROMPT = np.random.default_rng(0).integers(0, 60, 3 * LENT + 5).tolist()
TOLERANCE = {
    Type.F32: 0.05,
    Type.Q8_0: 0.25,
}  # logits spread over about 20; the GPU multiplies float32 as TF32


@pytest.fixture(
    scope="module",
    params=[(Type.F32, 512), *((Type.Q8_0, n_ff) for n_ff in WIDTHS)],
    ids=lambda param: f"{param[0].name}-{param[1]}",
)
def config(request, tmp_path_factory) -> tuple[EngineConfig, float]:
    kind, n_ff = request.param
    sizes = SIZES | {"n_ff": n_ff, "n_ff_shared": n_ff}
    pair: tuple[Path, Path] = write_pair(tmp_path_factory.mktemp("gpu"), 21, kind, **sizes)
    return EngineConfig(*pair, n_ctx=1024, calibrate="never"), TOLERANCE[kind]


@pytest.fixture
def whole(config) -> Iterator[Engine]:
    with Engine.load(replace(config[0], n_cpu_moe=0)) as engine:
        assert engine.device.is_gpu and engine.memory.kept is None
        yield engine


@pytest.mark.parametrize("layers", [1, ALL_LAYERS])
def test_prompts_and_texts(config, whole, layers, capsys) -> None:
    """Prompts that the host computes and some that it lends its matrices to; then the state that trees and commits leave, read
    anew by the engine that has all on the GPU."""
    base, tolerance = config
    worst = 0.0
    with Engine.load(replace(base, n_cpu_moe=layers)) as engine:
        assert engine.device.is_gpu and engine.device.host is not None
        for n in (1, 7, LENT - 1, LENT, len(PROMPT)):
            rows = [fresh(e, PROMPT[:n]).logits.copy() for e in (whole, engine)]
            worst = max(worst, float(np.abs(rows[0] - rows[1]).max()))
        for mode in ("plain", "chain", "tree"):
            said = text(fresh(engine, PROMPT[:40]), max_tokens=40, mode=mode)
            engine.prefill(said[-1:])
            read = fresh(whole, [*PROMPT[:40], *said])
            worst = max(worst, float(np.abs(engine.logits - read.logits).max()))
        snapshot = fresh(engine, PROMPT).snapshot(True)
        row = engine.logits.copy()
        text(engine, max_tokens=20, mode="tree")
        engine.restore(snapshot)
        np.testing.assert_array_equal(engine.logits, row)
    with capsys.disabled():
        print(f"\nlargest difference of a logit, experts of {layers} layers on the host: {worst:.4f}")
    assert worst < tolerance


def test_long_prompts_are_computed_by_the_gpu(config) -> None:
    """Of a batch of LENT columns the host computes nothing, of a shorter one its layers."""
    with Engine.load(replace(config[0], n_cpu_moe=2, draft=None, mode="plain")) as engine:
        for n, computes in ((LENT, False), (8, True)):
            engine.reset()
            engine.prefill(PROMPT[:n])
            (graph,) = (g for key, g in engine.passes.graphs if key[:2] == ("linear", n))
            assert graph._split is not None and (HOST in graph._split.sides) == computes


def test_what_does_not_fit_is_kept_by_the_host(config, caplog) -> None:
    """A limit of the GPU's memory below what the model takes: as few layers as it takes, within the limit."""
    with Engine.load(replace(config[0], n_cpu_moe=0)) as engine:
        experts = sum(engine.passes.weights[n].nb[3] for n in engine.passes.weights if "_exps." in n)
        taken = engine.memory.total
    limit = DRIVER + MARGIN + taken - experts // 3
    with Engine.load(replace(config[0], gpu_memory=limit)) as engine:
        assert engine.memory.kept is not None and 1 <= engine.memory.kept.layers < 4
        assert "does not fit the GPU" in caplog.text
        assert len(text(fresh(engine), max_tokens=20, mode="tree")) == 20
