"""Drafts that are not verified: what the text says of them later is what a verify pass would have said."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dflash_ggml.decode.accept import walk
from dflash_ggml.decode.adaptive import Adaptive
from dflash_ggml.decode.controller import controller
from dflash_ggml.decode.copied import Evidence
from dflash_ggml.decode.experience import Experience
from dflash_ggml.decode.merged import DRAFT
from dflash_ggml.decode.sequence import Sequence
from dflash_ggml.decode.tree import Tree, best_first
from dflash_ggml.decode.unverified import Unverified
from dflash_ggml.decode.widths import Cut
from reference.virtual_clock import Machine, Text, calibrated, decode

# the demo pair on two cores of an EPYC: a drafted step takes four to six plain ones
EPYC = Machine(
    1.0, {2: 1.75, 3: 2.1, 4: 2.4, 6: 2.9, 8: 3.4, 16: 5.2, 24: 7.5, 32: 9.4}, {16: 1.65, 8: 0.95}, 0.35
)


def grown(rng: np.random.Generator) -> Tree:
    ids = np.array([rng.permutation(9)[:3] for _ in range(4)], np.int32)
    scores = np.log(np.tile([0.6, 0.25, 0.1], (4, 1))).astype(np.float32)
    return best_first(9, ids, scores, 12)


@pytest.mark.parametrize("seed", range(40))
def test_a_text_walks_a_tree_as_a_verify_pass_does(seed: int):
    """Whatever tokens come: each text is told of by its own walk, at the first token behind the tree and no earlier."""
    rng = np.random.default_rng(seed)
    tree = grown(rng)
    text = rng.integers(0, 9, 8).tolist()
    expected = walk(tree, lambda node: text[int(tree.depths[node])])
    sequence = Sequence(tokens=[1, 2, 3], pending=9)
    draft = Unverified(tree, Cut(5, 0.5, 1.0), 16, 3)
    for n, token in enumerate(text):
        assert draft.follow(sequence) is None
        assert sequence.pending is not None
        sequence.tokens.append(sequence.pending)
        sequence.pending = token
        found = draft.follow(sequence)
        if found is not None:
            assert found == expected and n + 1 == len(expected.tokens)
            assert draft.kept(found) == 1 + sum(0 < node <= 5 for node in expected.path)
            return
    raise AssertionError("a text of random tokens leaves a tree of four levels")


def test_several_tokens_may_come_at_once():
    tree = grown(np.random.default_rng(0))
    best = [int(tree.tokens[1]), 20, 21]
    sequence = Sequence(tokens=[1, 9, *best[:2]], pending=best[2])
    found = Unverified(tree, Cut(5, 0.5, 1.0), 16, 1).follow(sequence)
    assert found is not None and found.tokens == (best[0], 20) and found.path == (0, 1)


def fresh() -> Adaptive:
    made = controller("auto", 31, 15, experience=Experience())
    assert isinstance(made, Adaptive)
    return made


def test_the_first_tries_of_a_hard_text_cost_a_draft_and_no_verify_pass():
    runs = [decode(fresh(), calibrated(EPYC), EPYC, Text(0.1, seed), 200) for seed in range(8)]
    drafted = [sum(columns > 0 for columns in run.drafted) for run in runs]
    assert min(drafted) >= 2 and not any(any(run.widths[:60]) for run in runs)
    assert min(run.rate() for run in runs) >= 0.96 / EPYC.plain


def test_a_draft_that_says_too_little_of_itself_is_found_out_without_a_verify_pass():
    """What it was right about is seen in plain text, and it is verified then."""
    known, costs = Experience(), calibrated(EPYC)
    runs = [
        decode(controller("auto", 31, 15, experience=known), costs, EPYC, Text(0.97, seed, off=-2.0), 300)
        for seed in range(6)
    ]
    assert np.mean([run.rate() for run in runs[1:]]) >= 1.08 / EPYC.plain


def test_what_is_waited_for_is_not_drafted_again():
    """A draft whose first tokens all come true is told of by no step before: the next try waits for that."""
    run = decode(fresh(), calibrated(EPYC), EPYC, Text(0.9, 3, off=-4.0), 12)
    assert sum(columns > 0 for columns in run.drafted[:4]) <= 2


@pytest.mark.parametrize("n_cut", [1, 3, 12])
def test_of_a_merged_tree_only_what_would_have_been_verified_counts(n_cut: int):
    """Its draft's nodes up to the cut, however far the text follows what was grown."""
    auto, tree = fresh(), grown(np.random.default_rng(1))
    path = walk(tree, lambda node: next((int(t) for p, t in zip(tree.parents, tree.tokens) if p == node), -1))
    n = tree.width
    evidence = Evidence(np.full(n, -1, np.int32), np.zeros(n), 1.0)
    merged = replace(tree, sources=np.array([0, *[DRAFT] * (n - 1)], np.uint8), evidence=evidence)
    cut = Cut(n_cut, 0.4, 1.0, 0.3)
    draft = Unverified(merged, cut, 16, 0)
    found = auto._learn_worth(16, cut, merged, path, draft.kept(path))
    assert found == pytest.approx(0.3 * draft.kept(path))
