"""Tests of the graph that reduces rows of logits against numpy, on the CPU and on each GPU that is present."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dflash_ggml.decode.reduced import KEPT, WATCHED, ReducedRows, Watch
from dflash_ggml.decode.sampling import BLOCK
from dflash_ggml.ggml.device import F32, Device, list_devices
from dflash_ggml.ggml.graph import Graph
from dflash_ggml.ggml.store import Workspace
from dflash_ggml.models.layers import reduced_logits
from dflash_ggml.models.target import Reduction
from reference.reduction import reduced_row

DEVICES = {d.name: d for d in list_devices()}


def run(device: Device, rows: np.ndarray, watch: Watch) -> ReducedRows:
    """The reductions of rows [n, V]."""
    g = Graph(device, 128)
    logits = g.input("logits", F32, rows.shape[1], len(rows))
    out = g.output(reduced_logits(g, logits, Reduction(KEPT, WATCHED, BLOCK)))
    workspace = Workspace(device)
    g.place(workspace)
    g.inputs["logits"].array.reshape(rows.shape)[:] = rows
    g.inputs["temperature"].array[:] = watch.temperature
    ids = g.inputs["watch"].array.reshape(len(rows), WATCHED)
    ids[:], ids[:, : len(watch.ids)] = 0, watch.ids
    g.run()
    found = device.read(out).reshape(len(rows), -1)
    g.close()
    workspace.close()
    return ReducedRows(found, watch, rows.shape[1])


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest):
    device = Device(DEVICES[request.param], 1)
    yield device
    device.close()


@pytest.mark.parametrize(
    "n_vocab", [20, KEPT, KEPT + 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 8192, 9000, 100_000]
)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_equals_numpy(device: Device, n_vocab: int, temperature: float) -> None:
    """Kept and watched logits to the bit, ids with their ties; sums to 1e-5."""
    rng = np.random.default_rng(n_vocab)
    rows = rng.normal(scale=4, size=(5, n_vocab)).astype(np.float32)
    rows[1] = np.round(rows[1])  # ties
    rows[2] = 3.25
    rows[3, rng.random(n_vocab) < 0.5] = -np.inf
    rows[4] += 300
    watch = Watch(temperature, np.unique(rng.integers(0, n_vocab, WATCHED)))
    found = run(device, rows, watch)
    for i, row in enumerate(rows):
        expected = reduced_row(row, watch)
        finite = expected.logits > -np.inf
        assert found[i].ids[finite].tolist() == expected.ids[finite].tolist()
        assert (found[i].logits == expected.logits).all()
        assert (found[i].watched == expected.watched).all()
        assert found[i].log_sum == pytest.approx(expected.log_sum, rel=2e-6, abs=1e-5)
        np.testing.assert_allclose(found[i].masses, expected.masses, rtol=1e-4, atol=1e-7)
        assert found[i].masses.sum() == pytest.approx(expected.masses.sum(), rel=1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_bad_logits_show(device: Device, value: float) -> None:
    """One bad logit, or nothing else, makes log-sum and masses no numbers; nothing is read outside the row."""
    rows = np.random.default_rng(0).normal(size=(3, 5000)).astype(np.float32)
    rows[0, 4321] = rows[1] = value
    found = run(device, rows, Watch(1.0, np.array([7])))
    assert [bool(np.isfinite(found[i].masses.sum())) for i in range(3)] == [False, False, True]
    assert [math.isfinite(found[i].log_sum) for i in range(3)] == [False, False, True]
    assert all(0 <= i < 5000 for column in range(3) for i in found[column].ids)
