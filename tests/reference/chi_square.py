"""Pearson's chi-square test, as far as the statistical tests need it."""

from __future__ import annotations

import math

import numpy as np

_Z = 3.719  # one-sided standard normal quantile of 1 - 1e-4


def chi_square_limit(degrees_of_freedom: int) -> float:
    """What a chi-square statistic exceeds with probability 1e-4 (Wilson-Hilferty approximation)."""
    spread = 2 / (9 * degrees_of_freedom)
    return degrees_of_freedom * (1 - spread + _Z * math.sqrt(spread)) ** 3


def assert_drawn_from(counts: np.ndarray, probs: np.ndarray) -> None:
    """Asserts that counts [n] are plausible draws from probs [n]; nothing impossible may occur.

    Outcomes expected fewer than 5 times are pooled, as the approximation asks.
    """
    assert counts[probs == 0].sum() == 0, "an impossible outcome was drawn"
    expected = probs * counts.sum()
    rare = expected < 5
    observed, expected = (np.append(x[~rare], x[rare].sum()) for x in (counts, expected))
    if expected[-1] < 5:
        observed, expected = observed[:-1], expected[:-1]
    if len(expected) > 1:
        statistic = ((observed - expected) ** 2 / expected).sum()
        assert statistic < chi_square_limit(len(expected) - 1), (statistic, len(expected) - 1)


def assert_same_source(a: np.ndarray, b: np.ndarray) -> None:
    """Asserts that counts a [n] and b [n] are plausible draws from one distribution, whatever it is."""
    both = a + b
    share = a.sum() / both.sum()
    kept = both * min(share, 1 - share) >= 5
    expected_a, expected_b = both * share, both * (1 - share)
    terms = (a - expected_a)[kept] ** 2 / expected_a[kept] + (b - expected_b)[kept] ** 2 / expected_b[kept]
    assert terms.sum() < chi_square_limit(kept.sum() - 1), (terms.sum(), kept.sum() - 1)
