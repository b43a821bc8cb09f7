"""Tests that sampled output has the target's distribution however it is drafted: the real engine on a toy pair of 64 tokens.

Thousands of short outputs start from one snapshot, so that the same position of each is an independent draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import dflash_ggml.engine.accept
from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.accept import Accepted, walk
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.decode.tree import Tree
from dflash_ggml.state.snapshot import Snapshot
from reference.chi_square import assert_drawn_from, assert_same_source
from reference.engine_kit import Solo

PROMPT = [3, 14, 15]
SEQUENCES, LENGTH = 2500, 8  # 20,000 draws a sample
BUDGET = 7
WIDE = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
SETTINGS = {
    "temp1": WIDE,
    "temp0.7-top-p0.9": replace(WIDE, temperature=0.7, top_p=0.9),
    "repeat1.5": replace(WIDE, temperature=0.8, min_p=0.01, repeat_penalty=1.5, frequency_penalty=0.3),
}


@pytest.fixture(scope="module")
def engine(toy_pair: tuple[Path, Path]) -> Iterator[Solo]:
    config = EngineConfig(
        *toy_pair, n_ctx=256, n_threads=1, type_k="f32", type_v="f32", reference=True, budget=BUDGET
    )
    with Solo.load(config) as e:
        e.prefill(PROMPT)
        yield e


@pytest.fixture(scope="module")
def start(engine: Solo) -> Snapshot:
    """The state after the prompt."""
    return engine.snapshot()


def write(
    engine: Solo, start: Snapshot, params: SamplingParams, mode: str, seed: int, n: int = SEQUENCES
) -> tuple[np.ndarray, float]:
    """Outputs int [n, LENGTH] that follow the prompt, and the mean number of tokens that a step gave."""
    sampler = Sampler(replace(params, seed=seed), engine.n_vocab)
    texts, steps = [], 0
    for _ in range(n):
        engine.restore(start)
        text: list[int] = []
        for step in engine.generate(sampler, max_tokens=LENGTH, mode=mode, stop=lambda token: False):
            text += step.tokens
            steps += step.mode != "prefill"
        texts.append(text)
    return np.array(texts), n * (LENGTH - 1) / steps


@pytest.fixture(scope="module")
def plain_outputs(engine: Solo, start: Snapshot) -> Callable[[str], np.ndarray]:
    """plain_outputs(setting): outputs of plain decoding, generated once."""
    written: dict[str, np.ndarray] = {}

    def texts(setting: str) -> np.ndarray:
        if setting not in written:
            written[setting] = write(engine, start, SETTINGS[setting], "plain", seed=1)[0]
        return written[setting]

    return texts


@pytest.fixture(scope="module")
def rows(engine: Solo, start: Snapshot) -> tuple[np.ndarray, ...]:
    """Logits from plain passes after the prompt [V], one more token [V, V] and two more [V, V, V]."""
    vocabulary = range(engine.n_vocab)
    engine.restore(start)
    none, one, two = engine.logits.copy(), [], []
    for first in vocabulary:
        engine.restore(start)
        engine.prefill([first])
        one.append(engine.logits.copy())
        middle = engine.snapshot()
        for second in vocabulary:
            engine.restore(middle)
            engine.prefill([second])
            two.append(engine.logits.copy())
    v = engine.n_vocab
    return none, np.array(one), np.array(two).reshape(v, v, v)


def bigrams(first: np.ndarray, second: np.ndarray, n_vocab: int) -> np.ndarray:
    return np.bincount(n_vocab * first.ravel() + second.ravel(), minlength=n_vocab**2)


def assert_same_outputs(ours: np.ndarray, plain: np.ndarray, n_vocab: int) -> None:
    """Chi-square of the token frequencies at each position, and of all tokens and all bigrams together."""
    for ours_at, plain_at in zip(ours.T, plain.T, strict=True):
        assert_same_source(np.bincount(ours_at, minlength=n_vocab), np.bincount(plain_at, minlength=n_vocab))
    assert_same_source(*(np.bincount(texts.ravel(), minlength=n_vocab) for texts in (ours, plain)))
    assert_same_source(*(bigrams(texts[:, :-1], texts[:, 1:], n_vocab) for texts in (ours, plain)))


@pytest.mark.parametrize(
    ("setting", "mode"), [*((setting, "tree") for setting in SETTINGS), ("temp0.7-top-p0.9", "chain")]
)
def test_speculation_keeps_the_distribution(
    engine: Solo,
    start: Snapshot,
    rows: tuple[np.ndarray, ...],
    plain_outputs: Callable[[str], np.ndarray],
    setting: str,
    mode: str,
) -> None:
    """Against plain decoding over eight tokens, and against the exact distribution of the first three."""
    assert SEQUENCES * LENGTH >= 20_000
    params, v = SETTINGS[setting], engine.n_vocab
    texts, tokens_per_step = write(engine, start, params, mode, seed=2)
    assert tokens_per_step > 1.2, "some drafted tokens must be accepted, or the test means nothing"
    assert_same_outputs(texts, plain_outputs(setting), v)

    sampler = Sampler(params, v)
    p1 = sampler.probs(rows[0], PROMPT)
    p2 = np.array([sampler.probs(rows[1][a], [*PROMPT, a]) for a in range(v)])
    p3 = np.array([[sampler.probs(rows[2][a, b], [*PROMPT, a, b]) for b in range(v)] for a in range(v)])
    joint = p1[:, None] * p2
    first, second, third = texts.T[:3]
    assert_drawn_from(np.bincount(first, minlength=v), p1)
    assert_drawn_from(bigrams(first, second, v), joint.ravel())
    assert_drawn_from(bigrams(second, third, v), np.einsum("ab,abc->bc", joint, p3).ravel())


def test_a_rule_that_favours_the_draft_is_noticed(
    engine: Solo, start: Snapshot, plain_outputs: Callable[[str], np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawing once more before a rejection accepts more and loses the distribution: these tests see it."""

    def walk_drawing_again(tree: Tree, choose: Callable[[int], int], stop: Callable[[int], bool]) -> Accepted:
        def choose_again(node: int) -> int:
            token = choose(node)
            return token if token in tree.tokens[tree.parents == node] else choose(node)

        return walk(tree, choose_again, stop)

    monkeypatch.setattr(dflash_ggml.engine.accept, "walk", walk_drawing_again)
    texts, _ = write(engine, start, WIDE, "tree", seed=2, n=SEQUENCES // 2)
    with pytest.raises(AssertionError):
        assert_same_outputs(texts, plain_outputs("temp1"), engine.n_vocab)
