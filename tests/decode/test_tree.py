"""Tests of draft trees against brute force, and of the invariants that the verify pass relies on."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_ggml.decode.tree import Tree, observers
from reference.trees import best_first, chain


def candidates(seed: int, n_depths: int, n_ranks: int, n_vocab: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """The n_ranks best tokens of n_depths random distributions: ids and log-probabilities [L, K]."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=rng.uniform(0.1, 5), size=(n_depths, n_vocab))
    log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    ids = np.argsort(-log_probs, axis=1)[:, :n_ranks].astype(np.int32)
    return ids, np.take_along_axis(log_probs, ids, axis=1).astype(np.float32)


def path_of(tree: Tree, node: int) -> tuple[int, ...]:
    tokens = []
    while node > 0:
        tokens.append(int(tree.tokens[node]))
        node = tree.parents[node]
    return tuple(reversed(tokens))


def assert_equal(a: Tree, b: Tree) -> None:
    for name in ("tokens", "parents", "depths", "log_probs"):
        x, y = getattr(a, name), getattr(b, name)
        assert x.dtype == y.dtype and x.tobytes() == y.tobytes(), name


shapes = st.tuples(st.integers(0, 2**32), st.integers(1, 15), st.integers(1, 8))
budgets = st.integers(0, 80)


@given(shapes, budgets, st.booleans())
def test_every_tree_is_well_formed(shape: tuple[int, int, int], budget: int, chain_seed: bool) -> None:
    _, n_depths, n_ranks = shape
    ids, log_probs = candidates(*shape)
    tree = best_first(7, ids, log_probs, budget, chain_seed)

    available = sum(n_ranks**depth for depth in range(1, n_depths + 1))
    assert tree.n_nodes == min(budget, available) == tree.width - 1
    assert (tree.tokens[0], tree.parents[0], tree.depths[0], tree.log_probs[0]) == (7, -1, 0, 0)
    assert [a.dtype for a in (tree.tokens, tree.parents, tree.depths)] == [np.int32] * 3
    assert tree.log_probs.dtype == np.float32

    paths = [path_of(tree, node) for node in range(tree.width)]
    assert len(set(paths)) == tree.width, "a path was added twice"
    for node in range(1, tree.width):
        parent = tree.parents[node]
        assert 0 <= parent < node
        assert tree.depths[node] == tree.depths[parent] + 1 == len(paths[node]) <= n_depths
        ranks = [list(ids[depth]).index(token) for depth, token in enumerate(paths[node])]
        expected = sum(float(log_probs[depth, rank]) for depth, rank in enumerate(ranks))
        assert tree.log_probs[node] == pytest.approx(expected, abs=1e-4)
        # Better siblings come first: a node of rank r > 0 has its sibling of rank r - 1 before it.
        if ranks[-1]:
            sibling = (*paths[node][:-1], int(ids[len(ranks) - 1, ranks[-1] - 1]))
            assert sibling in paths[:node]


@given(shapes, budgets)
def test_nodes_come_in_falling_order_of_probability(shape: tuple[int, int, int], budget: int) -> None:
    tree = best_first(0, *candidates(*shape), budget)
    assert (np.diff(tree.log_probs) <= 0).all()


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 4), st.integers(0, 40))
def test_best_first_equals_brute_force(seed: int, n_depths: int, n_ranks: int, budget: int) -> None:
    ids, log_probs = candidates(seed, n_depths, n_ranks)
    scored = []
    for depth in range(1, n_depths + 1):
        for ranks in itertools.product(range(n_ranks), repeat=depth):
            score = sum(float(log_probs[d, r]) for d, r in enumerate(ranks))
            scored.append((-score, tuple(int(ids[d, r]) for d, r in enumerate(ranks))))
    expected = [path for _, path in sorted(scored)[:budget]]
    tree = best_first(0, ids, log_probs, budget)
    assert [path_of(tree, node) for node in range(1, tree.width)] == expected


@given(st.integers(0, 2**32), st.integers(1, 15), budgets)
def test_one_candidate_gives_the_chain(seed: int, n_depths: int, budget: int) -> None:
    ids, log_probs = candidates(seed, n_depths, 1)
    expected = chain(3, ids, log_probs, length=budget)
    assert_equal(best_first(3, ids, log_probs, budget), expected)
    assert_equal(best_first(3, ids, log_probs, budget, chain_seed=True), expected)
    assert_equal(chain(3, ids[:, 0], log_probs[:, 0], length=budget), expected)


@given(shapes, budgets)
def test_chain_seed_puts_the_spine_first(shape: tuple[int, int, int], budget: int) -> None:
    ids, log_probs = candidates(*shape)
    tree = best_first(3, ids, log_probs, budget, chain_seed=True)
    spine = min(len(ids), budget)
    assert_equal(
        Tree(*(getattr(tree, name)[: spine + 1] for name in ("tokens", "parents", "depths", "log_probs"))),
        chain(3, ids, log_probs, length=spine),
    )
    # The rest: the best paths that are not on the spine, in falling order.
    on_spine = {path_of(tree, node) for node in range(spine + 1)}
    unseeded = best_first(3, ids, log_probs, budget + spine)
    others = [path for node in range(unseeded.width) if (path := path_of(unseeded, node)) not in on_spine]
    rest = [path_of(tree, node) for node in range(spine + 1, tree.width)]
    assert rest == others[: budget - spine]


def test_ties_go_to_the_smaller_depth_then_the_older_parent() -> None:
    ids = np.array([[1, 2], [3, 4]], np.int32)
    half = np.full((2, 2), np.log(0.5), np.float32)
    assert best_first(0, ids, half, 6).parents.tolist() == [-1, 0, 0, 1, 1, 2, 2]
    certain = np.array([[0, -5], [0, -5]], np.float32)
    assert best_first(0, ids, certain, 3).tokens.tolist() == [0, 1, 3, 2]


def test_impossible_paths_are_left_out() -> None:
    ids = np.array([[1, 2], [3, 4]], np.int32)
    log_probs = np.array([[0, -np.inf], [-0.1, -np.inf]], np.float32)
    for chain_seed in (False, True):
        assert best_first(0, ids, log_probs, 6, chain_seed).tokens.tolist() == [0, 1, 3]


def test_no_depths_leave_the_root() -> None:
    empty = np.zeros((0, 4), np.int32), np.zeros((0, 4), np.float32)
    trees = [best_first(9, *empty, 5, chain_seed=seeded) for seeded in (False, True)]
    for tree in (*trees, chain(9, []), chain(9, [1], length=0)):
        assert tree.n_nodes == 0 and tree.tokens.tolist() == [9] and tree.log_probs.tolist() == [0]


@pytest.mark.parametrize(
    ("log_probs", "word"),
    [
        (np.zeros((2, 2), np.float32), "shape|must both"),
        (np.array([[-2, -1, -3]], np.float32), "fall"),
        (np.array([[-1, np.nan, -3]], np.float32), "NaN"),
        (np.array([[8, 3, -3]], np.float32), "above 0"),
    ],
)
def test_bad_candidates_are_refused(log_probs: np.ndarray, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        best_first(0, np.zeros((1, 3), np.int32), log_probs, 4)


def test_bad_sizes_are_refused() -> None:
    ids, log_probs = candidates(0, 3, 2)
    with pytest.raises(ValueError, match="budget"):
        best_first(0, ids, log_probs, -1)
    with pytest.raises(ValueError, match="length"):
        chain(0, ids, log_probs, length=-1)
    with pytest.raises(ValueError, match="must both"):
        chain(0, ids, log_probs[:2])


def visible(bits: np.ndarray) -> np.ndarray:
    """What each node attends to, row by row, from who attends to each node."""
    return np.unpackbits(bits, axis=1, count=len(bits), bitorder="little").T.astype(bool)


@given(shapes, st.integers(0, 140), st.integers(0, 9))
def test_nodes_are_observed_by_themselves_and_what_descends(
    shape: tuple[int, int, int], budget: int, extra: int
) -> None:
    tree = best_first(0, *candidates(*shape), budget)
    expected = np.eye(tree.width + extra, dtype=bool)
    for node in range(tree.width):
        ancestor = node
        while ancestor >= 0:
            expected[node, ancestor] = True
            ancestor = tree.parents[ancestor]
    bits = observers(tree, tree.width + extra)
    assert bits.dtype == np.uint8 and bits.shape == (len(expected), -(-len(expected) // 8))
    assert (visible(bits) == expected).all()
    assert (visible(observers(tree.parents)) == expected[: tree.width, : tree.width]).all()


def test_observers_of_several_roots() -> None:
    assert visible(observers([-1, -1, 1])).tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 1]]


def test_observers_refuse_parents_after_their_children() -> None:
    for parents in ([-1, 1], [0], [-1, 2, 0], [-2]):
        with pytest.raises(ValueError, match="parents"):
            observers(parents)
