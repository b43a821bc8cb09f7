"""Tests of prompt-lookup candidates, and of one tree of them and a draft's: probabilities, equal tokens, growth, learning."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_ggml.decode.accept import walk
from dflash_ggml.decode.calibration import Calibration, count_votes
from dflash_ggml.decode.candidates import CandidateBlock, CombinedCandidates
from dflash_ggml.decode.lookup import LEAST, N_DRAFT, N_VOTES, LookupCandidates, LookupRates, Merged
from dflash_ggml.decode.tree import DRAFT, LOOKUP, Tree, expand, spine
from reference import native_lookup
from reference.native_lookup import all_rates, candidates, learn, lengths_of, windows_of


def rows_of(rng: np.random.Generator, depths: int, ranks: int, n_vocab: int = 12) -> CandidateBlock:
    scores = -np.sort(rng.exponential(size=(depths, ranks)), axis=1)
    scores -= np.log(np.exp(scores).sum(1, keepdims=True)) + 0.05
    ids = np.array([rng.permutation(n_vocab)[:ranks] for _ in range(depths)], np.int32)
    return CandidateBlock(ids, np.minimum(scores, 0).astype(np.float32))


def lookup_of(rng: np.random.Generator, matches: int, depth: int, n_vocab: int = 12) -> LookupCandidates:
    windows = [rng.integers(0, n_vocab, rng.integers(1, depth + 1)).tolist() for _ in range(matches)]
    for window in windows[1:]:
        if rng.random() < 0.6:
            window[:2] = windows[0][: len(window)][:2]
    return candidates(windows, rng.integers(2, 40, matches).tolist(), depth)


def tokens_of(tree: Tree, node: int) -> tuple[int, ...]:
    out = []
    while node > 0:
        out.append(int(tree.tokens[node]))
        node = int(tree.parents[node])
    return tuple(reversed(out))


def distribution(
    rows: CandidateBlock | None, lookup: LookupCandidates, rates: LookupRates, path: tuple[int, ...]
) -> dict[int, float]:
    """The next token after a path, from the definition; tokens that no source proposes are left out."""
    windows = [
        (window, length)
        for window, length in zip(windows_of(lookup), lengths_of(lookup))
        if list(path) == list(window[: len(path)])
    ]
    depth = len(path)
    votes: dict[int, list[int]] = {}
    for window, length in windows:
        if depth < len(window) and depth < lookup.depth:
            votes.setdefault(window[depth], []).append(length)
    draft = {}
    if rows is not None and depth < len(rows.ids):  # a plain row holds for any path before it
        draft = dict(zip(rows.ids[depth].tolist(), np.exp(rows.log_probs[depth].astype(float)).tolist()))
    total_weight = sum(2 ** min(n, 16) for who in votes.values() for n in who)
    found = {}
    for token, who in votes.items():
        bucket = sum(max(who) + depth >= first for first in (3, 4, 6, 9, 16, 32))
        share = sum(2 ** min(n, 16) for n in who) / total_weight
        vote = min(len(who), 3) - 1 if len(votes) == 1 else 3 if share >= 0.6 else 4 if share >= 0.25 else 5
        promised = draft.get(token, 0.0)
        beside = 0 if not draft else 1 + sum(promised >= least for least in (0.1, 0.5, 0.9))
        found[token] = all_rates(rates)[(bucket * N_VOTES + vote) * N_DRAFT + beside]
    total = sum(found.values())
    if total > 0.98:
        found = {token: p * 0.98 / total for token, p in found.items()}
    rest = 1 - sum(found.values())
    left = max(1 - sum(draft.get(token, 0.0) for token in found), 1e-6)
    for token, p in draft.items():
        if token not in found:
            found[token] = p * rest / left
    return found


@given(st.integers(0, 2**32), st.integers(0, 4), st.integers(1, 4), st.integers(1, 25))
def test_the_tree_holds_the_most_probable_paths_of_both(seed, depths, matches, budget):
    rng = np.random.default_rng(seed)
    rows = rows_of(rng, depths, 3) if depths else None
    lookup, rates = lookup_of(rng, matches, 6), LookupRates()
    tree = expand(7, Merged(rows, lookup, rates), budget)
    assert len({tokens_of(tree, n) for n in range(1, tree.width)}) == tree.n_nodes <= budget
    for node in range(1, tree.width):
        path = tokens_of(tree, node)
        log_prob = 0.0
        for d in range(len(path)):
            # prompt lookup on unlikely paths is not followed
            followed = lookup if log_prob > np.log(LEAST) else candidates([], [], 6)
            log_prob += np.log(distribution(rows, followed, rates, path[:d])[path[d]])
        assert tree.log_probs[node] == pytest.approx(log_prob, abs=1e-3)
    assert (np.diff(tree.log_probs[1:]) <= 1e-5).all()
    # nothing better was left out: the children of every node are in the tree, or less likely than all of it
    if tree.n_nodes == budget:
        inside, least = {tokens_of(tree, n) for n in range(tree.width)}, float(tree.log_probs.min())
        for node in range(tree.width):
            if tree.log_probs[node] > np.log(LEAST):
                path = tokens_of(tree, node)
                for token, p in distribution(rows, lookup, rates, path).items():
                    assert (*path, token) in inside or tree.log_probs[node] + np.log(p) <= least + 1e-4


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 4))
def test_probabilities_under_a_node_sum_to_no_more_than_one(seed, depths, matches):
    rng = np.random.default_rng(seed)
    tree = expand(0, Merged(rows_of(rng, depths, 4), lookup_of(rng, matches, 5), LookupRates()), 60)
    sums = np.zeros(tree.width)
    for node in range(1, tree.width):
        parent = tree.parents[node]
        sums[parent] += np.exp(tree.log_probs[node] - tree.log_probs[parent])
    assert (sums <= 1 + 1e-4).all()


def test_a_token_of_both_is_one_node_with_both_cursors():
    rows = CandidateBlock([[5, 6], [7, 8]], np.log([[0.6, 0.3], [0.5, 0.4]]).astype(np.float32))
    tree = expand(0, Merged(rows, candidates([[5, 7, 9, 9]], [10], 4), LookupRates()), 8)
    by_path = {tokens_of(tree, n): int(tree.sources[n]) for n in range(1, tree.width)}
    assert by_path[5,] == by_path[5, 7] == DRAFT | LOOKUP
    assert by_path[5, 7, 9] == by_path[5, 7, 9, 9] == LOOKUP  # longer than the block
    assert by_path[6,] == by_path[5, 8] == DRAFT
    assert tree.tokens[1] == 5 and by_path.get((6, 7), DRAFT) == DRAFT


def test_any_candidates_can_be_merged():
    """Rows with pair scores and several drafts; without votes below they are as they were alone."""
    rng = np.random.default_rng(3)
    rows = rows_of(rng, 3, 3)
    paired = CandidateBlock(rows.ids, rows.log_probs, rng.normal(size=(3, 3, 3)))
    for draft in (paired, CombinedCandidates([rows, paired])):
        tree = expand(1, Merged(draft, candidates([[99]], [2], 4), LookupRates()), 50)
        alone = expand(1, draft, 50)
        paths = {tokens_of(tree, n) for n in range(1, tree.width)}
        assert paths == {tokens_of(alone, n) for n in range(1, alone.width)} | {(99,)}
        rest = tree.evidence.rests[0]
        assert 0 < rest < 1
        node = next(n for n in range(1, tree.width) if tokens_of(tree, n) == tokens_of(alone, 1))
        assert tree.log_probs[node] == pytest.approx(alone.log_probs[1] + np.log(rest), abs=1e-4)


@given(st.integers(0, 2**32), st.integers(0, 4), st.integers(1, 3), st.integers(1, 12))
def test_the_spine_takes_the_best_child_each_time(seed, depths, matches, length):
    rng = np.random.default_rng(seed)
    rows = rows_of(rng, depths, 3) if depths else None
    lookup, rates = lookup_of(rng, matches, 6), LookupRates()
    merged = Merged(rows, lookup, rates)
    chain = spine(3, merged, length)
    assert chain.parents.tolist() == list(range(-1, chain.n_nodes)) and chain.n_nodes <= length
    for node in range(chain.n_nodes):
        children = distribution(rows, lookup, rates, tokens_of(chain, node))
        assert children[int(chain.tokens[node + 1])] == pytest.approx(max(children.values()), abs=1e-5)
    seeded = expand(3, merged, length + 3, chain_seed=True)
    n = min(chain.n_nodes, seeded.n_nodes)
    assert n == chain.n_nodes and np.array_equal(seeded.tokens[: n + 1], chain.tokens)


def cells() -> tuple[int, int]:
    """Of a single match, of 2 tokens and of 20."""
    weak, strong = candidates([[1]], [2], 1), candidates([[1]], [20], 1)
    ((_, low, _),), ((_, high, _),) = (
        native_lookup.votes(weak, native_lookup.root_of(weak)),
        native_lookup.votes(strong, native_lookup.root_of(strong)),
    )
    return low, high


def test_rates_follow_what_was_right():
    """A single match is not trusted for being the only one; a wrong one loses its probability."""
    shared, (low, high) = LookupRates(), cells()
    rates = LookupRates(shared)
    assert all_rates(rates)[low] < 0.4 < all_rates(rates)[high] < 1
    for _ in range(60):
        learn(rates, [(low, False), (high, True)])
    assert all_rates(rates)[low] < 0.05 and all_rates(rates)[high] > 0.85
    other = LookupRates(shared)  # another text begins with what this one has shown
    assert all_rates(other)[low] < 0.1
    for _ in range(200):
        learn(other, [(low, True)])
    assert all_rates(other)[low] > 0.9 > 0.1 > all_rates(rates)[low]


def test_repetition_is_followed_at_once():
    """All cells move together before any of them has samples of its own, and no further than the sequence goes."""
    rates, (low, high) = LookupRates(LookupRates()), cells()
    first = all_rates(rates)
    learn(rates, [(low, True)] * 3)
    assert all_rates(rates)[high] > first[high] and rates.native.trend > 0
    assert all(after > before for after, before in zip(all_rates(rates), first))
    learn(rates, [(high, False)] * 20)
    assert all(after < before for after, before in zip(all_rates(rates), first))
    learn(rates, [(high, False)] * 500)
    assert min(all_rates(rates)) > 0


def test_votes_are_learned_where_the_walk_came():
    rates = LookupRates()
    rows = CandidateBlock([[5, 6], [7, 8]], np.log([[0.6, 0.3], [0.5, 0.4]]).astype(np.float32))
    tree = expand(0, Merged(rows, candidates([[5, 9, 1]], [12], 3), rates), 8)
    cells = {tokens_of(tree, n): tree.evidence.cells[n] for n in range(1, tree.width)}
    before = all_rates(rates)
    text = iter([5, 7, 3])
    accepted = walk(tree, lambda node: next(text))
    assert accepted.n_accepted == 2
    count_votes(tree, accepted, rates)

    def moved(path: tuple[int, ...]) -> float:
        after, first = all_rates(rates)[cells[path]], before[cells[path]]
        return float(np.log(after / (1 - after)) - np.log(first / (1 - first)))

    # the node behind the wrong one was never visited: only the sequence's trend moved its cell
    assert moved((5, 9, 1)) == pytest.approx(rates.native.trend)
    assert moved((5,)) > rates.native.trend > moved((5, 9))


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 3))
def test_calibration_of_a_draft_that_is_right_changes_nothing_beside_votes(seed, depths, matches):
    """Without samples the draft's own probability is used, and a vote's probability is what it was grown with."""
    rng = np.random.default_rng(seed)
    tree = expand(0, Merged(rows_of(rng, depths, 3), lookup_of(rng, matches, 4), LookupRates()), 20)
    np.testing.assert_allclose(Calibration().path_probabilities(tree), np.exp(tree.log_probs), rtol=1e-3)


def test_calibration_counts_a_draft_only_where_no_vote_was_right():
    calibration = Calibration()
    rows = CandidateBlock([[5, 6]], np.log([[0.6, 0.3]]).astype(np.float32))
    tree = expand(0, Merged(rows, candidates([[9]], [12], 1), LookupRates()), 8)
    for _ in range(30):
        calibration.observe(tree, walk(tree, lambda node: 9))
    assert not any(calibration.native.tried)
    for _ in range(30):
        calibration.observe(tree, walk(tree, lambda node: 6))
    assert sum(calibration.native.tried) == 60 and sum(calibration.native.hits) == pytest.approx(30)
    p = calibration.path_probabilities(tree)
    promised = np.exp(tree.log_probs)
    for node, token in itertools.islice(enumerate(tree.tokens.tolist()), 1, None):
        assert (p[node] > promised[node]) == (token == 6) or token == 9


def test_the_first_nodes_keep_their_sources():
    rows = CandidateBlock([[5, 6]], np.log([[0.6, 0.3]]).astype(np.float32))
    tree = expand(0, Merged(rows, candidates([[5, 1, 2, 3]], [12], 4), LookupRates()), 6)
    cut = tree.first(2)
    assert cut.sources.tolist() == tree.sources[:3].tolist() and cut.evidence is tree.evidence


def test_a_draft_that_promises_too_much_gets_less_of_the_rest():
    """Votes are measured and a draft's word is not: where no vote was right, its own candidates must have been."""
    rows = CandidateBlock([[5, 6], [7, 8]], np.log([[0.5, 0.4], [0.5, 0.4]]).astype(np.float32))
    rates = LookupRates(LookupRates())
    assert rates.trust == 1
    lookup = candidates([[5, 9]], [2], 2)
    for _ in range(60):  # neither the vote's token nor the draft's others ever come
        tree = expand(0, Merged(rows, lookup, rates), 6)
        count_votes(tree, walk(tree, lambda node: 30), rates)
    assert rates.trust < 0.2
    tree = expand(0, Merged(rows, lookup, rates), 6)
    other = next(node for node in range(1, tree.width) if tokens_of(tree, node) == (6,))
    assert np.exp(tree.log_probs[other]) == pytest.approx(
        0.8 * tree.evidence.rests[0] * rates.trust, rel=1e-3
    )
    # a controller's calibration sees the draft's own probability, not what was left of it
    calibration = Calibration()
    assert calibration.path_probabilities(tree)[other] == pytest.approx(
        0.8 * tree.evidence.rests[0], rel=1e-3
    )
    for _ in range(100):  # and it comes back
        tree = expand(0, Merged(rows, lookup, rates), 6)
        count_votes(tree, walk(tree, lambda node: 6), rates)
    assert rates.trust > 0.5
