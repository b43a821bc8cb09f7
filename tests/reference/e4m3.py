"""E4M3 as `--prefill-fp8` rounds to it, in numpy: a scale per row of the weights and per column of the activations."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MOST = 448.0  # 1.75 * 2^8; there are no infinities
LEAST_EXPONENT = -6  # of normal numbers; below it steps stay 2^-9


def e4m3(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The nearest E4M3 numbers, ties to even, saturated."""
    exponent = np.maximum(np.frexp(x)[1] - 1, LEAST_EXPONENT)
    step = np.exp2(exponent - 3)
    return np.clip(np.rint(x / step) * step, -MOST, MOST)


def rounded(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rows [n, k], each rounded with the scale that brings its largest magnitude to 448; rows of zeros stay."""
    most = np.abs(rows).max(axis=1, keepdims=True)
    scale = np.where(most < 1e-30, 1.0, most / MOST)
    return e4m3(rows / scale) * scale


def nmse(found: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    return float(np.square(found - expected).sum() / np.square(expected).sum())
