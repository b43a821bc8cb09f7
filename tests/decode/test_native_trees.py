"""Tests of growing trees in C against the Python reference, bit for bit."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_ggml.decode.calibration import Calibration
from dflash_ggml.decode.candidates import CandidateBlock, Candidates, CombinedCandidates
from dflash_ggml.decode.lookup import LookupCandidates, LookupRates, Merged
from dflash_ggml.decode.tree import Tree, expand, grow, observers, spine
from reference import merging, native_lookup, voting
from reference.trees import Pairs, grown, grown_of_rows, spine_of
from reference.trees import observers as observers_in_python

seeds = st.integers(0, 2**32)


def rows_of(rng: np.random.Generator, depths: int, ranks: int) -> CandidateBlock:
    """Rows with ties, and tokens of probability 0, now and then."""
    scores = -rng.exponential(size=(depths, ranks))
    if rng.random() < 0.5:
        scores = np.round(2 * scores) / 2
    scores[rng.random(scores.shape) < rng.choice([0.0, 0.3])] = -np.inf
    ids = rng.permuted(np.tile(np.arange(max(ranks, 12)), (depths, 1)), axis=1)[:, :ranks]
    return CandidateBlock(ids.astype(np.int32), -np.sort(-scores.astype(np.float32), axis=1))


def paired(rng: np.random.Generator, depths: int, ranks: int) -> CandidateBlock:
    rows = rows_of(rng, depths, ranks)
    pairs = rng.normal(size=(depths, ranks, ranks))
    pairs[rng.random(pairs.shape) < rng.choice([0.0, 0.3])] = -np.inf
    return CandidateBlock(rows.ids, rows.log_probs, pairs)


def several(rng: np.random.Generator, depths: int, ranks: int) -> CombinedCandidates:
    """Up to three blocks, some of which end before others, and in which everything is possible."""
    parts = []
    for _ in range(rng.integers(1, 4)):
        of = paired if rng.random() < 0.5 else rows_of
        rows = of(rng, int(rng.integers(0, depths + 1)), int(rng.integers(1, ranks + 1)))
        pairs = None if rows.pairs is None else np.maximum(rows.pairs, -9)
        parts.append(CandidateBlock(rows.ids, np.maximum(rows.log_probs, -9), pairs))
    return CombinedCandidates(parts)


def matches_of(rng: np.random.Generator, matches: int, depth: int) -> tuple[list[list[int]], list[int], int]:
    """Windows of matches, some of which agree for a while, and the lengths of their matches."""
    windows = [rng.integers(0, 12, rng.integers(1, depth + 3)).tolist() for _ in range(matches)]
    for window in windows[1:]:
        if rng.random() < 0.6:
            agreed = int(rng.integers(1, depth + 1))
            window[:agreed] = windows[0][: len(window)][:agreed]
    return windows, rng.integers(2, 49, matches).tolist(), depth


def rates_of(rng: np.random.Generator) -> tuple[LookupRates, voting.LookupRates]:
    """Rates with a history, in C and in Python."""
    first, second = LookupRates(), voting.LookupRates()
    both = (LookupRates(first), voting.LookupRates(second)) if rng.random() < 0.7 else (first, second)
    for _ in range(rng.integers(0, 6)):
        samples = [(int(cell), bool(rng.random() < 0.6)) for cell in rng.integers(0, 210, rng.integers(0, 9))]
        native_lookup.learn(both[0], samples)
        both[1].learn(samples)
    for _ in range(rng.integers(0, 4)):
        promised, is_right = float(rng.random()), bool(rng.random() < 0.3)
        voting.LookupRates.learn_trust(both[1], promised, is_right)
        first.native.draft_promised = second._draft_promised
        first.native.draft_right = second._draft_right
    return both


def assert_equal(a: Tree, b: Tree) -> None:
    names = ["tokens", "parents", "depths", "log_probs"]
    if b.sources is not None:
        names.append("sources")
    for name in names:
        x, y = getattr(a, name), getattr(b, name)
        assert x.dtype == y.dtype and x.tobytes() == y.tobytes(), name


@given(seeds, st.integers(0, 9), st.integers(1, 9), st.integers(0, 90), st.booleans())
def test_plain_rows(seed: int, depths: int, ranks: int, budget: int, chain_seed: bool) -> None:
    rows = rows_of(np.random.default_rng(seed), depths, ranks)
    lists = rows.ids.tolist(), rows.log_probs.tolist()
    expected = grown_of_rows(7, *lists, budget, chain_seed)
    assert_equal(expand(7, rows, budget, chain_seed), expected)
    assert_equal(grown(7, rows, budget, chain_seed), expected)


@given(seeds, st.integers(1, 6), st.integers(1, 9), st.integers(0, 60), st.booleans())
def test_rows_with_pairs(seed: int, depths: int, ranks: int, budget: int, chain_seed: bool) -> None:
    """Bit for bit as the same rows walked from Python; beside numpy's exponentials, which differ in the last place from libm's,
    the same probabilities."""
    rows = paired(np.random.default_rng(seed), depths, ranks)
    tree = expand(7, rows, budget, chain_seed)
    assert_equal(tree, grown(7, rows, budget, chain_seed))
    by_numpy = grown(7, Pairs(rows), budget, chain_seed)
    tree = expand(7, rows, budget, chain_seed)
    np.testing.assert_allclose(tree.log_probs, by_numpy.log_probs, atol=1e-5)


@given(seeds, st.integers(1, 6), st.integers(1, 9), st.integers(0, 60), st.booleans())
def test_several_blocks(seed: int, depths: int, ranks: int, budget: int, chain_seed: bool) -> None:
    blocks = several(np.random.default_rng(seed), depths, ranks)
    tree = expand(7, blocks, budget, chain_seed)
    assert_equal(tree, grown(7, blocks, budget, chain_seed))
    assert_equal(spine(7, blocks, budget), spine_of(7, blocks, budget))


@given(seeds, st.integers(0, 6), st.integers(1, 6), st.integers(0, 9))
def test_chains(seed: int, depths: int, ranks: int, length: int) -> None:
    rng = np.random.default_rng(seed)
    for rows in (rows_of(rng, depths, ranks), paired(rng, depths, ranks)):
        possible = CandidateBlock(rows.ids, np.maximum(rows.log_probs, -50), rows.pairs)
        assert_equal(spine(7, possible, length), spine_of(7, possible, length))


def test_a_chain_ends_where_nothing_is_possible() -> None:
    rows = CandidateBlock([[1, 2], [3, 4]], [[-1, -2], [-np.inf, -np.inf]])
    assert spine(0, rows, 5).tokens.tolist() == [0, 1]


def test_a_tree_can_be_copied_and_written() -> None:
    """What C knows of where it lies stays behind."""
    tree = expand(0, Merged(None, native_lookup.candidates([[1, 2, 3]], [9], 3), LookupRates()), 3).first(2)
    for other in (
        copy.deepcopy(tree),
        pickle.loads(pickle.dumps(tree)),
        replace(tree, depths=tree.depths.copy()),
    ):
        assert_equal(other, tree)
        assert other.native is None and tree.native is not None
        assert (observers(other) == observers(tree)).all()
        found = Calibration().path_probabilities(other)
        assert (found == Calibration().path_probabilities(tree)).all() and len(found) == 3


def test_rows_that_are_views_of_a_wider_block() -> None:
    rows = rows_of(np.random.default_rng(1), 6, 9)
    ids, log_probs = rows.ids[::2, :5], rows.log_probs[::2, :5]
    copied = CandidateBlock(ids.copy(), log_probs.astype(np.float64))
    assert not ids.flags.c_contiguous
    assert_equal(expand(7, CandidateBlock(ids, log_probs), 30), expand(7, copied, 30))


@given(
    seeds,
    st.sampled_from(["none", "plain", "pairs", "several"]),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(0, 60),
    st.sampled_from(["best", "seeded", "spine"]),
)
def test_merged_trees(seed: int, kind: str, depths: int, matches: int, budget: int, order: str) -> None:
    rng = np.random.default_rng(seed)
    drafts: dict[str, Candidates | None] = {"none": None, "plain": rows_of(rng, depths, 5)}
    drafts["pairs"] = paired(rng, depths, 5)
    drafts["several"] = several(rng, depths, 5)
    draft = drafts[kind]
    windows = matches_of(rng, matches, int(rng.integers(1, 20)))
    rates, rates_in_python = rates_of(rng)
    merged = Merged(draft, native_lookup.candidates(*windows), rates)
    expected_of = merging.Merged(draft, voting.LookupCandidates(*windows), rates_in_python)
    if order == "spine":
        tree, expected = spine(7, merged, budget), expected_of.spine(7, budget)
    else:
        tree = expand(7, merged, budget, order == "seeded")
        expected = expected_of.grow(7, budget, order == "seeded")
    assert_equal(tree, expected)
    found, known = tree.evidence, expected.evidence
    assert found is not None and known is not None and found.trust == known.trust
    assert found.cells[: tree.width].tolist() == list(known.cells)
    # of the last node, whose children are in no tree, C knows nothing
    rests = [known.rests.get(node, 0.0) for node in range(tree.width)]
    assert found.rests[: tree.n_nodes].tolist() == rests[:-1]


@given(seeds, st.integers(1, 6), st.integers(1, 20))
def test_votes(seed: int, matches: int, depth: int) -> None:
    rng = np.random.default_rng(seed)
    windows = matches_of(rng, matches, depth)
    looked_up, expected = native_lookup.candidates(*windows), voting.LookupCandidates(*windows)
    open_ = [(native_lookup.root_of(looked_up), expected.root)]
    while open_:
        cursor, cursor_in_python = open_.pop()
        votes = native_lookup.votes(looked_up, cursor), expected.votes(cursor_in_python)
        assert [vote[:2] for vote in votes[0]] == [vote[:2] for vote in votes[1]]
        open_ += [(a[2], b[2]) for a, b in zip(*votes)]


def test_sizes_of_lookup_candidates_are_checked() -> None:
    assert len(native_lookup.votes(native_lookup.candidates([[1]] * 64, [2] * 64, 1), (0, 2**64 - 1))) == 1
    for windows, lengths in (([[1]] * 65, [2] * 65), ([[1]], [2, 3]), ([[1]], [-1])):
        with pytest.raises(ValueError, match="lengths"):
            native_lookup.candidates(windows, lengths, 1)
    block = np.zeros((2, 3), np.int32)
    with pytest.raises(ValueError, match="ends"):
        LookupCandidates(block, np.array([3, 4], np.int32), np.array([2, 2], np.int32))
    assert native_lookup.windows_of(
        LookupCandidates(block, np.array([3, 0], np.int32), np.array([2, 2], np.int32))
    ) == [
        [0] * 3,
        [],
    ]


@given(st.lists(st.integers(-1, 20), min_size=1, max_size=40), st.integers(0, 30))
def test_who_attends_to_whom(wanted: list[int], more: int) -> None:
    parents = [min(parent, node - 1) for node, parent in enumerate(wanted)]
    assert (
        observers(parents, len(parents) + more) == observers_in_python(parents, len(parents) + more)
    ).all()


def test_a_width_that_is_too_narrow_is_refused() -> None:
    with pytest.raises(ValueError, match="width of 2"):
        observers([-1, 0, 1], 2)


def test_odd_numbers_end_the_tree() -> None:
    infinite = CandidateBlock([[1, 2]], [[-1, -2]], np.full((1, 2, 2), np.inf))
    assert grow(0, infinite, 4, 0).n_nodes == 0
