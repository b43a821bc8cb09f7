"""Tests of the prompt scorer on a GPU: masses are those of a float64 reference up to rounding, for any chunks; the plan holds.
Skipped where this build or machine has no GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.engine.engine import Engine
from dflash_ggml.ggml.device import list_devices
from reference import toys
from reference.numpy_scorer import Model

GPUS = [d for d in list_devices() if d.is_gpu]
pytestmark = pytest.mark.skipif(not GPUS, reason="no GPU in this build or machine")
SIZES = {
    "n_embd": 256,
    "n_ff": 512,
    "n_heads": 8,
    "n_kv_heads": 2,
    "head_dim": 256,
    "state": 128,
    "n_layers": 8,
}


@pytest.mark.parametrize("window", [5, 128])
def test_masses_are_those_of_the_reference(tmp_path: Path, window: int) -> None:
    target, _ = toys.write_pair(tmp_path, 3)
    scorer, _ = toys.write_pair(tmp_path, 4, **SIZES)
    ids = np.random.default_rng(window).integers(0, 60, 700).tolist()
    expected = Model(scorer).masses(ids, window, 7)
    config = EngineConfig(target, n_ctx=1024, scorer=scorer, prompt_keep=0.5, calibrate="never")
    with Engine.load(config) as engine:
        assert engine.scorer is not None
        for most in (None, 256, 17):
            with engine.held():
                engine.scorer.begin([1, 2, *ids], window)  # forget what was
                engine.scorer.begin(ids, window)
                while engine.scorer.advance(most):
                    pass
                found = engine.scorer.masses()
            assert abs(found.sum() - 1) < 1e-3
            # caches and keys are float16, and a toy of random weights carries rounding far
            np.testing.assert_allclose(found, expected, rtol=0.1, atol=0.02 / len(expected))
            assert np.corrcoef(found, expected)[0, 1] > 0.99
        planned = engine.memory.all_parts
        for name, size in engine.nbytes.items():
            assert name == "scratch" or size == planned[name], name
