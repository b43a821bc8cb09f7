"""The rounding of `--prefill-fp8`, in numpy: E4M3 with a scale per row of the weights and per column of the activations. It
gives the tolerance of the operation's cases (MUL_MAT_8_BITS), and what an outlier costs."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from reference.e4m3 import LEAST_EXPONENT, MOST, e4m3, nmse, rounded


def product_nmse(weights: NDArray[np.float64], columns: NDArray[np.float64]) -> float:
    return nmse(rounded(columns) @ rounded(weights).T, columns @ weights.T)


def test_every_number_of_the_format_is_kept_and_ties_go_to_even() -> None:
    fractions = np.arange(8) / 8
    normal = [(1 + f) * 2.0**e for e in range(LEAST_EXPONENT, 9) for f in fractions]
    numbers = np.array([*(fractions * 2.0**LEAST_EXPONENT), *normal])[:-1]  # the last one is NaN's
    assert numbers.max() == MOST and len(numbers) == 127
    assert (e4m3(numbers) == numbers).all() and (e4m3(-numbers) == -numbers).all()
    middles = (numbers[1:] + numbers[:-1]) / 2
    even = np.where(np.arange(126) % 2 == 0, numbers[:-1], numbers[1:])  # codes count up with the numbers
    assert (e4m3(middles) == even).all()
    assert (e4m3(middles * (1 + 1e-9)) == numbers[1:]).all() and (
        e4m3(middles * (1 - 1e-9)) == numbers[:-1]
    ).all()


def test_zeros_stay_zeros_and_scale_changes_nothing() -> None:
    rows = np.random.default_rng(1).standard_normal((8, 256))
    rows[3] = 0
    assert (rounded(rows)[3] == 0).all() and np.isfinite(rounded(rows)).all()
    for factor in (2.0**-60, 2.0**60):
        assert (rounded(rows * factor) == rounded(rows) * factor).all()


@pytest.mark.parametrize("k", [2048, 5120])
def test_normal_values_give_an_nmse_of_1_4e_3(k: int) -> None:
    rng = np.random.default_rng(2)
    weights, columns = rng.standard_normal((256, k)), rng.standard_normal((128, k))
    assert nmse(rounded(weights), weights) == pytest.approx(7.1e-4, rel=0.05)
    assert product_nmse(weights, columns) == pytest.approx(1.4e-3, rel=0.08)
    # sums alone in 8 bits per operand: one side exact halves it
    assert nmse(rounded(columns) @ weights.T, columns @ weights.T) == pytest.approx(7.1e-4, rel=0.08)


def test_an_outlier_of_a_column_costs_little() -> None:
    """An activation of 100 times the others leaves them in the range of E4M3's normal numbers; integers would lose four of their
    eight bits. What the rounding of the weights that it meets adds is as much as all other errors."""
    rng = np.random.default_rng(3)
    k = 5120
    weights, columns = rng.standard_normal((256, k)), rng.standard_normal((128, k))
    at = rng.integers(0, k, len(columns))
    large = columns.copy()
    large[np.arange(len(columns)), at] = 100
    rest = large.copy()
    rest[np.arange(len(columns)), at] = 0
    lost = nmse(np.where(rest == 0, 0, rounded(large)), rest)
    integers = np.abs(large).max(axis=1, keepdims=True) / 127
    lost_as_integers = nmse(np.where(rest == 0, 0, np.rint(large / integers) * integers), rest)
    print(f"rest {lost:.2e}, product {product_nmse(weights, large):.2e}, int8 {lost_as_integers:.2e}")
    assert lost < 9e-4 and lost_as_integers > 20 * lost
    assert product_nmse(weights, large) < 2e-3
    error = np.square(rounded(large) @ rounded(weights).T - large @ weights.T).sum()
    beside = error / np.square(rest @ weights.T).sum()  # relative to what the other activations make
    print(f"beside what the others make {beside:.2e}")
    assert 2e-3 < beside < 3.5e-3
