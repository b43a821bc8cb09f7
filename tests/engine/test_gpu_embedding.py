"""Tests of an embedding in host memory whose rows a GPU reads there: the tokens and logits of one on the GPU. Skipped where this
build or machine has no CUDA device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from dflash_ggml.config import EngineConfig
from dflash_ggml.engine.memory_planner import DRIVER
from dflash_ggml.ggml import pages, weights
from dflash_ggml.ggml.device import list_devices
from dflash_ggml.ggml.pages import LockedPages
from dflash_ggml.state.memory import MARGIN
from reference.engine_kit import Solo, fresh, generate
from reference.toys import write_pair

GPUS = [d for d in list_devices() if pages.kernels_read_host(d.name)]
pytestmark = pytest.mark.skipif(not GPUS, reason="no CUDA device that reads host memory")
PROMPT = np.random.default_rng(0).integers(0, 60, 700).tolist()


class Unlocked(LockedPages):
    """Where a file's pages cannot be locked, rows are read in a pinned copy."""

    def __init__(self, name, ranges, mapped: bool = False) -> None:
        super().__init__(name, ranges if not mapped else ())
        if mapped:
            self.close()


@pytest.mark.parametrize("locks", [True, False])
@pytest.mark.parametrize("kind", [Type.F32, Type.Q8_0], ids=lambda kind: kind.name)
def test_tokens_and_logits(kind, locks, tmp_path, monkeypatch) -> None:
    """Passes of one token, of trees and of prompts; draft and target read the same rows."""
    config = EngineConfig(
        *write_pair(tmp_path, 21, kind, n_embd=512),
        n_ctx=1024,
        n_batch=512,
        parallel=1,
        type_k="f16",
        type_v="f16",
        draft_type="q8_0",
        calibrate="never",
    )
    found = []
    limit = None
    if not locks:
        monkeypatch.setattr(weights, "LockedPages", Unlocked)
    for on_host in (False, True):
        with Solo.load(replace(config, gpu_memory=limit)) as engine:
            assert engine.device.is_gpu and bool(engine.memory.read_there) == on_host
            limit = DRIVER + MARGIN + engine.memory.total - 1
            rows = fresh(engine, PROMPT).logits.copy()
            modes = ("plain", "chain", "tree")
            tokens = [generate(fresh(engine, PROMPT), max_tokens=100, mode=mode) for mode in modes]
            found.append((rows, tokens))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
