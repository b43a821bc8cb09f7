"""Tests of the widths of prefill batches: wide ones take the chunked delta net, narrow ones token by token, as reference mode
always does.

Whatever way the batches are cut, the logits and the states that they leave are the same up to rounding. TOL is relative to the
largest magnitude; measured: 6e-7. About 2 s, on the CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_ggml.config import EngineConfig
from reference import toys
from reference.engine_kit import Solo

TOL = 1e-5
TOKENS = 150

Left = tuple[np.ndarray, np.ndarray]


def left_by(path: Path, widths: list[int], **options: Any) -> Left:
    """Logits and delta-net states after a prompt in batches of these widths."""
    ids = [int(i) for i in np.random.default_rng(1).integers(4, 60, TOKENS)]
    sizes = {"n_ctx": 256, "n_batch": TOKENS, "n_threads": 1, "n_gpu_layers": 0}
    with Solo.load(EngineConfig(path, None, type_k="f32", type_v="f32", **sizes, **options)) as engine:
        for width in widths:
            engine.prefill(ids[:width])
            ids = ids[width:]
        assert not ids
        return engine.logits.copy(), engine.device.read(engine.passes.state.recurrent[0].deltas)


def difference(a: Left, b: Left) -> float:
    return max(float(np.abs(x - y).max() / np.abs(y).max()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("seed", [12, 13, 14])
def test_widths_of_batches_make_no_difference(seed: int, tmp_path: Path) -> None:
    target, _ = toys.write_pair(tmp_path, seed, **toys.VARIANTS[seed])
    token_by_token = left_by(target, [TOKENS], reference=True)
    whole = left_by(target, [TOKENS])
    assert 0.0 < difference(whole, token_by_token) <= TOL
    for widths in ([64, 64, 22], [100, 1, 49], [15] * 10):
        assert difference(left_by(target, widths), token_by_token) <= TOL
