"""The index of a text's n-grams, against looking at all places."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dflash_ggml.decode.text_index import BULK, ENOUGH, LONGEST, ORDERS, TextIndex

TEXTS = st.lists(st.integers(0, 3), max_size=60)


def lengths(text: list[int], tail: list[int]) -> dict[int, int]:
    """From the definition: place -> tokens that match before it."""
    found = {}
    for place in range(1, len(text) + 1):
        n = 0
        while n < min(place, len(tail), LONGEST) and text[place - 1 - n] == tail[-1 - n]:
            n += 1
        if n:
            found[place] = n
    return found


def check(index: TextIndex, text: list[int], tail: list[int]) -> None:
    assert index.ids.tolist() == text
    every, found = lengths(text, tail), index.find(tail)
    assert all(every[place] == length for place, length in found)
    places = [place for place, _ in found]
    assert places == sorted(places, reverse=True)
    longest = max(every.values(), default=0)
    if longest >= ORDERS[-1]:
        assert found
        order = next(order for order in ORDERS if longest >= order)
        newest = max(place for place, length in every.items() if length >= order)
        if order == ORDERS[-1]:  # hops may end among other texts of the same hash, not in so short a one
            assert newest == found[0][0]


@given(TEXTS, st.lists(TEXTS, max_size=5), st.data())
def test_places_and_lengths_are_right_whatever_came_before(first, more, data):
    index, text = TextIndex(), list(first)
    index.extend(first)
    for part in more:
        keep = data.draw(st.integers(0, len(text)))
        index.cut(keep)
        text = text[:keep] + part
        index.extend(part)
        check(index, text, [*text, 1][-LONGEST:])
        check(index, text, [3, 2, 1, 0])


def test_a_loop_and_arrays_make_the_same_index():
    rng = np.random.default_rng(0)
    text = rng.integers(0, 30, 4 * BULK).tolist()
    whole, single = TextIndex(), TextIndex()
    whole.extend(text)
    for token in text:
        single.extend([token])
    for end in range(2, len(text)):
        assert whole.find(text[max(end - LONGEST, 0) : end]) == single.find(text[max(end - LONGEST, 0) : end])


def test_cutting_back_leaves_what_there_was():
    rng = np.random.default_rng(1)
    text = rng.integers(0, 40, 700).tolist()
    kept, other = TextIndex(), TextIndex()
    kept.extend(text[:500])
    other.extend(text)
    other.cut(660)
    other.cut(500)
    tails = [text[i : i + 9] for i in range(690)]
    assert [kept.find(tail) for tail in tails] == [other.find(tail) for tail in tails]
    other.cut(0)
    assert len(other) == 0 and not any(other.find(tail) for tail in tails)


def test_memory_is_bounded_and_few_places_are_looked_at():
    index = TextIndex()
    index.extend([5] * 50_000)
    assert index.nbytes <= 28 * 50_000 + (1 << 14)
    found = index.find([5] * LONGEST)
    assert sum(length for _, length in found) <= ENOUGH + LONGEST
    assert index.shared([5] * 10) == 10 and index.shared([5, 5, 6]) == 2 and index.shared([]) == 0
