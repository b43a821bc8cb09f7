"""Tests of mode `auto` with prompt lookup: alone, beside a draft, or not at all, by past acceptance and pass times."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_ggml.decode.accept import Accepted, walk
from dflash_ggml.decode.candidates import CandidateBlock
from dflash_ggml.decode.lookup import Merged
from dflash_ggml.decode.sequence import Sequence
from dflash_ggml.decode.tree import root_only
from dflash_ggml.drafts.prompt_lookup import PromptLookup
from dflash_ggml.policy.costs import Costs, Point
from dflash_ggml.policy.plan import Plan
from dflash_ggml.policy.policy import Policy, Result, StepTimes
from reference.native_lookup import all_rates

BUDGET, DEPTH = 31, 15
# a target whose passes cost little more with more columns, and a draft that takes a third of a plain step
FLAT = {1: 10.0, 2: 10.5, 8: 11.5, 16: 12.5, 32: 14.0}
STEEP = {1: 10.0, 2: 21.0, 4: 30.0, 8: 45.0, 16: 80.0, 32: 150.0}


def costs_of(verify: dict[int, float], draft: float = 3.0) -> Costs:
    costs = Costs()
    points = [Point("plain", 1, 32, verify[1]), Point("commit", 1, 32, 0.1), Point("append", 1, 32, 0.3)]
    points += [Point("verify", width, 32, ms) for width, ms in verify.items() if width > 1]
    costs.learn(
        [*points, Point("draft", DEPTH + 1, 32, draft), Point("draft", (DEPTH + 1) // 2, 32, draft / 2)]
    )
    return costs


class Writer:
    """Decodes a given output, with drafts that are right at a given rate."""

    def __init__(
        self, text: list[int], n_prompt: int, drafted: float | None, costs: Costs, others: int = 0
    ) -> None:
        """others: sequences beside it, which never repeat anything."""
        self.text, self.hits, self.costs = text, drafted, costs
        self.prompt_lookup = PromptLookup(BUDGET)
        self.sequence = Sequence(
            text[:n_prompt], text[n_prompt], mode="auto", budget=BUDGET, lookup=self.prompt_lookup
        )
        self.prompt_lookup.begin(self.sequence)
        self.policy = Policy(0 if drafted is None else DEPTH, costs)
        self.others = [
            Sequence([-i - 1], -i - 1, mode="auto", budget=BUDGET, lookup=PromptLookup(BUDGET))
            for i in range(others)
        ]
        for other in self.others:
            other.lookup.begin(other)
        self.rng = np.random.default_rng(0)
        self.kinds: list[str] = []
        self.ms = 0.0

    def rows(self, at: int) -> CandidateBlock:
        """Rank 0 of each depth has this probability, and is right that often."""
        assert self.hits is not None
        truth = [*self.text[at : at + DEPTH], *[0] * DEPTH][:DEPTH]
        best = [t if self.rng.random() < self.hits else 500 for t in truth]
        scores = [[np.log(self.hits), np.log(min(self.hits, 1 - self.hits) / 2)]] * DEPTH
        return CandidateBlock([[b, 600 + i] for i, b in enumerate(best)], np.array(scores, np.float32))

    def step(self) -> Plan:
        sequence, text, policy = self.sequence, self.text, self.policy
        sequences = [sequence, *self.others]
        n, (plan, *beside) = len(sequences), policy.plan(sequences)
        at = sequence.n_tokens + 1
        tree, matched, found = root_only(text[at - 1]), None, None
        if plan.kind != "plain":
            matched = self.prompt_lookup.look_up(sequence)
            found = self.rows(at) if plan.drafts else None
            candidates = found if matched is None else Merged(found, matched, self.prompt_lookup.rates)
            if candidates is not None:
                tree = plan.build(text[at - 1], candidates)
        roots = [root_only(other.pending or 0) for other in self.others]
        tree, *rest = policy.cut([tree, *roots])
        policy.catch_up()
        following = iter(text[at:])
        accepted = walk(tree, lambda node: next(following))
        sequence.tokens += text[at - 1 : at - 1 + len(accepted.path)]
        sequence.pending = text[at - 1 + len(accepted.path)]
        drafting = sum(p.kind != "plain" and p.drafts for p in [plan, *beside])
        block = max(
            [(p.depth or DEPTH) + 1 for p in [plan, *beside] if p.kind != "plain" and p.drafts], default=0
        )
        draft = self.costs.expected("draft", block * drafting, 32, drafting) if drafting else 0.0
        came = [accepted]
        for other in self.others:
            assert other.pending is not None
            other.tokens.append(other.pending)
            other.pending -= n
            came.append(Accepted((0,), (other.pending,)))
        if tree.n_nodes:
            self.kinds.append("lookup" if not plan.drafts else "draft" if matched is None else "both")
            took = self.costs.expected("verify", n + tree.n_nodes, 32)
            policy.record(Result([tree, *rest], came, StepTimes(draft, 0.0, took, 0.1)))
            self.ms += draft + took + 0.1
        else:
            self.kinds.append("draft" if drafting else "plain")
            took = self.costs.expected("verify", n, 32)
            policy.record(Result([tree, *rest], came, StepTimes(draft, 0.0, took)))
            self.ms += draft + took
        return plan

    def write(self, n: int) -> float:
        """Tokens per millisecond over at least n tokens, against plain decoding."""
        first, before = self.sequence.n_tokens, self.ms
        while self.sequence.n_tokens < first + n:
            self.step()
        return (self.sequence.n_tokens - first) * FLAT[1] / (self.ms - before)


def prose(n: int, seed: int = 0) -> list[int]:
    """Tokens in random order; a few are frequent, as in text."""
    return (np.random.default_rng(seed).zipf(1.4, n) % 3000).tolist()


def copy(n: int) -> list[int]:
    once = np.random.default_rng(2).permutation(4000)[:n].tolist()
    return once + once


@pytest.mark.parametrize("verify", [FLAT, STEEP], ids=["flat", "steep"])
def test_without_a_draft_it_never_loses_and_lookup_pays(verify):
    writer = Writer(copy(400), 402, None, costs_of(verify))
    writer.write(300)
    assert writer.kinds.count("lookup") > 5 and writer.kinds.count("draft") == 0
    assert len(writer.kinds) < (60 if verify is FLAT else 200)
    for seed in range(4):
        writer = Writer(prose(1500, seed), 700, None, costs_of(verify))
        assert writer.write(600) >= 0.985


def test_lookup_that_cannot_fail_makes_a_draft_useless():
    writer = Writer(copy(600), 602, 0.5, costs_of(FLAT))
    writer.write(500)
    late = writer.kinds[len(writer.kinds) // 2 :]
    assert late.count("lookup") >= len(late) - 1  # but for a try


def test_a_good_draft_is_run_where_lookup_is_poor():
    writer = Writer(prose(1500), 700, 0.9, costs_of(FLAT))
    rate = writer.write(600)
    assert rate > 3
    assert writer.kinds.count("draft") + writer.kinds.count("both") > 0.8 * len(writer.kinds)
    assert writer.kinds.count("both") > 0


def test_a_poor_draft_does_not_keep_lookup_from_being_used():
    """Drafting does not pay, so decoding is plain; where the output begins to repeat, lookup alone is verified."""
    text = [*prose(600), *copy(300)]
    writer = Writer(text, 300, 0.05, costs_of(FLAT, draft=9.0))
    writer.write(len(text) - 300 - 2 * BUDGET)
    assert writer.kinds.count("plain") > 100
    assert writer.kinds[-8:].count("lookup") >= 7


def test_what_drafts_have_lost_does_not_keep_lookup_from_being_used():
    """Neither of this text nor of others before it."""
    writer = Writer(copy(300), 302, 0.05, costs_of(FLAT, draft=9.0))
    writer.policy.draft_ledger.left = -4.0 * FLAT[1]
    writer.write(250)
    assert writer.kinds.count("draft") == 0 and writer.kinds.count("lookup") > 5


def test_votes_before_plain_steps_are_learned_from():
    """Predictions of lookup are compared with the emitted tokens even where nothing is verified."""
    writer = Writer([7, 8, 9] * 5 + prose(80), 13, None, costs_of({1: 10.0, 2: 40.0, 32: 900.0}))
    before = all_rates(writer.prompt_lookup.rates)
    writer.step()
    writer.step()
    assert writer.kinds == ["plain"] * 2 and all_rates(writer.prompt_lookup.rates) != before


def test_plain_steps_far_from_any_match_are_not_planned(monkeypatch):
    """Behind a try that did not pay: two of three steps that no match is near."""
    writer = Writer([*range(2000)], 300, 0.05, costs_of(STEEP, draft=9.0))
    looked, glance = [], PromptLookup.glance

    def counted(self: PromptLookup, *args: object) -> float:
        looked.append(1)
        return glance(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(PromptLookup, "glance", counted)
    writer.write(60)
    del looked[:]
    writer.write(90)
    assert len(looked) <= 40


@pytest.mark.parametrize("at", range(3))
def test_rest_does_not_miss_the_start_of_a_repetition(at: int):
    """Wherever it begins between two looks, at most some of its first tokens are plain."""
    text = [*prose(600 + at), *copy(300)]
    writer = Writer(text, 300, 0.05, costs_of(FLAT, draft=9.0))
    writer.write(300 + at + 302)
    before = len(writer.kinds)
    writer.write(200)
    assert len(writer.kinds) - before <= 40


@pytest.mark.parametrize("others", [1, 7])
def test_lookup_of_one_sequence_of_a_batch_is_used(others: int):
    writer = Writer(copy(400), 402, None, costs_of(FLAT), others)
    writer.write(300)
    assert writer.kinds.count("lookup") > 0.8 * len(writer.kinds)
    assert len(writer.kinds) < 60
