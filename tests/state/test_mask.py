"""Tests of masks kept on the device against masks computed in full, over random sequences of passes."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_ggml.ggml.device import Device
from dflash_ggml.ggml.graph import Graph
from dflash_ggml.ggml.store import Workspace
from dflash_ggml.state.mask import ResidentMask

ROWS, WIDTH, ADVANCE = 512, 16, 8


def expected(
    start: int, visible: np.ndarray, valid: np.ndarray, window: int | None, n_kv: int, origin: int
) -> np.ndarray:
    """The mask [columns, n_kv], entry by entry."""
    w = len(visible)
    out = np.full((w, n_kv), -np.inf, np.float32)
    for column in range(w):
        for slot in range(min(n_kv, start + w)):
            seen = valid[slot] and slot >= origin if slot < start else visible[column, slot - start]
            if seen and (window is None or slot > start + column - window):
                out[column, slot] = 0
    return out


@pytest.mark.parametrize("window", [None, 5, 40, 300])
@pytest.mark.parametrize("seed", range(3))
def test_equals_the_mask_written_out(window, seed):
    """Commits of any length up to the largest and some beyond, jumps forward (prefill) and back (reset), holes in the prefix,
    other origins."""
    rng = np.random.default_rng(seed)
    device = Device.cpu(1)
    mask = ResidentMask(device, WIDTH, ADVANCE, ROWS, window)
    valid = rng.random(ROWS) < 0.9
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
        mask.fill(g, "m", n_kv, start, np.packbits(visible.T, axis=1, bitorder="little"), valid, origin)
        g.run()
        mask.ran()
        found = device.read(g.outputs["result"]).reshape(columns, n_kv).astype(np.float32)
        np.testing.assert_array_equal(found, expected(start, visible, valid, window, n_kv, origin))
        step = rng.random()
        if step < 0.8:
            start = max(0, start + int(rng.integers(-ADVANCE // 2, 2 * ADVANCE)))
        else:
            start = int(rng.integers(0, ROWS - WIDTH))
        if start > ROWS - WIDTH:
            start = int(rng.integers(0, 20))
        if step > 0.9 or start < origin:  # the rows of another sequence, which begin elsewhere
            origin = int(rng.integers(0, start + 1))


RING = 256


@pytest.mark.parametrize("window", [3, 100, RING + 1 - ADVANCE - WIDTH])
@pytest.mark.parametrize("seed", range(2))
def test_a_ring_is_the_last_slots_of_the_mask(window, seed):
    """Past many wraps: row r is the last slot up to the pass's end that is r modulo the ring's length. The row of a slot that no
    column could see may hold anything but visible."""
    rng = np.random.default_rng(seed)
    device = Device.cpu(1)
    mask = ResidentMask(device, WIDTH, ADVANCE, RING, window, ring=True)
    valid, start, graphs, most = rng.random(9000) < 0.9, 0, {}, 0
    for _ in range(200):
        most = max(most, start)
        columns = int(rng.choice([1, 4, WIDTH]))
        n_kv = 128 if start + WIDTH <= 128 else RING
        if (columns, n_kv) not in graphs:
            g = Graph(device, 32)
            g.output(mask.build(g, "m", n_kv, columns), "result")
            graphs[columns, n_kv] = g.place(Workspace(device))
        g = graphs[columns, n_kv]
        visible = np.tril(rng.random((columns, columns)) < 0.5) | np.eye(columns, dtype=bool)
        mask.fill(g, "m", n_kv, start, np.packbits(visible.T, axis=1, bitorder="little"), valid)
        g.run()
        mask.ran()
        found = device.read(g.outputs["result"]).reshape(columns, n_kv).astype(np.float32)
        ring = np.full((columns, RING), -np.inf, np.float32)
        for slot in range(max(start + columns - RING, 0), start + columns):
            seen = valid[slot] if slot < start else visible[:, slot - start]
            ring[:, slot % RING] = np.where(seen & (slot > start + np.arange(columns) - window), 0, -np.inf)
        np.testing.assert_array_equal(found, ring[:, :n_kv])
        if rng.random() < 0.95:
            start = max(0, start + int(rng.integers(-ADVANCE, 2 * ADVANCE + 1)))
        else:  # another text
            start = int(rng.integers(0, 8000))
            valid = rng.random(9000) < 0.9
            mask.forget()
    assert most > 10 * RING


def test_a_ring_that_is_too_short_is_refused():
    with pytest.raises(ValueError, match="too short"):
        ResidentMask(Device.cpu(1), WIDTH, ADVANCE, RING, RING + 2 - ADVANCE - WIDTH, ring=True)
