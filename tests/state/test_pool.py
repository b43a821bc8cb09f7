"""Tests of ranges of cache rows: disjoint, contiguous, reused once they are released."""

from __future__ import annotations

from itertools import pairwise
from math import ceil

import numpy as np
import pytest

from dflash_ggml.errors import DeviceError
from dflash_ggml.state.pool import ADJACENT, SPACED, UNIT, RowPool


def test_one_sequence_can_have_all_rows():
    pool = RowPool(1000)
    rows = pool.allocate(1000)
    assert rows == range(1000)
    with pytest.raises(DeviceError, match="1 cache rows"):
        pool.allocate(1)
    pool.free(rows)
    assert pool.allocate(1000) == range(1000)


def placed(pool: RowPool, ranges: list[range], n: int) -> range | None:
    """Where n rows go: the first gap with as much free space after itself and the range before as there is anywhere."""
    length = UNIT * ceil(n / UNIT)
    for spacing in pool.spacing:
        for at in range(0, pool.n_rows - n + 1, UNIT):
            before = max(
                (rows for rows in ranges if rows.start <= at), key=lambda rows: rows.start, default=range(0)
            )
            after = min((rows.start for rows in ranges if rows.start > at), default=pool.n_rows)
            room = min(at + length, pool.n_rows) + UNIT * ceil(spacing * length / UNIT)
            if at >= before.stop + UNIT * ceil(spacing * len(before) / UNIT) and room <= after:
                return range(at, min(at + length, pool.n_rows))
    return None


@pytest.mark.parametrize("spacing", [SPACED, ADJACENT], ids=["spaced", "adjacent"])
def test_any_order_of_lending_and_giving_back(spacing: tuple[float, ...]):
    """Against a plain set of rows."""
    rng = np.random.default_rng(4)
    pool, ranges, refused = RowPool(40 * UNIT + 100, spacing), [], 0
    for _ in range(600):
        taken = set().union(*ranges)
        if ranges and rng.random() < 0.45:
            pool.free(ranges.pop(int(rng.integers(len(ranges)))))
            continue
        n = int(rng.integers(1, 12 * UNIT))
        starts = range(0, pool.n_rows - n + 1, UNIT)
        fitting = [at for at in starts if taken.isdisjoint(range(at, at + n))]
        if fitting:
            expected = placed(pool, ranges, n)
            ranges.append(pool.allocate(n))
            assert ranges[-1] == expected and n <= len(ranges[-1]) < n + UNIT
            assert taken.isdisjoint(ranges[-1]) and ranges[-1].stop <= pool.n_rows
        else:
            refused += 1
            with pytest.raises(DeviceError, match="in one piece"):
                pool.allocate(n)
    assert refused


@pytest.mark.parametrize(("sequences", "n_rows"), [(4, 16384), (16, 65536)])
def test_sequences_that_grow_together_seldom_move(sequences: int, n_rows: int):
    """From 300 to 2,000 rows in alternation: each moves twice at most. Placed back to back they would at every other unit."""
    pool = RowPool(n_rows, SPACED)
    ranges, moves = [pool.allocate(300) for _ in range(sequences)], [0] * sequences
    for n in range(301, 2001):
        for i, rows in enumerate(ranges):
            if len(rows) >= n:
                continue
            longer = pool.extend(rows, n)
            if longer is None:
                longer = pool.allocate(n)
                pool.free(rows)
                moves[i] += 1
            ranges[i] = longer
    assert max(moves) <= 2 and sum(moves) <= sequences
    assert all(b.start >= a.stop for a, b in pairwise(sorted(ranges, key=lambda rows: rows.start)))


def test_what_is_not_lent_is_not_taken_back():
    pool = RowPool(1024)
    pool.allocate(256)
    with pytest.raises(ValueError):
        pool.free(range(256, 512))


def test_ranges_are_compacted_so_that_one_fits():
    """By moves that are made one after the other, of rows that hold numbers of their own."""
    rng = np.random.default_rng(6)
    found = {True: 0, False: 0}
    for _ in range(400):
        pool, ranges = RowPool(int(rng.integers(12 * UNIT, 30 * UNIT)), SPACED), []
        for _ in range(40):
            try:
                ranges.append(pool.allocate(int(rng.integers(1, 5 * UNIT))))
            except DeviceError:
                pool.free(ranges.pop(int(rng.integers(len(ranges)))))
        ranges = [rows for rows in ranges if rng.random() < 0.7 or pool.free(rows)]
        rng.shuffle(ranges)
        mine = ranges[0] if ranges and rng.random() < 0.5 else None
        n = int(rng.integers(1, 20 * UNIT))
        room = pool.n_rows - sum(UNIT * ceil(len(rows) / UNIT) for rows in ranges if rows is not mine)
        moves = pool.compacted(n, mine)
        found[moves is not None] += 1
        assert moves is not None or room < n + UNIT
        rows = np.full(pool.n_rows, -1)
        for i, of in enumerate(ranges):
            rows[of.start : of.stop] = i
        for now, to in moves or ():
            i = ranges.index(now)
            rows[to.start : to.stop] = rows[now.start : now.stop]
            pool.move(now, to)
            ranges[i] = to
            assert to.start % UNIT == 0 and len(now) == len(to) and (rows[to.start : to.stop] == i).all()
        for i, of in enumerate(ranges):
            assert (rows[of.start : of.stop] == i).all()
        if moves is not None and mine is not None:
            longer = pool.extend(ranges[0], n)
            assert longer is not None and len(longer) >= n
        elif moves is not None:
            assert len(pool.allocate(n)) >= n
    assert min(found.values()) > 40
