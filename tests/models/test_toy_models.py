"""Tests of targets of other shapes than the embedded one: head sizes 16 to 128, ratios 1 to 3, tied head."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import fixtures
from dflash_ggml.config import EngineConfig
from fixtures import hf_layout
from reference import toys
from reference.engine_kit import Solo


@pytest.mark.parametrize("seed", toys.VARIANTS)
def test_logits_equal_transformers(seed: int, tmp_path: Path):
    """Logits after 70 tokens agree to 1e-4 (they span about 20)."""
    target, draft = toys.write_pair(tmp_path, seed, **toys.VARIANTS[seed])
    tokens, logits, checksum = fixtures.toy_logits(seed)
    embedding = hf_layout.read(target).tensors["token_embd.weight"].astype(np.float64)
    assert np.abs(embedding).sum() == pytest.approx(checksum), (
        "numpy draws other weights: make the fixture again"
    )
    with Solo.load(EngineConfig(target, draft, type_k="f32", type_v="f32", n_ctx=256)) as engine:
        engine.prefill(tokens)
        np.testing.assert_allclose(engine.logits, logits, atol=1e-4)
