"""Ranges of cache rows: disjoint, in one piece, used again once they are given back."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_ggml.errors import DeviceError
from dflash_ggml.state.pool import UNIT, RowPool


def test_one_sequence_can_have_all_rows():
    pool = RowPool(1000)
    rows = pool.lend(1000)
    assert rows == range(1000)
    with pytest.raises(DeviceError, match="1 cache rows"):
        pool.lend(1)
    pool.give_back(rows)
    assert pool.lend(1000) == range(1000)


def test_any_order_of_lending_and_giving_back():
    """Against a plain set of rows."""
    rng = np.random.default_rng(4)
    pool, lent, refused = RowPool(40 * UNIT + 100), [], 0
    for _ in range(600):
        taken = set().union(*lent)
        if lent and rng.random() < 0.45:
            pool.give_back(lent.pop(int(rng.integers(len(lent)))))
            continue
        n = int(rng.integers(1, 12 * UNIT))
        starts = range(0, pool.n_rows - n + 1, UNIT)
        fitting = [at for at in starts if taken.isdisjoint(range(at, at + n))]
        if fitting:
            lent.append(pool.lend(n))
            assert lent[-1].start == fitting[0] and n <= len(lent[-1]) < n + UNIT
            assert taken.isdisjoint(lent[-1]) and lent[-1].stop <= pool.n_rows
        else:
            refused += 1
            with pytest.raises(DeviceError, match="in one piece"):
                pool.lend(n)
    assert refused


def test_what_is_not_lent_is_not_taken_back():
    pool = RowPool(1024)
    pool.lend(256)
    with pytest.raises(ValueError):
        pool.give_back(range(256, 512))
