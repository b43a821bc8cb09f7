"""The oracle of reduced rows: float64 sums and stable sorts over the whole row."""

from __future__ import annotations

import numpy as np

from dflash_ggml.decode.reduced import KEPT, Reduced, Watch
from dflash_ggml.decode.sampling import BLOCK


def reduced_row(row: np.ndarray, watch: Watch) -> Reduced:
    """What a device makes of one row, in float64 and rounded."""
    ids = np.argsort(-row, kind="stable")[:KEPT]
    with np.errstate(all="ignore"):
        shifted = row.astype(np.float64) - row.max()
        log_sum = float(row.max()) + np.log(np.exp(shifted).sum())
        masses = np.add.reduceat(np.exp(shifted / watch.temperature), np.arange(0, len(row), BLOCK))
    return Reduced(ids, row[ids], float(log_sum), row[watch.ids], masses.astype(np.float32), watch, len(row))
