"""What `auto` does with copies: alone, beside a draft, or not at all, by what they and the passes were worth so far."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dflash_ggml.decode.accept import walk
from dflash_ggml.decode.adaptive import Adaptive
from dflash_ggml.decode.candidates import Rows
from dflash_ggml.decode.controller import controller
from dflash_ggml.decode.costs import Costs, Point
from dflash_ggml.decode.experience import Experience
from dflash_ggml.decode.merged import Merged, observe
from dflash_ggml.decode.plan import Plan
from dflash_ggml.decode.sequence import Sequence
from dflash_ggml.decode.widths import least_sure
from dflash_ggml.drafts.suffix import Copies

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
    """Writes a text that is known, with drafts that are right so often."""

    def __init__(self, text: list[int], n_prompt: int, drafted: float | None, costs: Costs) -> None:
        self.text, self.hits, self.costs = text, drafted, costs
        self.copies = Copies(BUDGET)
        self.sequence = Sequence(tokens=text[:n_prompt], pending=text[n_prompt])
        self.copies.begin(self.sequence)
        depth = 0 if drafted is None else DEPTH
        self.auto: Any = controller("auto", BUDGET, depth, experience=Experience(), copies=self.copies)
        self.rng = np.random.default_rng(0)
        self.kinds: list[str] = []
        self.ms = 0.0

    def rows(self, at: int) -> Rows:
        """Rank 0 of each depth says that it is right with this probability, and is."""
        assert self.hits is not None
        truth = [*self.text[at : at + DEPTH], *[0] * DEPTH][:DEPTH]
        best = [t if self.rng.random() < self.hits else 500 for t in truth]
        scores = [[np.log(self.hits), np.log(min(self.hits, 1 - self.hits) / 2)]] * DEPTH
        return Rows([[b, 600 + i] for i, b in enumerate(best)], np.array(scores, np.float32))

    def step(self) -> Plan:
        sequence, text = self.sequence, self.text
        plan, at = self.auto.next(sequence, self.costs), sequence.n_tokens + 1
        if plan.kind == "plain":
            self.kinds.append("plain")
            self.ms += FLAT[1]
            sequence.tokens.append(text[at - 1])
            sequence.pending = text[at]
            return plan
        copied = self.copies.look_up(sequence)
        found = self.rows(at) if plan.drafts else None
        candidates = found if copied is None else Merged(found, copied, self.copies.rates)
        tree = plan.build(text[at - 1], candidates)
        if not tree.n_nodes:
            self.kinds.append("draft")
            self.ms += FLAT[1] + self.costs.draft((plan.depth or DEPTH) + 1, 32)
            sequence.tokens.append(text[at - 1])
            sequence.pending = text[at]
            return plan
        following = iter(text[at:])
        accepted = walk(tree, lambda node: next(following))
        sequence.tokens += text[at - 1 : at - 1 + len(accepted.path)]
        sequence.pending = text[at - 1 + len(accepted.path)]
        if tree.evidence is not None:
            observe(tree, accepted, self.copies.rates)
        self.auto.observe(tree, accepted)
        self.kinds.append("copies" if not plan.drafts else "draft" if copied is None else "both")
        self.ms += self.costs.drafted([tree.n_nodes], 16 if plan.drafts else 0, 32)[tree.n_nodes]
        return plan

    def write(self, n: int) -> float:
        """Tokens per millisecond over at least n tokens, against plain decoding."""
        first = self.sequence.n_tokens
        while self.sequence.n_tokens < first + n:
            self.step()
        return (self.sequence.n_tokens - first) * FLAT[1] / self.ms


def prose(n: int, seed: int = 0) -> list[int]:
    """Tokens that follow each other by chance; a few are frequent, as in a text."""
    return (np.random.default_rng(seed).zipf(1.4, n) % 3000).tolist()


def copy(n: int) -> list[int]:
    once = np.random.default_rng(2).permutation(4000)[:n].tolist()
    return once + once


@pytest.mark.parametrize("verify", [FLAT, STEEP], ids=["flat", "steep"])
def test_without_a_draft_it_never_loses_and_copies_pay(verify):
    writer = Writer(copy(400), 402, None, costs_of(verify))
    writer.write(300)
    assert writer.kinds.count("copies") > 5 and writer.kinds.count("draft") == 0
    assert len(writer.kinds) < (60 if verify is FLAT else 200)
    for seed in range(4):
        writer = Writer(prose(1500, seed), 700, None, costs_of(verify))
        assert writer.write(600) >= 0.985


def test_copies_that_cannot_fail_make_a_draft_useless():
    writer = Writer(copy(600), 602, 0.5, costs_of(FLAT))
    writer.write(500)
    late = writer.kinds[len(writer.kinds) // 2 :]
    assert late.count("copies") >= 0.9 * len(late)


def test_a_good_draft_is_run_where_copies_are_poor():
    writer = Writer(prose(1500), 700, 0.9, costs_of(FLAT))
    rate = writer.write(600)
    assert rate > 3
    assert writer.kinds.count("draft") + writer.kinds.count("both") > 0.8 * len(writer.kinds)
    assert writer.kinds.count("both") > 0


def test_a_poor_draft_does_not_keep_copies_from_being_used():
    """Drafting does not pay, so decoding is plain; where the text begins to copy, copies alone are verified."""
    text = [*prose(600), *copy(300)]
    writer = Writer(text, 300, 0.05, costs_of(FLAT, draft=9.0))
    writer.write(len(text) - 300 - 2 * BUDGET)
    assert writer.kinds.count("plain") > 100
    assert writer.kinds[-8:].count("copies") >= 7


def test_votes_before_plain_steps_are_learned_from():
    """What copies say is compared with what came also while nobody dares to verify it."""
    writer = Writer([7, 8, 9] * 5 + prose(80), 13, None, costs_of({1: 10.0, 2: 40.0, 32: 900.0}))
    before = list(writer.copies.rates.rates)
    writer.step()
    writer.step()
    assert writer.kinds == ["plain"] * 2 and writer.copies.rates.rates != before


def test_a_plan_of_copies_brings_its_tree():
    writer = Writer(copy(200), 220, None, costs_of(FLAT))
    assert isinstance(writer.auto, Adaptive)
    while (plan := writer.auto.next(writer.sequence, writer.costs)).kind == "plain":
        writer.step()
    assert plan.tree is not None and plan.budget == plan.tree.n_nodes > 0 and not plan.drafts
    assert (plan.tree.sources[1:] == 2).all()
    assert plan.build(plan.tree.tokens[0], None) is plan.tree


@pytest.mark.parametrize("after", [0.0, 6.0, 15.0])
def test_what_a_wide_step_costs_the_next_plain_one_counts_once_in_a_row(after: float):
    """The first of several wide steps has to be worth it: copies go on where they were begun."""
    costs = costs_of(FLAT)
    costs.learn([Point("after", 1, 0, after)])
    writer = Writer(copy(400), 402, None, costs)
    while "copies" not in writer.kinds[-1:] and len(writer.kinds) < 100:
        writer.step()
    first = writer.auto._copied.times
    begun = len(writer.kinds)
    writer.step()
    assert writer.kinds[-1] == "copies" and begun < 100
    took = writer.costs.drafted([writer.auto._copied.nodes], 0, 32)[writer.auto._copied.nodes]
    assert writer.auto._copied.token == pytest.approx(FLAT[1] / took)
    assert first > 1 and begun >= (1 if after == 0 else 2)


def test_how_sure_copies_must_be_to_be_worth_a_pass():
    flat = dict.fromkeys((1, 3, 7, 15, 31), 10.4)
    assert 0 < least_sure(flat, 10.0, 0.0) <= 0.08, "a pass that costs a twentieth more pays at once"
    steep = {1: 20.0, 3: 30.0, 7: 42.0, 15: 75.0, 31: 140.0}
    assert 0.5 <= least_sure(steep, 10.0, 0.0) < least_sure(steep, 10.0, 5.0)
    assert least_sure({1: 20.0}, 10.0, 0.0) == 1.0, "and one that cannot give its time back never does"
    assert least_sure({1: 0.0}, 10.0, 0.0) == 0.0


def test_plain_steps_far_from_any_copy_are_not_planned(monkeypatch):
    """Behind a try that did not pay: two of three steps that no match is near."""
    writer = Writer([*range(2000)], 300, 0.05, costs_of(STEEP, draft=9.0))
    looked, glance = [], Copies.glance

    def counted(self: Copies, *args: object) -> float:
        looked.append(1)
        return glance(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Copies, "glance", counted)
    writer.write(60)
    del looked[:]
    writer.write(90)
    assert len(looked) <= 40


@pytest.mark.parametrize("at", range(3))
def test_rest_does_not_miss_a_text_that_begins_to_copy(at: int):
    """Wherever it begins between two looks, at most some of its first tokens are plain."""
    text = [*prose(600 + at), *copy(300)]
    writer = Writer(text, 300, 0.05, costs_of(FLAT, draft=9.0))
    writer.write(300 + at + 302)
    before = len(writer.kinds)
    writer.write(200)
    assert len(writer.kinds) - before <= 40
