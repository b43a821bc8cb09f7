"""Trees grown in C equal those of the Python beside the tests, bit for bit."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dflash_ggml.decode.candidates import Rows
from dflash_ggml.decode.tree import Tree, expand
from reference.trees import grown_of_rows


def rows_of(rng: np.random.Generator, depths: int, ranks: int) -> Rows:
    """Rows with ties, and tokens of probability 0, now and then."""
    scores = -rng.exponential(size=(depths, ranks))
    if rng.random() < 0.5:
        scores = np.round(2 * scores) / 2
    scores[rng.random(scores.shape) < rng.choice([0.0, 0.3])] = -np.inf
    ids = rng.permuted(np.tile(np.arange(max(ranks, 12)), (depths, 1)), axis=1)[:, :ranks]
    return Rows(ids.astype(np.int32), -np.sort(-scores.astype(np.float32), axis=1))


def assert_equal(a: Tree, b: Tree) -> None:
    for name in ("tokens", "parents", "depths", "log_probs"):
        x, y = getattr(a, name), getattr(b, name)
        assert x.dtype == y.dtype and x.tobytes() == y.tobytes(), name


seeds = st.integers(0, 2**32)


@given(seeds, st.integers(0, 9), st.integers(1, 9), st.integers(0, 90), st.booleans(), st.floats(-20, 0))
def test_plain_rows(seed: int, depths: int, ranks: int, budget: int, chain_seed: bool, least: float) -> None:
    rng = np.random.default_rng(seed)
    rows = rows_of(rng, depths, ranks)
    lists = rows.ids.tolist(), rows.log_probs.tolist()
    for most_cost in (np.inf, -least):
        expected = grown_of_rows(7, *lists, budget, chain_seed, most_cost)
        assert_equal(expand(7, rows, budget, chain_seed, -most_cost), expected)


def test_rows_that_are_views_of_a_wider_block() -> None:
    rows = rows_of(np.random.default_rng(1), 6, 9)
    part = Rows(rows.ids[::2, :5], rows.log_probs[::2, :5])
    copied = Rows(part.ids.copy(), part.log_probs.astype(np.float64))
    assert not part.ids.flags.c_contiguous
    assert_equal(expand(7, part, 30), expand(7, copied, 30))
