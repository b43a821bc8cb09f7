"""Tests of the calibration of a draft's probabilities by what the target chose."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_ggml.decode.accept import Accepted
from dflash_ggml.decode.calibration import Calibration
from reference.trees import best_first

# one candidate of 0.8 and one of 0.1 at each of three depths
TREE = best_first(0, np.array([[1, 2]] * 3), np.log(np.array([[0.8, 0.1]] * 3, np.float32)), 8)
SPINE = (
    0,
    *(
        i
        for i in range(1, TREE.width)
        if TREE.log_probs[i] == max(TREE.log_probs[TREE.depths == TREE.depths[i]])
    ),
)


def walked(path: tuple[int, ...], last: int | None = None) -> Accepted:
    """A walk over these nodes; its tokens do not matter here."""
    return Accepted(path, (0,) * len(path), last is not None, last)


def test_the_last_token_of_a_sequence_counts_as_accepted():
    """Its node was right, though the walk did not go there; of what would have followed nothing is known."""
    ended, went_on = Calibration(), Calibration()
    for _ in range(40):
        ended.observe(TREE, walked(SPINE[:1], SPINE[1]))
        went_on.observe(TREE, walked(SPINE[:2]))
    assert ended.path_probabilities(TREE)[SPINE[1]] > 0.9
    assert went_on.path_probabilities(TREE)[SPINE[2]] < 0.3 * ended.path_probabilities(TREE)[SPINE[2]]


def test_without_samples_the_drafts_word_stands():
    assert Calibration().path_probabilities(TREE) == pytest.approx(np.exp(TREE.log_probs), rel=1e-5)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.95])
def test_it_comes_to_what_is_seen(share):
    rng, known = np.random.default_rng(1), Calibration()
    estimates = []
    for _ in range(1500):
        estimates.append(known.path_probabilities(TREE)[SPINE[1]])
        known.observe(TREE, walked(SPINE[:2] if rng.random() < share else (0,)))
    assert np.mean(estimates[500:]) == pytest.approx(share, abs=0.06)


def test_a_change_of_acceptance_is_followed_at_all_depths():
    """Deep nodes are not visited any more once the first is wrong, and believed again when it is right."""
    known = Calibration()
    for _ in range(200):
        known.observe(TREE, walked(SPINE))
    easy = known.path_probabilities(TREE)
    for _ in range(60):
        known.observe(TREE, walked((0,)))
    hard = known.path_probabilities(TREE)
    assert easy[SPINE[3]] > 0.85 and hard[SPINE[1]] < 0.4
    assert hard[SPINE[3]] / hard[SPINE[2]] < 0.995 * easy[SPINE[3]] / easy[SPINE[2]]
    for _ in range(60):
        known.observe(TREE, walked(SPINE))
    assert known.path_probabilities(TREE)[SPINE[3]] > 0.7


def test_a_new_sequence_starts_from_what_others_taught():
    shared = Calibration()
    first = Calibration(shared)
    for _ in range(300):
        first.observe(TREE, walked((0,)))
    second = Calibration(shared)
    before = Calibration().path_probabilities(TREE)[SPINE[1]]
    assert second.path_probabilities(TREE)[SPINE[1]] < 0.1 * before and second.native.trend == 0
    n = sum(shared.native.tried)
    second.observe(TREE, walked(SPINE[:2]))
    assert sum(shared.native.tried) > n - 1 and sum(second.native.tried) == 4


def test_probabilities_stay_probabilities():
    rng, known = np.random.default_rng(2), Calibration()
    for _ in range(400):
        rows = np.sort(rng.exponential(2.0, (6, 4)), 1).astype(np.float32)
        rows = -rows - np.log(np.exp(-rows).sum(1, keepdims=True)).clip(0)
        tree = best_first(0, np.arange(24).reshape(6, 4), rows, int(rng.integers(0, 20)))
        p = np.array(known.path_probabilities(tree))
        assert p[0] == 1 and (p >= 0).all() and np.isfinite(p).all()
        parents = tree.parents[1:]
        assert (p[1:] <= p[parents] + 1e-12).all()
        path = [0]
        while len(children := np.flatnonzero(tree.parents == path[-1])) and rng.random() < 0.8:
            path.append(int(rng.choice(children)))
        known.observe(tree, walked(tuple(path)))
    assert (np.array(list(known.native.hits)) <= np.array(list(known.native.tried)) + 1e-9).all()


@pytest.mark.parametrize("nodes", range(TREE.width))
def test_the_first_nodes_are_a_tree(nodes: int):
    small = TREE.first(nodes)
    assert small.n_nodes == nodes and small.parents[0] == -1
    assert all(parent < node for node, parent in enumerate(small.parents))
    whole = (TREE.tokens, TREE.parents, TREE.depths, TREE.log_probs)
    for part, all_of_it in zip(
        (small.tokens, small.parents, small.depths, small.log_probs), whole, strict=True
    ):
        assert (part == all_of_it[: nodes + 1]).all()
