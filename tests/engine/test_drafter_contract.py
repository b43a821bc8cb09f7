"""Tests of the Drafter contract with a draft unlike any that exists: no model, no features, long paths."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.candidates import CandidateBlock
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.drafts.drafter import Drafter
from reference.engine_kit import AnyPlan, Solo

PROMPT = [3, 1, 4, 1, 5]


class Oracle(Drafter):
    """Knows the output, and proposes it beside wrong branches, in part wrongly itself."""

    def __init__(self, text: list[int], depth: int, seed: int) -> None:
        self.text, self.depth, self.taps = text, depth, ()
        self.rng = np.random.default_rng(seed)

    def propose(self, sequences, budget, depth=None):
        return [self._one(sequence) for sequence in sequences]

    def _one(self, sequence):
        at = len(sequence.tokens) - len(PROMPT) + 1
        right = self.text[at : at + int(self.rng.integers(0, self.depth + 1))]
        wrong = (np.array(right, int) + 1 + self.rng.integers(50, size=len(right))) % 60
        both = np.stack((right, wrong), axis=1)
        swapped = self.rng.random(len(right)) < 0.1
        both[swapped] = both[swapped, ::-1]
        return CandidateBlock(both, np.tile([-0.1, -2.4], (len(right), 1)))

    def take_in(self, sequences):
        raise AssertionError("nothing waits for a draft without features")

    append = None
    rows = ()
    nbytes: dict = {}
    run_counts = (0, 0)

    def prefilled(self, sequence, n, appended):
        assert not appended

    def reset(self, sequence):
        pass

    def seen(self, sequence):
        return np.zeros(sequence.n_tokens, bool)

    def restore_seen(self, sequence, seen):
        pass

    def close(self):
        pass


class Seeing(Oracle):
    """Wants features, and takes them in only when enabled."""

    def __init__(self, text: list[int], depth: int, seed: int, taps: tuple[int, ...]) -> None:
        super().__init__(text, depth, seed)
        self.taps, self.taken = taps, 0

    def take_in(self, sequences):
        for sequence in sequences:
            self.taken += len(sequence.unseen)
            sequence.unseen = ()


@pytest.fixture()
def engine(toy_pair):
    with Solo.load(
        EngineConfig(
            *toy_pair,
            n_ctx=1024,
            type_k="f32",
            type_v="f32",
            reference=True,
            budget=48,
            n_threads=1,
            spec=("dflash",),
        )
    ) as e:
        yield e


def sampler(engine: Solo, temperature: float) -> Sampler:
    return Sampler(SamplingParams(temperature=temperature, top_k=0, top_p=1, min_p=0, seed=5), engine.n_vocab)


def write(engine: Solo, temperature: float, n: int, **options) -> list[int]:
    engine.reset()
    engine.prefill(PROMPT)
    steps = engine.generate(sampler(engine, temperature), max_tokens=n, stop=lambda t: False, **options)
    return [t for s in steps for t in s.tokens]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("depth", [5, 45])
def test_any_drafter_leaves_output_unchanged(engine, temperature, depth):
    text = write(engine, temperature, 200, mode="plain")
    oracle = Oracle(text, depth, seed=1)
    engine.drafter, dflash = oracle, engine.drafter
    engine.stepper.drafter = oracle
    longest = 0
    for mode in ("tree", "chain", "plain"):
        engine.reset()
        engine.prefill(PROMPT)
        made = list(
            engine.generate(sampler(engine, temperature), max_tokens=200, stop=lambda t: False, mode=mode)
        )
        assert [t for step in made for t in step.tokens] == text
        longest = max(longest, *(step.n_accepted for step in made))
    assert longest > (dflash.block if depth == 45 else 3)
    dflash.close()


def test_features_are_taken_in_before_others_lie_where_they_are(engine):
    """Every committed token is seen once, whatever the steps were."""
    text = write(engine, 0.0, 120, mode="plain")
    seeing = Seeing(text, 5, seed=2, taps=engine.passes.taps)
    dflash, engine.drafter, engine.stepper.drafter = engine.drafter, seeing, seeing
    for modes in (("tree",), ("plain",), ("tree", "plain", "chain")):
        engine.reset()
        engine.prefill(PROMPT)
        seeing.taken = 0
        for mode in modes:
            steps = engine.generate(sampler(engine, 0.0), max_tokens=30, mode=mode, stop=lambda t: False)
            n = sum(len(step.tokens) for step in steps)
            assert n == 30 and len(set(engine.sequence.unseen)) == len(engine.sequence.unseen)
            engine.prefill([engine.pending])
        assert seeing.taken == 29 * len(modes)
    dflash.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_any_policy_leaves_output_unchanged(engine, temperature, monkeypatch):
    """Asked before every step, and free to choose."""
    text = write(engine, temperature, 200, mode="plain")
    for seed in range(3):
        changing = AnyPlan(engine, seed, budget=47, depth=15)
        monkeypatch.setattr(engine.stepper, "policy", changing)
        assert write(engine, temperature, 200) == text
        assert changing.asked == engine.sequence.statistics.passes > 20
    tokens = engine.tokens
    assert engine.snapshot().in_draft.all() and engine.tokens == tokens


def test_statistics_and_costs_are_kept(engine):
    text = write(engine, 0.0, 100, mode="tree")
    total = engine.sequence.statistics
    assert total.emitted == len(text) - 1 and total.accepted == total.emitted - total.passes
    assert total.acceptance_length == pytest.approx(total.emitted / total.passes)
    assert (
        engine.costs.of("verify", 56, 50) > 0 and engine.costs.of("draft", engine.drafter.depth + 1, 50) > 0
    )
    write(engine, 0.0, 20, mode="plain")
    assert engine.costs.of("plain", context=10) > 0
