"""Tests of masks kept on the device against masks computed in full, over random sequences of passes."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_ggml.ggml.device import Device
from dflash_ggml.ggml.graph import Graph
from dflash_ggml.ggml.store import Workspace
from dflash_ggml.state.mask import ResidentMask

ROWS, WIDTH, ADVANCE = 512, 16, 8


def expected(start: int, visible: np.ndarray, n_kv: int, origin: int) -> np.ndarray:
    """The mask [columns, n_kv], entry by entry."""
    w = len(visible)
    out = np.full((w, n_kv), -np.inf, np.float32)
    for column in range(w):
        for slot in range(min(n_kv, start + w)):
            if slot >= origin if slot < start else visible[column, slot - start]:
                out[column, slot] = 0
    return out


@pytest.mark.parametrize("seed", range(6))
def test_equals_the_mask_written_out(seed):
    """Commits of any length up to the largest and some beyond, jumps forward (prefill) and back (reset), other origins."""
    rng = np.random.default_rng(seed)
    device = Device.cpu(1)
    mask = ResidentMask(device, WIDTH, ADVANCE, ROWS)
    start = origin = 0
    graphs = {}
    for _ in range(60):
        columns = int(rng.choice([1, 4, WIDTH]))
        n_kv = next(n for n in (128, 256, ROWS) if start + WIDTH <= n)
        if (columns, n_kv) not in graphs:
            g = Graph(device, 32)
            g.output(mask.build(g, "m", n_kv, columns), "result")
            graphs[columns, n_kv] = g.place(Workspace(device))
        g = graphs[columns, n_kv]
        visible = np.tril(rng.random((columns, columns)) < 0.5) | np.eye(columns, dtype=bool)
        mask.fill(g, "m", n_kv, start, np.packbits(visible.T, axis=1, bitorder="little"), origin)
        g.run()
        mask.ran()
        found = device.read(g.outputs["result"]).reshape(columns, n_kv).astype(np.float32)
        np.testing.assert_array_equal(found, expected(start, visible, n_kv, origin))
        step = rng.random()
        if step < 0.8:
            start = max(0, start + int(rng.integers(-ADVANCE // 2, 2 * ADVANCE)))
        else:
            start = int(rng.integers(0, ROWS - WIDTH))
        if start > ROWS - WIDTH:
            start = int(rng.integers(0, 20))
        if step > 0.9 or start < origin:  # the rows of another sequence, which begin elsewhere
            origin = int(rng.integers(0, start + 1))
