"""Tests of the n-gram index against a search of all positions."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_ggml.decode.native import ffi
from dflash_ggml.decode.ngram_index import ENOUGH, LONGEST, Continuations, NgramIndex
from reference import ngram_index as reference

TEXTS = st.lists(st.integers(0, 3), max_size=60)


def lengths(text: list[int], tail: list[int]) -> dict[int, int]:
    """From the definition: position -> tokens that match before it."""
    found = {}
    for position in range(1, len(text) + 1):
        n = 0
        while n < min(position, len(tail), LONGEST) and text[position - 1 - n] == tail[-1 - n]:
            n += 1
        if n:
            found[position] = n
    return found


def check(index: NgramIndex, text: list[int], tail: list[int]) -> None:
    assert index.ids.tolist() == text
    every, found = lengths(text, tail), index.find(tail)
    assert all(every[position] == length for position, length in found)
    positions = [position for position, _ in found]
    assert positions == sorted(positions, reverse=True)
    longest = max(every.values(), default=0)
    if longest >= reference.ORDERS[-1]:
        assert found
        order = next(order for order in reference.ORDERS if longest >= order)
        newest = max(position for position, length in every.items() if length >= order)
        if (
            order == reference.ORDERS[-1]
        ):  # hops may end among other n-grams of the same hash, not in so short a sequence
            assert newest == found[0][0]


@given(TEXTS, st.lists(TEXTS, max_size=5), st.data())
def test_positions_and_lengths_are_right_after_any_changes(first, more, data):
    index, text = NgramIndex(), list(first)
    index.extend(first)
    for part in more:
        keep = data.draw(st.integers(0, len(text)))
        index.cut(keep)
        text = text[:keep] + part
        index.extend(part)
        check(index, text, [*text, 1][-LONGEST:])
        check(index, text, [3, 2, 1, 0])


# ids of few kinds, whose positions are many, and of 31 bits, where hashes meet
IDS = st.one_of(st.integers(0, 2), st.integers(0, 40), st.integers(0, 2**31 - 1))


@given(st.integers(0, 2**32), st.sampled_from([3, 40, 2**31]), st.data())
def test_positions_are_those_of_plain_python(seed, kinds, data):
    rng = np.random.default_rng(seed)
    index, plain = NgramIndex(), reference.NgramIndex()
    for n in data.draw(st.lists(st.integers(0, 1500), min_size=1, max_size=4)):
        part = rng.integers(0, kinds, n).tolist()
        index.extend(part)
        plain.extend(part)
        keep = len(index) - int(rng.integers(0, n + 1)) if rng.random() < 0.5 else len(index)
        index.cut(keep)
        plain.cut(keep)
        assert len(index) == len(plain.ids) and index.ids.tolist() == plain.ids.tolist()
        for end in rng.integers(0, keep + 1, 20).tolist():
            tail = [*plain.ids[max(end - LONGEST, 0) : end], *data.draw(st.lists(IDS, max_size=1))]
            if tail:
                assert index.find(tail) == plain.find(tail)


@given(st.integers(0, 2**32), st.integers(0, 400), st.integers(0, 200), st.integers(1, 40))
def test_what_followed_is_that_of_plain_python(seed, n, n_past, depth):
    rng = np.random.default_rng(seed)
    kinds = int(rng.choice([2, 4, 30]))
    indices, plain = (NgramIndex(), NgramIndex()), (reference.NgramIndex(), reference.NgramIndex())
    for i, length in enumerate((n, n_past)):
        part = rng.integers(0, kinds, length).tolist()
        indices[i].extend(part)
        plain[i].extend(part)
    for most in (6, 3):
        for pending in range(min(kinds, 4)):
            found = Continuations(most, depth).of(*indices, pending)
            windows, lengths = reference.continuations(*plain, pending, depth, most)
            if found is None:
                assert not windows
                continue
            followed, ends, matched = (part.tolist() for part in found)
            assert [row[:end] for row, end in zip(followed, ends, strict=True)] == windows
            assert matched == lengths and len(windows) <= most


def test_a_text_that_grows_in_one_piece_or_in_many_is_the_same():
    rng = np.random.default_rng(0)
    text = rng.integers(0, 30, 3000).tolist()
    whole, single = NgramIndex(), NgramIndex()
    whole.extend(text)
    for token in text:
        single.extend([token])
    for end in range(2, len(text), 7):
        assert whole.find(text[max(end - LONGEST, 0) : end]) == single.find(text[max(end - LONGEST, 0) : end])


def test_cutting_back_leaves_what_there_was():
    rng = np.random.default_rng(1)
    text = rng.integers(0, 40, 700).tolist()
    kept, other = NgramIndex(), NgramIndex()
    kept.extend(text[:500])
    other.extend(text)
    other.cut(660)
    other.cut(500)
    tails = [text[i : i + 9] for i in range(690)]
    assert [kept.find(tail) for tail in tails] == [other.find(tail) for tail in tails]
    other.cut(0)
    assert len(other) == 0 and not any(other.find(tail) for tail in tails)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_interrupted_growth_leaves_tokens_and_memory_unchanged(at, error, monkeypatch):
    made, calls, real = [], 0, np.zeros

    def zeros(*args):
        nonlocal calls
        calls += 1
        if calls == at:
            raise error
        array = real(*args)
        made.append(weakref.ref(array))
        return array

    calls = -10
    monkeypatch.setattr(np, "zeros", zeros)
    index, text = NgramIndex(), [i * i % 37 for i in range(900)]
    index.extend(text)
    calls = 0
    with pytest.raises(error):
        index.extend(list(range(2000)))  # which needs longer tables
    monkeypatch.undo()
    spans = [(a.ctypes.data, a.ctypes.data + a.nbytes) for ref in made if (a := ref()) is not None]
    native = index.native
    for pointer in (native.ids, *native.newest, *native.before):
        address = int(ffi.cast("uintptr_t", pointer))
        assert any(start <= address < end for start, end in spans)
    assert index.ids.tolist() == text
    whole = NgramIndex()
    for one in (index, whole):
        one.cut(100)
        one.extend(text[:100] * 30)
    whole.cut(0)
    whole.extend(index.ids.tolist())
    assert index.find(text[:60]) == whole.find(text[:60])


def test_memory_stays_bounded_at_every_length():
    index = NgramIndex()
    for _ in range(300):
        index.extend([1, 2, 3, 4, 5, 6, 7] * 13)
        assert index.nbytes <= 29 * len(index) + (1 << 14)


def test_memory_is_bounded_and_few_positions_are_compared():
    index = NgramIndex()
    index.extend([5] * 50_000)
    assert index.nbytes <= 29 * 50_000 + (1 << 14)
    found = index.find([5] * LONGEST)
    assert sum(length for _, length in found) <= ENOUGH + LONGEST
    assert index.shared([5] * 10) == 10 and index.shared([5, 5, 6]) == 2 and index.shared([]) == 0
