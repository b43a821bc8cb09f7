"""Tests of learning from accepted paths in C against the Python reference, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_ggml.decode.accept import Accepted
from dflash_ggml.decode.calibration import Calibration, count_votes, path_probabilities
from dflash_ggml.decode.candidates import CandidateBlock
from dflash_ggml.decode.lookup import LookupRates, Merged
from dflash_ggml.decode.tree import Tree, expand
from reference import calibrated, native_lookup, voting

seeds = st.integers(0, 2**32)


def tree_of(rng: np.random.Generator, rates: LookupRates) -> Tree:
    """A tree of a draft, usually merged with prompt lookup, and cut now and then."""
    depths, budget = int(rng.integers(1, 12)), int(rng.integers(0, 40))
    scores = -np.sort(rng.exponential(size=(depths, 4)), axis=1)
    scores -= np.log(np.exp(scores).sum(1, keepdims=True)) * rng.random()
    ids = np.array([rng.permutation(9)[:4] for _ in range(depths)], np.int32)
    rows = CandidateBlock(ids, np.minimum(scores, 0).astype(np.float32))
    if rng.random() < 0.3:
        tree = expand(0, rows, budget)
    else:
        n, depth = int(rng.integers(1, 5)), int(rng.integers(1, 16))
        windows = [rng.integers(0, 9, depth).tolist() for _ in range(n)]
        for window in windows[1:]:
            window[:3] = windows[0][:3]
        draft = rows if rng.random() < 0.8 else None
        tree = expand(
            0,
            Merged(draft, native_lookup.candidates(windows, rng.integers(2, 40, n).tolist(), depth), rates),
            budget,
        )
    return tree.first(int(rng.integers(0, tree.width)))


def walked(rng: np.random.Generator, tree: Tree) -> Accepted:
    """A walk that continues more often than not, and may end with a node that was drafted."""
    path = [0]
    while len(children := np.flatnonzero(tree.parents == path[-1])) and rng.random() < 0.7:
        path.append(int(rng.choice(children[:3])))
    last = path.pop() if len(path) > 1 and rng.random() < 0.2 else None
    return Accepted(tuple(path), (0,) * len(path), last is not None, last)


def same(a: LookupRates, b: voting.LookupRates) -> None:
    known = b if b._prior is None else b._prior
    assert (a.native.trend, a.trust) == (b.trend, b.trust)
    assert native_lookup.all_rates(a) == voting.LookupRates.rates.fget(b)  # type: ignore[attr-defined]
    assert list(a.native.tried) == b._tried and list(a.native.hits) == b._hits
    if a._prior is not None and b._prior is not None:
        assert (list(a._prior.native.own), a._prior.native.draft_promised) == (
            known._own,
            known._draft_promised,
        )


@given(seeds, st.booleans())
def test_walks(seed: int, is_first: bool) -> None:
    """Alone, and after other sequences: calibration, rates of prompt lookup, and the gains expected of the next tree."""
    rng = np.random.default_rng(seed)
    known, known_in_python = Calibration(), calibrated.Calibration()
    rates, rates_in_python = LookupRates(), voting.LookupRates()
    if not is_first:
        known, known_in_python = Calibration(known), calibrated.Calibration(known_in_python)
        rates, rates_in_python = LookupRates(rates), voting.LookupRates(rates_in_python)
    for _ in range(12):
        tree = tree_of(rng, rates)
        with_lists = tree if tree.evidence is None else voting.with_lists(tree)
        found = known.path_probabilities(tree)
        assert found.tolist() == known_in_python.path_probabilities(with_lists)
        accepted = walked(rng, tree)
        known.observe(tree, accepted)
        known_in_python.observe(with_lists, accepted)
        assert known.native.trend == known_in_python.trend
        assert (list(known.native.hits), list(known.native.tried)) == (
            known_in_python.hits,
            known_in_python.tried,
        )
        if tree.evidence is not None:
            count_votes(tree, accepted, rates)
            voting.observe(with_lists, accepted, rates_in_python)
            same(rates, rates_in_python)


@given(seeds, st.integers(1, 6))
def test_batches_of_trees(seed: int, n: int) -> None:
    """Each has the gains that it has alone, merged ones too; without a calibration those of the draft's own probabilities."""
    rng, rates = np.random.default_rng(seed), LookupRates()
    trees = [tree_of(rng, rates) for _ in range(n)]
    known = [None if rng.random() < 0.3 else Calibration() for _ in trees]
    for one, tree in zip(known, trees):
        if one is not None:
            one.observe(tree, walked(rng, tree))
    found, at = path_probabilities(trees, known), 0
    for one, tree in zip(known, trees):
        here, at = found[at : at + tree.width], at + tree.width
        if one is None:
            np.testing.assert_allclose(here, np.exp(tree.log_probs.astype(np.float64)), rtol=1e-12)
        else:
            assert here.tolist() == one.path_probabilities(tree).tolist()
    assert at == len(found)


def test_invalid_batches_of_trees() -> None:
    with pytest.raises(ValueError, match="1 trees with 2 calibrations"):
        path_probabilities([MERGED], [None, None])
    with pytest.raises(ValueError, match="0 trees"):
        path_probabilities([], [])


@given(st.lists(st.tuples(st.integers(0, 209), st.booleans()), max_size=300), st.booleans())
def test_samples(samples: list[tuple[int, bool]], is_first: bool) -> None:
    rates, expected = LookupRates(), voting.LookupRates()
    if not is_first:
        rates, expected = LookupRates(rates), voting.LookupRates(expected)
    for start in range(0, len(samples), 7):
        native_lookup.learn(rates, samples[start : start + 7])
        expected.learn(samples[start : start + 7])
    same(rates, expected)


def test_many_samples_of_a_cell_fade() -> None:
    rates, expected = LookupRates(LookupRates()), voting.LookupRates(voting.LookupRates())
    for at in range(300):
        native_lookup.learn(rates, [(5, at % 3 == 0)])
        expected.learn([(5, at % 3 == 0)])
    assert rates.native.tried[5] < 201
    same(rates, expected)


TREE = expand(0, CandidateBlock([[1, 2]] * 3, [[-0.2, -2.0]] * 3), 6)
MERGED = expand(0, Merged(None, native_lookup.candidates([[1, 2, 3]], [9], 3), LookupRates()), 3)


def changed(tree: Tree, **parts: object) -> Tree:
    names = ("tokens", "parents", "depths", "log_probs", "sources", "evidence")
    return Tree(*[parts.get(name, getattr(tree, name)) for name in names])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "tree",
    [
        changed(TREE, parents=np.arange(TREE.width)),
        changed(TREE, parents=np.full(TREE.width, -5)),
        changed(TREE, depths=np.zeros(TREE.width)),
        changed(TREE, depths=TREE.depths[:2]),
        changed(
            MERGED, tokens=np.zeros(9), parents=np.arange(-1, 8), depths=np.arange(9), log_probs=np.zeros(9)
        ),
    ],
)
def test_what_is_no_tree_is_refused(tree: Tree) -> None:
    with pytest.raises(ValueError, match="parents|evidence"):
        Calibration().path_probabilities(tree)
    with pytest.raises(ValueError, match="parents|evidence"):
        Calibration().observe(tree, Accepted((0,), (1,)))


@pytest.mark.parametrize("learn", [Calibration().observe, lambda *args: count_votes(*args, LookupRates())])
@pytest.mark.parametrize("path", [(0, 99), (0, -1), (-7,)])
def test_a_walk_over_nodes_that_are_none_is_refused(
    learn: Callable[[Tree, Accepted], None], path: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="nodes"):
        learn(MERGED, Accepted(path, (1,) * len(path)))


@pytest.mark.parametrize("cell", [-1, 210])
def test_cells_that_are_none_are_refused(cell: int) -> None:
    rates = LookupRates()
    with pytest.raises(IndexError, match="cell"):
        native_lookup.learn(rates, [(3, True), (cell, True)])
    assert not any(rates.native.tried)


def test_likelihoods_of_a_chain_that_has_none() -> None:
    """Log-probabilities that a draft could not have given make no index out of them."""
    odd = np.array([0, np.nan, -np.inf, np.inf, -np.inf], np.float32)
    tree = Tree(*np.array([range(5), range(-1, 4), range(5)], np.int32), odd)
    known = Calibration()
    assert len(known.path_probabilities(tree)) == 5
    known.observe(tree, Accepted((0, 1, 2), (1, 2, 3)))
    assert sum(known.native.tried) == 3
