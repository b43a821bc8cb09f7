"""Tests of all draft sources together: they change the speed, never the output."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.drafts.prompt_lookup import PromptLookup
from dflash_ggml.errors import ConfigError
from reference import native_lookup
from reference.chi_square import assert_same_source
from reference.engine_kit import AnyPlan, Solo, fresh, generate, steps

# a repetition is continued as it was the first time, or is not
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def config(toy_pair: tuple[Path, Path]) -> EngineConfig:
    return EngineConfig(*toy_pair, n_ctx=1024, n_threads=1, type_k="f32", type_v="f32", reference=True)


@pytest.fixture(params=["both", "prompt lookup alone"])
def engine(request: pytest.FixtureRequest, config: EngineConfig) -> Any:
    with Solo.load(config if request.param == "both" else replace(config, draft=None)) as e:
        yield e


def written(engine: Solo, temperature: float, n: int, **options: Any) -> list[int]:
    sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5}
    return generate(fresh(engine, PROMPT), max_tokens=n, sampling=sampling, **options)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_mode_writes_what_plain_decoding_writes(engine, temperature, monkeypatch):
    plain = written(engine, temperature, 220, mode="plain")
    for mode in ("tree", "chain", "auto", "tree"):
        assert written(engine, temperature, 220, mode=mode) == plain
    for seed in range(4):
        monkeypatch.setattr(engine.stepper, "policy", AnyPlan(engine, seed, budget=engine.config.budget))
        assert written(engine, temperature, 220) == plain
        assert engine.sequence.statistics.accepted > 20
    if engine.drafter:
        assert (
            engine.snapshot().in_draft.all()
        )  # every path's features were taken in, also those of long ones


def test_paths_may_be_longer_than_a_block(config):
    with Solo.load(config) as engine:
        # the second time the whole text is a past output
        first = written(engine, 0.0, 160, mode="plain")
        found = list(steps(fresh(engine, PROMPT), max_tokens=160, mode="tree"))
        assert [t for step in found for t in step.tokens] == first
        assert max(step.n_accepted for step in found) > engine.drafter.depth + 1
        assert engine.snapshot().in_draft.all()
        names = {use.name for step in found for use in step.sources}
        assert names == {"dflash", "suffix"}
        for step in found[1:]:
            if step.tree is not None and step.tree.sources is not None:
                bits = step.tree.sources[1:]
                uses = {use.name: use for use in step.sources}
                assert (bits > 0).all() and len(bits) == step.n_draft
                for bit, name in ((1, "dflash"), (2, "suffix")):
                    offered = int(np.count_nonzero(bits & bit))
                    assert (name in uses) == (offered > 0)
                    if offered:
                        kept = sum(int(step.tree.sources[node] & bit > 0) for node in step.path)
                        assert (uses[name].drafted, uses[name].accepted) == (offered, kept)


def test_nothing_to_copy_is_a_plain_step(config):
    """A tree is requested, there is no draft, and no token has occurred before."""
    with Solo.load(replace(config, draft=None)) as engine:
        found = list(steps(fresh(engine, [3]), max_tokens=2, mode="tree"))
        assert [step.mode for step in found] == ["prefill", "plain"] and engine.sources == ("suffix",)


def test_resets_restored_snapshots_and_cancelled_answers(engine):
    plain = written(engine, 0.0, 120, mode="plain")
    other = generate(fresh(engine, [*plain[:50], 7, 7]), max_tokens=30, mode="plain")
    fresh(engine, PROMPT)
    prompt_only = engine.snapshot()
    output = generate(engine, max_tokens=50, mode="tree")
    assert output == plain[:50]
    later = engine.snapshot()
    for mode in ("tree", "auto"):
        engine.restore(prompt_only)
        assert generate(engine, max_tokens=120, mode=mode) == plain
        engine.restore(later)
        engine.prefill([plain[49]])
        assert generate(engine, max_tokens=40, mode=mode) == plain[50:90]
        # cancelled between steps, then taken up again
        fresh(engine, PROMPT)
        generation = steps(engine, max_tokens=120, mode=mode)
        some = [t for _ in range(4) for t in next(generation).tokens]
        generation.close()
        engine.prefill([engine.pending])
        assert [*some, *generate(engine, max_tokens=30, mode=mode)] == plain[: len(some) + 30]
        assert generate(fresh(engine, [*output, 7, 7]), max_tokens=30, mode=mode) == other


def test_constraints_bind_prompt_lookup_too(engine):
    """A processor that forbids tokens and one that forbids repetition: lookup candidates that break the rule are not accepted."""

    def odd_after_even(ids: Any, scores: Any) -> Any:
        scores = scores.copy()
        scores[int(ids[-1]) % 2 :: 2] = -np.inf
        return scores

    for temperature in (0.0, 0.8):
        options = {"processors": [odd_after_even], "sampling": {"temperature": temperature, "seed": 3}}
        plain = generate(fresh(engine, PROMPT), max_tokens=80, mode="plain", **options)
        for mode in ("tree", "chain", "auto"):
            assert generate(fresh(engine, PROMPT), max_tokens=80, mode=mode, **options) == plain
        assert all((a + b) % 2 for a, b in pairwise(plain))


def test_outputs_have_the_same_distribution(config):
    """Short outputs from one prompt, which match each other ever more, against plain decoding with other seeds."""
    n, length = 400, 3
    with Solo.load(replace(config, draft=None, n_ctx=128)) as engine:
        fresh(engine, PROMPT)
        start = engine.snapshot()

        def outputs(mode: str, first_seed: int) -> list[tuple[int, ...]]:
            found = []
            for seed in range(first_seed, first_seed + n):
                engine.restore(start)
                sampling = {"temperature": 0.7, "top_k": 4, "seed": seed}
                found.append(tuple(generate(engine, max_tokens=length, mode=mode, sampling=sampling)))
            return found

        tree, plain = outputs("tree", 0), outputs("plain", n)
        assert engine.sequence.statistics.passes and len(engine.lookup.past) == 0  # too short to be kept
        every = sorted({*tree, *plain})
        counts = [Counter(tree), Counter(plain)]
        assert_same_source(*(np.array([c[t] for t in every]) for c in counts))


def test_sources_are_chosen_by_name(config, toy_pair):
    with Solo.load(replace(config, spec=("dflash",))) as engine:
        assert engine.sources == ("dflash",) and engine.lookup is None
        found = list(steps(fresh(engine, PROMPT), max_tokens=30, mode="tree"))
        assert all(step.tree is None or step.tree.sources is None for step in found)
        assert {use.name for step in found for use in step.sources} == {"dflash"}
    for spec, words in ((("suffix",), "it leaves out"), ((), "leaves out")):
        with pytest.raises(ConfigError, match=words):
            Solo.load(replace(config, spec=spec))
    with pytest.raises(ConfigError, match="spec: 'eagle' is none of dflash"):
        replace(config, spec=("eagle",))
    for options in ({"spec": ()}, {"reproducible": True}, {"mode": "plain"}):
        with Solo.load(replace(config, draft=None, **options)) as engine:
            assert engine.sources == () and engine.passes.max_width == 0
    with pytest.raises(ConfigError, match="mode tree needs a draft"):
        Solo.load(replace(config, draft=None, mode="tree", spec=()))


# ---- what prompt lookup searches


class FakeSequence:
    """As much of a sequence as prompt lookup reads."""

    def __init__(self, tokens: list[int], pending: int | None = None) -> None:
        self.tokens, self.pending = tokens, pending

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)


def continued(lookup: PromptLookup, sequence: FakeSequence) -> list[int]:
    """The best-voted path."""
    found, path = lookup.look_up(sequence), []
    if found is None:
        return path
    cursor = native_lookup.root_of(found)
    while votes := native_lookup.votes(found, cursor):
        token, _, cursor = votes[0]
        path.append(token)
    return path


def test_lookup_searches_the_prompt_and_earlier_output():
    lookup, sequence = PromptLookup(6), FakeSequence([1, 2, 3, 4, 5, 6, 7, 8, 1, 2])
    lookup.begin(sequence)
    sequence.pending = 3
    assert continued(lookup, sequence) == [4, 5, 6, 7, 8, 1]
    sequence.tokens += [3, 9, 9]
    sequence.pending = 9
    assert continued(lookup, sequence) == [9] * 6  # it reaches its own beginning and continues with itself
    sequence.pending = 50
    assert lookup.look_up(sequence) is None


def test_past_outputs_are_kept_and_prompts_are_not():
    lookup = PromptLookup(4)
    prompt, output = [10, 11, 12, 13], [20, 21, 22, 23, 24, 25]
    sequence = FakeSequence([*prompt])
    lookup.begin(sequence)
    sequence.tokens += output
    sequence.pending = 99
    lookup.look_up(sequence)
    other = FakeSequence([30, 31])  # another prompt: the state was reset
    lookup.begin(other)
    other.tokens += [20, 21]
    other.pending = 22
    assert continued(lookup, other) == [23, 24, 25]
    other.pending, other.tokens = 12, [30, 31, 10, 11]
    lookup.begin(other)
    assert lookup.look_up(other) is None
    # a sequence that continues has not become another past output
    assert len(lookup.past) == len(output)


def test_past_sequences_may_be_forgotten_during_a_generation():
    lookup, sequence = PromptLookup(4), FakeSequence([1, 2, 3, 4, 5, 6])
    lookup.begin(sequence)
    sequence.pending = 7
    lookup.look_up(sequence)
    lookup.forget()
    lookup.forget()
    sequence.tokens += [7, 8, 9, 10]
    sequence.pending = 1
    assert lookup.look_up(sequence) is None or len(lookup.index) == 10
    lookup.leave()
    assert lookup.past.ids.tolist() == [7, 8, 9, 10], "and the prompt is none of what was written"


def test_the_oldest_outputs_are_forgotten():
    lookup = PromptLookup(4, past_tokens=100)
    for answer in range(40):
        sequence = FakeSequence([1, 2])
        lookup.begin(sequence)
        sequence.tokens += range(1000 + 10 * answer, 1010 + 10 * answer)
        sequence.pending = 5
        lookup.look_up(sequence)
        assert len(lookup.past) <= 100
    lookup.begin(FakeSequence([1, 2]))
    assert lookup.past.ids[-1] == 1399 and 1000 not in lookup.past.ids
    assert lookup.nbytes <= 28 * 102 + 2 * (1 << 15)


@pytest.mark.parametrize("seed", range(6))
def test_a_glance_agrees_with_a_full_lookup(seed: int):
    """The likeliest next token's rate, and the same learned from plain steps."""
    rng = np.random.default_rng(seed)
    tokens = (rng.zipf(1.5, 400) % 7).tolist()
    ours, theirs = PromptLookup(8), PromptLookup(8)
    a, b = FakeSequence(tokens[:20], tokens[20]), FakeSequence(tokens[:20], tokens[20])
    ours.begin(a)
    theirs.begin(b)
    votes: list = []
    for at in range(20, 300):
        learns = at % 5 != 0  # as if the step before had verified something
        found = theirs.look_up(b)
        if learns and votes:
            native_lookup.learn(theirs.rates, [(cell, token == b.pending) for token, cell, _ in votes])
        votes = [] if found is None else native_lookup.votes(found, native_lookup.root_of(found))
        rate, all_rates = ours.glance(a, learn=learns), native_lookup.all_rates(theirs.rates)
        assert rate == max([all_rates[cell] for _, cell, _ in votes], default=0.0)
        for one in (a, b):
            one.tokens.append(tokens[at])
            one.pending = tokens[at + 1]
    assert native_lookup.all_rates(ours.rates) == native_lookup.all_rates(theirs.rates)
    assert ours.index.ids.tolist() == tokens[:299]


def test_a_glance_after_some_steps_learns_nothing_of_the_last_one():
    lookup, sequence = PromptLookup(8), FakeSequence([1, 2, 3, 1, 2, 3, 1], 2)
    lookup.begin(sequence)
    before = native_lookup.all_rates(lookup.rates)
    assert lookup.glance(sequence) > 0
    sequence.tokens += [2, 5]
    sequence.pending = 6
    assert lookup.glance(sequence, learn=True) == 0.0
    assert native_lookup.all_rates(lookup.rates) == before
    lookup.forget()
    assert lookup.glance(sequence, learn=True) == 0.0


def test_what_a_glance_saw_becomes_a_past_output():
    lookup, sequence = PromptLookup(8), FakeSequence([1, 2])
    lookup.begin(sequence)
    sequence.tokens += [*range(100, 400)]  # more than is allocated at first
    sequence.pending = 7
    assert lookup.glance(sequence) == 0.0
    lookup.leave()
    assert lookup.past.ids.tolist() == [*range(100, 400)]
