"""Tests of a tree of one node, the smallest budget: loading measures and warms up within it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.engine import known_costs
from reference.engine_kit import Solo


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("calibrate", ["always", "cached"])
def test_a_budget_of_one_loads_and_writes(
    toy_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, drafted: bool, calibrate: str
) -> None:
    monkeypatch.setattr(known_costs, "SECONDS", {True: 60.0, False: 60.0})
    monkeypatch.setattr(known_costs, "WARM_SECONDS", 60.0)
    target, draft = toy_pair
    config = EngineConfig(
        target,
        draft if drafted else None,
        n_ctx=256,
        budget=1,
        n_threads=1,
        n_gpu_layers=0,
        calibrate=calibrate,  # type: ignore[arg-type]
    )
    for _ in range(2):
        with Solo.load(config) as engine:
            engine.prefill([3, 1, 4, 1, 5] * 6)
            sampler = Sampler(SamplingParams(temperature=0.0), engine.n_vocab)
            steps = engine.generate(sampler, max_tokens=20, stop=lambda t: False)
            assert sum(len(step.tokens) for step in steps) == 20
