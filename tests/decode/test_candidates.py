"""Tests of candidates with pair scores: the tree that they grow, against an enumeration of all paths."""

from __future__ import annotations

import itertools
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_ggml.decode import tree as tree_module
from dflash_ggml.decode.candidates import CandidateBlock, NonFiniteDraft
from dflash_ggml.decode.tree import BEST_FIRST, CHAIN_SEED, SPINE, Tree, expand, grow, spine


def rows_of(seed: int, depths: int, ranks: int) -> CandidateBlock:
    rng = np.random.default_rng(seed)
    log_probs = -np.sort(rng.exponential(size=(depths, ranks)), axis=1).astype(np.float32)
    ids = np.array([rng.permutation(50)[:ranks] for _ in range(depths)], np.int32)
    return CandidateBlock(ids, log_probs)


def paired(seed: int, depths: int, ranks: int) -> CandidateBlock:
    rows, rng = rows_of(seed, depths, ranks), np.random.default_rng(seed + 1)
    return CandidateBlock(rows.ids, rows.log_probs, 2 * rng.normal(size=(depths, ranks, ranks)))


def paths(rows: CandidateBlock) -> dict[tuple[int, ...], float]:
    """Every path and its log-probability, from the definition."""
    found = {}
    depths, ranks = rows.ids.shape
    for length in range(1, depths + 1):
        for path in itertools.product(range(ranks), repeat=length):
            total, before = 0.0, 0
            for depth, index in enumerate(path):
                scores = rows.log_probs[depth].astype(float) + rows.pairs[depth, before]
                mass = np.log(min(1, np.exp(rows.log_probs[depth].astype(float)).sum()))
                total += scores[index] - np.log(np.exp(scores).sum()) + mass
                before = index
            found[tuple(int(rows.ids[d, i]) for d, i in enumerate(path))] = total
    return found


def tokens_of(tree: Tree, node: int) -> tuple[int, ...]:
    out = []
    while node:
        out.append(int(tree.tokens[node]))
        node = int(tree.parents[node])
    return tuple(reversed(out))


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 4), st.integers(1, 30))
def test_pair_scores_give_the_most_probable_paths(seed, depths, ranks, budget):
    rows = paired(seed, depths, ranks)
    everything = paths(rows)
    tree = expand(0, rows, budget)
    best = sorted(everything.values(), reverse=True)[:budget]
    assert tree.n_nodes == len(best)
    np.testing.assert_allclose(tree.log_probs[1:], best, atol=1e-4)
    for node in range(1, tree.width):
        assert tree.log_probs[node] == pytest.approx(everything[tokens_of(tree, node)], abs=1e-4)


@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 4), st.integers(0, 8))
def test_the_spine_takes_the_best_child_each_time(seed, depths, ranks, length):
    rows = paired(seed, depths, ranks)
    tree, before = spine(9, rows, length), 0
    assert tree.n_nodes == min(depths, length) and tree.parents.tolist() == list(range(-1, tree.n_nodes))
    for depth in range(tree.n_nodes):
        before = int((rows.log_probs[depth] + rows.pairs[depth, before]).argmax())
        assert tree.tokens[depth + 1] == rows.ids[depth, before]


def test_a_seeded_tree_of_pairs_begins_with_the_spine():
    rows = paired(3, 5, 3)
    tree = expand(1, rows, 20, chain_seed=True)
    assert np.array_equal(tree.tokens[:6], spine(1, rows, 5).tokens)
    rest = tree.log_probs[6:]
    assert (np.diff(rest) <= 1e-6).all()


def test_blocks_keep_what_is_read_in_c():
    ids, log_probs = np.zeros((2, 2), np.int32), np.log(np.full((2, 2), 0.5, np.float32))
    rows = CandidateBlock(ids, log_probs, np.zeros((2, 2, 2), np.float32))
    kept = weakref.ref(rows.pairs)
    rows.pairs = None
    assert kept() is not None


@pytest.mark.parametrize("order", [BEST_FIRST, CHAIN_SEED, SPINE])
def test_budgets_beyond_the_candidates_allocate_nothing(order, monkeypatch):
    candidates = rows_of(0, 3, 2)
    every = grow(0, candidates, 14, order)
    for room in (1, 2, 3, 14, 4096):
        monkeypatch.setattr(tree_module, "_INITIAL_NODES", room)
        tree = grow(0, candidates, 10**12, order)
        assert tree.tokens.tolist() == every.tokens.tolist()
        assert tree.parents.tolist() == every.parents.tolist()
        assert tree.log_probs.tolist() == every.log_probs.tolist()


@pytest.mark.parametrize("budget", [-1, -5])
def test_a_negative_budget_is_refused(budget):
    with pytest.raises(ValueError, match="budget"):
        expand(0, rows_of(0, 2, 2), budget)


@pytest.mark.parametrize(
    ("pairs", "error"), [(np.zeros((2, 3, 2)), ValueError), (np.full((2, 3, 3), np.nan), NonFiniteDraft)]
)
def test_pairs_are_checked(pairs, error):
    rows = rows_of(0, 2, 3)
    with pytest.raises(error, match="pairs"):
        CandidateBlock(rows.ids, rows.log_probs, pairs)


def test_impossible_children_are_left_out():
    rows = CandidateBlock([[1, 2]], [[-0.1, -np.inf]])
    assert expand(0, rows, 5).n_nodes == 1
    certain = np.full((1, 2, 2), -np.inf, np.float32)
    assert expand(0, CandidateBlock([[1, 2]], [[-1, -2]], certain), 5).n_nodes == 0
