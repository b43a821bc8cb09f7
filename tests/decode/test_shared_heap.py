"""Tests of one heap over several lists: the largest sum that the lists allow, and C equal to the Python reference."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_ggml.decode.shared_heap import shares
from reference import shared_heap as reference


def flat(lists: list[list[float]]) -> tuple[np.ndarray, list[int]]:
    """Lists as `shares` takes them."""
    return np.array([gain for one in lists for gain in one], np.float64), [len(one) for one in lists]


def front(lists: list[list[float]], most: int) -> list[int]:
    """How many of each list are among so many."""
    return shares(*flat(lists), [0] * len(lists), most, [max(most, 0)], [1.0])


@pytest.mark.parametrize("seed", range(20))
def test_the_heap_takes_the_largest_sum_that_lists_allow(seed: int):
    """For non-increasing lists, no other choice of that many entries from their fronts has a larger sum."""
    rng = random.Random(seed)
    lists = [sorted((rng.random() for _ in range(rng.randint(0, 5))), reverse=True) for _ in range(4)]
    most = rng.randint(0, 8)
    found = sum(sum(one[:n]) for one, n in zip(lists, front(lists, most)))
    choices = product(*(range(len(one) + 1) for one in lists))
    best = max(sum(sum(one[:n]) for one, n in zip(lists, ns)) for ns in choices if sum(ns) <= most)
    assert found == pytest.approx(best)


def test_the_heap_takes_each_list_from_its_front():
    """Also of lists that do not fall."""
    assert front([[0.1, 0.9], [0.3]], 1) == [1, 0]
    assert front([[0.1, 0.9], [0.3]], 2) == [2, 0]
    assert front([[0.1, 0.9], [0.3]], 3) == [2, 1]
    assert front([[0.5], [0.5], [0.5]], 2) == [1, 1, 0]
    assert front([[0.2, 0.9, 0.1], []], 0) == front([[], []], 4) == [0, 0]


gains = st.lists(st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.25, 0.5, 1.0])), max_size=12)


@given(st.data(), st.lists(gains, min_size=1, max_size=6), st.integers(0, 40))
def test_it_equals_the_reference(data: st.DataObject, lists: list[list[float]], room: int):
    counts = [data.draw(st.integers(0, len(one))) for one in lists]
    ends = sorted(data.draw(st.sets(st.integers(0, 40), min_size=1, max_size=8)))
    ms = data.draw(st.lists(st.floats(0, 30), min_size=len(ends), max_size=len(ends)))
    near = data.draw(st.sampled_from([0.0, 0.02, 0.3]))
    expected = reference.shares(lists, counts, room, ends, ms, near)
    assert shares(*flat(lists), counts, room, ends, ms, near) == expected


def test_a_width_that_costs_more_than_it_brings_is_not_taken():
    lists, ends = [[0.9, 0.8, 0.1], [0.7, 0.05]], [0, 1, 3, 5]
    ms = [10.0, 10.2, 10.4, 14.0]
    assert shares(*flat([[1.0, *one] for one in lists]), [1, 1], 5, ends, ms) == [3, 2]
    assert shares(*flat(lists), [0, 0], 5, ends, ms, flat=0.05) == [2, 1]
    # a pass of one end is never wider than what there is
    assert shares(*flat(lists), [0, 0], 50, [40], [1.0]) == [3, 2]


@pytest.mark.parametrize(
    ("counts", "ends", "ms"),
    [
        ([2, 0], [1], [1.0]),
        ([-1, 0], [1], [1.0]),
        ([0], [1], [1.0]),
        ([0, 0], [], []),
        ([0, 0], [2, 1], [1.0, 1.0]),
    ],
)
def test_numbers_out_of_range_are_refused(counts: list[int], ends: list[int], ms: list[float]):
    with pytest.raises(ValueError):
        shares(*flat([[0.5], [0.5]]), counts, 4, ends, ms)
    with pytest.raises(ValueError, match="3 gains for 2"):
        shares(np.zeros(3), [1, 1], [0, 0], 1, [1], [1.0])
