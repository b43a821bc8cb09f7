"""Tests that tree speculation keeps the target's distribution: a toy target and a crude draft, walk and sampler as in the
engine.

The target is a random Markov chain of order 2 over 12 tokens; the draft sees one token less and is noisy, so
that trees are accepted partly. Exact transition probabilities come from Sampler.probs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from dflash_ggml.decode.accept import walk
from dflash_ggml.decode.sampling import Sampler, SamplingParams, log_softmax
from dflash_ggml.decode.tree import Tree
from reference.chi_square import assert_drawn_from, assert_same_source
from reference.trees import best_first, chain

V, DEPTHS, RANKS = 12, 5, 4
N = 20_000

_rng = np.random.default_rng(11)
# The last token matters most, the one before it less: [before, last, next].
TARGET = (_rng.normal(scale=1.5, size=(1, V, V)) + _rng.normal(scale=0.7, size=(V, 1, V))).astype(np.float32)
DRAFT = TARGET.mean(axis=0) + _rng.normal(scale=0.8, size=(V, V))

SETTINGS = [
    SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0),
    SamplingParams(temperature=0.6, top_k=0, top_p=0.9, min_p=0.0),
    SamplingParams(temperature=1.4, top_k=6, top_p=1.0, min_p=0.05),
]


def candidates(token: int) -> tuple[np.ndarray, np.ndarray]:
    """The draft block after `token`: ids and log-probabilities [DEPTHS, RANKS], as top-k gives them."""
    transition = np.exp(np.array([log_softmax(row) for row in DRAFT]))
    marginals = np.array([np.linalg.matrix_power(transition, depth + 1)[token] for depth in range(DEPTHS)])
    ids = np.argsort(-marginals, axis=1)[:, :RANKS].astype(np.int32)
    return ids, np.log(np.take_along_axis(marginals, ids, axis=1)).astype(np.float32)


CANDIDATES = [candidates(token) for token in range(V)]


def generate(
    params: SamplingParams, seed: int, mode: str, n: int = N, budget: int = 12
) -> tuple[list[int], int]:
    """n tokens from the fixed start (0, 0), and the number of target steps they took."""
    sampler = Sampler(replace(params, seed=seed), V)
    text = [0, 0]
    steps = 0
    while len(text) < n + 2:
        ids, log_probs = CANDIDATES[text[-1]]
        if mode == "plain":
            tree = chain(text[-1], ids, log_probs, length=0)
        elif mode == "chain":
            tree = chain(text[-1], ids, log_probs)
        else:
            tree = best_first(text[-1], ids, log_probs, budget, chain_seed=mode == "seeded tree")

        def choose(node: int, tree: Tree = tree) -> int:
            # The true prefix at a visited node is the output so far: the path's tokens were emitted on the way.
            assert node == 0 or text[-1] == tree.tokens[node]
            row = TARGET[text[-2], text[-1]]
            token = sampler.sample(row, text)
            if mode == "redrawing tree" and token not in tree.tokens[tree.parents == node]:
                token = sampler.sample(row, text)
            text.append(token)
            return token

        before = len(text)
        accepted = walk(tree, choose)
        assert list(accepted.tokens) == text[before:]
        steps += 1
    return text[: n + 2], steps


def bigrams(text: Sequence[int]) -> np.ndarray:
    return np.bincount(np.array(text[1:-1]) * V + np.array(text[2:]), minlength=V * V)


@pytest.fixture(scope="module")
def plain_outputs() -> list[list[int]]:
    """Plain decoding of every setting, with a seed of its own."""
    return [generate(params, 2, "plain")[0] for params in SETTINGS]


@pytest.mark.parametrize("mode", ["chain", "tree", "seeded tree"])
@pytest.mark.parametrize("case", range(len(SETTINGS)))
def test_speculation_keeps_the_distribution(case: int, mode: str, plain_outputs: list[list[int]]) -> None:
    params = SETTINGS[case]
    text, steps = generate(params, 1, mode)
    assert N / steps > 1.2, "the draft must be good enough for the test to mean something"

    # Next token given both tokens before it, against the exact distribution.
    exact = Sampler(params, V)
    counts = np.zeros((V, V, V), np.int64)
    np.add.at(counts, (text[:-2], text[1:-1], text[2:]), 1)
    for before, last in np.argwhere(counts.sum(axis=2) >= 100):
        assert_drawn_from(counts[before, last], exact.probs(TARGET[before, last]))

    # Single tokens and bigrams, against plain decoding with another seed.
    plain = plain_outputs[case]
    assert_same_source(np.bincount(text, minlength=V), np.bincount(plain, minlength=V))
    assert_same_source(bigrams(text), bigrams(plain))


def test_a_rule_that_favours_the_draft_is_noticed(plain_outputs: list[list[int]]) -> None:
    """Drawing once more before a rejection accepts more and loses the distribution: it must be seen."""
    text, _ = generate(SETTINGS[0], 1, "redrawing tree")
    with pytest.raises(AssertionError):
        assert_same_source(bigrams(text), bigrams(plain_outputs[0]))


@pytest.mark.parametrize(
    "params",
    [
        *SETTINGS,
        SamplingParams(temperature=0.9, repeat_penalty=1.3, frequency_penalty=0.2, penalty_last_n=7),
        SamplingParams(temperature=0.9, presence_penalty=0.5, penalty_last_n=-1, logit_bias={3: 1.5}),
        SamplingParams(mirostat_mode=2, mirostat_tau=2.0),
        SamplingParams(temperature=0.0, repeat_penalty=1.2),
    ],
    ids=lambda p: f"temp{p.temperature}-last{p.penalty_last_n}-mirostat{p.mirostat_mode}",
)
def test_a_seed_gives_the_same_output_in_every_mode(params: SamplingParams) -> None:
    """One draw per emitted token, in text order, from the row of the true prefix: nothing else may matter."""
    plain, _ = generate(params, 5, "plain", n=1500)
    for mode, budget in (("chain", 0), ("tree", 1), ("tree", 12), ("tree", 60), ("seeded tree", 9)):
        assert generate(params, 5, mode, n=1500, budget=budget)[0] == plain
