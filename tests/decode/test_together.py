"""Columns for several sequences: one heap, a floor of one column each, and plain batching where nothing is worth more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from dflash_ggml.decode.accept import greedy
from dflash_ggml.decode.account import PATIENCE, Account
from dflash_ggml.decode.adaptive import Adaptive
from dflash_ggml.decode.candidates import Rows
from dflash_ggml.decode.company import Company, Member
from dflash_ggml.decode.controller import Fixed
from dflash_ggml.decode.costs import Costs, Point
from dflash_ggml.decode.drafting import STARVED, Choice, blocks
from dflash_ggml.decode.experience import Experience
from dflash_ggml.decode.joint_costs import JointCosts
from dflash_ggml.decode.plan import Plan
from dflash_ggml.decode.prospect import Prospect
from dflash_ggml.decode.sequence import Sequence
from dflash_ggml.decode.together import PLAIN, Together
from dflash_ggml.decode.tree import Tree
from reference.virtual_clock import (
    JOINT_CPU,
    JOINT_H100,
    SEVERAL_H100,
    SEVERAL_H200,
    JointMachine,
    Placed,
    decode_together,
)

DEPTH = 15
EASY, HARD = (0.92, 0.8, 0.4), (0.47, 1.5, 0.6)


def texts(n: int, *kinds: tuple[float, float, float], off: float = 0.0) -> list[Placed]:
    made = [kinds[i % len(kinds)] for i in range(n)]
    return [Placed(h, i, spread=s, others=o, off=off) for i, (h, s, o) in enumerate(made)]


def plain_rate(machine: JointMachine, n: int) -> float:
    return 1000 * n / machine.verify_ms(n, n)


# ---- the heap


def grown(members: list[Member], plans: list[Plan], seed: int = 0) -> list[Tree]:
    """A tree of made-up candidates for every plan."""
    found = []
    for i, (member, plan) in enumerate(zip(members, plans)):
        rows, _ = Placed(0.6 + 0.005 * i, seed, spread=1.0).at(i, DEPTH)
        assert member.sequence.pending is not None
        none = Rows(np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32))
        found.append(plan.build(member.sequence.pending, none if plan.kind == "plain" else rows))
    return found


def free(budget: int = 31, known: Experience | None = None) -> Member:
    return Member(Sequence([0] * 9, 7), Adaptive(budget, DEPTH, known or Experience()))


def fixed(plan: Plan) -> Member:
    return Member(Sequence([0] * 9, 7), Fixed(plan))


@pytest.mark.parametrize("n", [2, 5, 16, 40, 64])
def test_every_sequence_has_its_column_and_no_more_are_taken_than_there_are(n: int):
    together, costs = Together(DEPTH), JointCosts(JOINT_H100.costs())
    members = [free() for _ in range(n)]
    for step in range(20):
        plans = together.next(members, costs)
        trees = grown(members, plans, step)
        cut = together.share(trees)
        assert sum(tree.width for tree in cut) <= max(64, n)
        assert all(
            tree.width >= 1 and np.array_equal(tree.tokens, whole.tokens[: tree.width])
            for tree, whole in zip(cut, trees)
        )
        assert len({plan.depth for plan in plans if plan.kind != "plain"}) <= 1
        together.observe(cut, [None] * n, 10.0)


def test_a_width_that_was_asked_for_stays_while_there_is_room():
    together, costs = Together(DEPTH), JointCosts(JOINT_H100.costs())
    members = [free(), fixed(Plan("tree", 15)), fixed(Plan("chain", 12)), fixed(Plan("plain", 0)), free()]
    for step in range(4):
        plans = together.next(members, costs)
        cut = together.share(grown(members, plans, step))
        assert [tree.n_nodes for tree in cut[1:4]] == [15, 12, 0]
        assert all(plan.depth in (None, DEPTH) for plan in plans if plan.kind != "plain")
    crowd = [fixed(Plan("tree", 31)) for _ in range(5)]
    plans = together.next(crowd, costs)
    cut = together.share(grown(crowd, plans))
    assert sum(tree.width for tree in cut) <= 64 and min(tree.width for tree in cut) > 4


def test_the_budget_of_a_request_is_its_own():
    together, costs = Together(DEPTH), JointCosts(JOINT_H100.costs())
    members = [free(3), free(31)]
    for step in range(12):
        cut = together.share(grown(members, together.next(members, costs), step))
        assert cut[0].n_nodes <= 3


def test_a_text_whose_draft_gives_no_numbers_is_not_drafted():
    together, costs = Together(DEPTH), JointCosts(JOINT_H100.costs())
    members = [free(), free()]
    members[0].sequence.undraftable = True
    for _ in range(3):
        assert together.next(members, costs)[0] == PLAIN


@pytest.mark.parametrize("n", [1, 2, 8])
@pytest.mark.parametrize("at", range(1, 6))
def test_a_draft_without_numbers_ends_no_other_text(monkeypatch: pytest.MonkeyPatch, n: int, at: int):
    """It shows between the plans of a step and the look at who drafts next, here everybody who can."""
    together, costs = Together(DEPTH), JointCosts(SEVERAL_H100.costs())
    costs.measured("plain", SEVERAL_H100.plain_ms(n), n, n)

    def everybody(company: Company, fixed: int) -> Iterator[Choice]:
        free = [i for i, adaptive in enumerate(company.free) if adaptive]
        return iter([Choice(frozenset(free), DEPTH + 1, 1.0, 1.0)])

    monkeypatch.setattr(together.drafting, "_choices", everybody)
    members = [free() for _ in range(n)]
    for step in range(1, 12):
        plans = together.next(members, costs)
        assert [plan.kind for plan in plans] == ["tree"] * (n - 1) + ["tree" if step <= at else "plain"]
        if step == at:
            members[-1].sequence.undraftable = True
            plans = [*plans[:-1], PLAIN]
        trees = together.share(grown(members, plans, step))
        together.meanwhile()
        together.observe(trees, [None] * n, 10.0)


@pytest.mark.parametrize("drafts", [True, False])
def test_what_copies_are_worth_cuts_no_draft(monkeypatch: pytest.MonkeyPatch, drafts: bool):
    """Near-certain ones would: of the next draft nothing that is much less likely would be grown."""
    together, costs = Together(DEPTH), JointCosts(SEVERAL_H100.costs())
    costs.measured("plain", SEVERAL_H100.plain_ms(2), 2, 2)
    chosen = Choice(frozenset([0, 1] if drafts else []), DEPTH + 1, 1.0, 1.0)
    monkeypatch.setattr(together.drafting, "choose", lambda *asked: chosen)
    members = [
        Member(Sequence([0] * 9, 7), Adaptive(31, DEPTH, Experience(), object()))  # type: ignore[arg-type]
        for _ in range(2)
    ]
    for step in range(4):
        plans = together.next(members, costs)
        assert [plan.drafts for plan in plans] == [drafts] * 2
        together.share(grown(members, plans, step))
    for member in members:
        assert member.adaptive and max(together.prospect(member.adaptive).recent)
        assert bool(together.prospect(member.adaptive).lasts) == drafts


def test_nodes_that_were_not_grown_are_not_worth_nothing():
    prospect = Prospect(others=Prospect())
    whole = [1.0, 0.8, 0.6, 0.4, 0.3, 0.2, 0.1]
    prospect.learn(whole, [0, 1, 2, 3, 4, 5, 6], [16, 4], 16)
    for _ in range(8):
        prospect.learn([1.0, 0.7, 0.25], [0, 1, 2], [16, 4], 16, whole=False)
    gains, often = prospect.of(16, 31)
    assert sorted(gains[: len(gains) // 6], reverse=True) == [0.7, 0.25, 0.25, 0.25, 0.2, 0.1]
    assert often.sum() == pytest.approx(6)
    assert prospect.of(4, 31)[1].sum() == pytest.approx(3)
    new = Prospect(others=prospect.others)
    new.learn([1.0, 0.9], [0, 1], [16, 4], 16, whole=False)
    assert new.gains[16][-1].tolist() == [0.9, 0.25, 0.25, 0.25, 0.2, 0.1]
    prospect.learn([1.0, 0.7, 0.25], [0, 1, 2], [16, 4], 16)  # the draft offers no more
    assert prospect.gains[16][-1].tolist() == [0.7, 0.25]


def test_an_easy_text_that_had_short_drafts_is_hoped_to_go_on():
    """What other texts' longer drafts gave says less of it than its own path; once it is tried that counts."""
    others = Prospect()
    for _ in range(6):
        others.learn([1.0, 0.4, 0.1, 0.02], [0, 1, 2, 3], [8, 4], 8)
    easy, of = Prospect(others=others), {}
    for _ in range(6):
        easy.learn([1.0, 0.9, 0.81, 0.729, 0.09], [0, 1, 2, 3, 1], [8, 4], 4)
    for block in (4, 8):
        gains, often = easy.of(block, 31)
        of[block] = gains @ often
    assert of[8] == pytest.approx(of[4] + sum(0.9**depth for depth in range(4, 8)))
    hopeless = Prospect(others=others)
    hopeless.learn([1.0, 0.5, 0.1], [0, 1, 1], [8, 4], 4)  # nobody reached the last depth
    assert max(hopeless.of(8, 31)[0]) == 0.5
    for _ in range(6):
        easy.learn([1.0, 0.9], [0, 1], [8, 4], 8)
    gains, often = easy.of(8, 31)
    assert gains @ often == pytest.approx(0.9)


def test_a_tree_that_is_cut_is_learned_as_one(monkeypatch: pytest.MonkeyPatch):
    """What is expected of a text has as many nodes as its budget, also while few are grown."""
    together, costs = Together(DEPTH), JointCosts(SEVERAL_H100.costs())
    chosen = Choice(frozenset([0, 1]), DEPTH + 1, 1.0, 1.0)
    monkeypatch.setattr(together.drafting, "choose", lambda *asked: chosen)
    members, cut = [free(), free()], 0
    for step in range(15):
        plans = together.next(members, costs)
        trees = grown(members, plans, step)
        cut += sum(tree.n_nodes < 31 for tree in trees)
        together.share(trees)
        together.meanwhile()
        assert {len(tree) for tree in together.others.gains[DEPTH + 1]} == {31}
    assert cut


@pytest.mark.parametrize("then", ["meanwhile", "observe", "catch_up"])
def test_what_came_is_learned_from_once_a_device_is_busy_again(then: str):
    """Not before the next draft is asked for, which a device waits for; and of nobody else but those who were in the step."""
    together, costs, members = Together(DEPTH), JointCosts(SEVERAL_H100.costs()), [free(), free(), free()]

    def step(who: list[Member]) -> tuple[list[Tree], list]:
        trees = together.share(grown(who, together.next(who, costs)))
        return trees, [greedy(tree, np.full(tree.width, 99, np.int32)) for tree in trees]

    def tried() -> list[float]:
        return [sum(member.controller.calibration.tried) for member in members]

    trees, accepted = step(members[:2])
    drafted = [tree.n_nodes > 0 for tree in trees] + [False]
    assert any(drafted)
    together.observe(trees, accepted, 9.0)
    assert tried() == [0, 0, 0]
    trees, accepted = step(members[1:])  # the first has left, another has come
    assert tried() == [0, 0, 0]
    {
        "meanwhile": together.meanwhile,
        "observe": lambda: together.observe(trees, accepted, 9.0),
        "catch_up": together.catch_up,
    }[then]()
    assert [samples > 0 for samples in tried()] == drafted
    known = tried()
    if then != "observe":  # once
        together.catch_up()
        assert tried() == known


@pytest.mark.parametrize("then", ["the same", "one left", "another text", "one without numbers"])
def test_the_next_step_is_planned_while_a_device_is_busy(monkeypatch: pytest.MonkeyPatch, then: str):
    """Once, and for nobody else; what is tried in the step under way is not forgotten for it."""
    together, costs, members = Together(DEPTH), JointCosts(SEVERAL_H100.costs()), [free(), free(), free()]
    asked = list[int]()

    def choose(company: Company, fixed: int) -> Choice:
        asked.append(len(company))
        return Choice(
            frozenset(range(len(company))), DEPTH + 1, 1.0, trying=(min(len(asked), len(company)) - 1,)
        )

    monkeypatch.setattr(together.drafting, "choose", choose)
    monkeypatch.setattr(Account, "wants_plain", lambda account, plain_step: False)
    trees = together.share(grown(members, together.next(members, costs)))
    together.meanwhile()
    together.meanwhile()
    assert asked == [3, 3]
    together.observe(trees, [greedy(tree, np.full(tree.width, 99, np.int32)) for tree in trees], 9.0)
    tried = []
    monkeypatch.setattr(together.drafting, "tried", lambda company, i, accepted: tried.append(i))
    if then == "one left":
        members = members[1:]
    elif then == "another text":
        members[0] = free()
    elif then == "one without numbers":
        members[1].sequence.undraftable = True
    plans = together.next(members, costs)
    assert asked == ([3, 3] if then == "the same" else [3, 3, len(members)])
    assert len(plans) == len(members)
    together.share(grown(members, plans))
    together.meanwhile()
    assert tried == [0]


def test_a_width_that_was_asked_for_is_not_planned_ahead(monkeypatch: pytest.MonkeyPatch):
    """Its plan may rest on the text, of which the step under way is a part."""
    together, costs = Together(DEPTH), JointCosts(SEVERAL_H100.costs())
    members, seen, plan = [free(), fixed(Plan("chain", 4))], list[int](), Fixed.next

    def noted(controller: Fixed, sequence: Sequence, costs: Costs) -> Plan:
        seen.append(1)
        return plan(controller, sequence, costs)

    monkeypatch.setattr(Fixed, "next", noted)
    for step in range(3):
        together.share(grown(members, together.next(members, costs), step))
        together.meanwhile()
        assert len(seen) == step + 1


def test_what_plain_batching_takes_gets_known_though_drafting_pays():
    """What drafting is held against: a few plain steps, once, for about as many texts."""
    together, costs = Together(DEPTH), JointCosts(SEVERAL_H100.costs())
    plain = list[tuple[int, int]]()
    for n in (8, 16, 12):
        members = [free() for _ in range(n)]
        for step in range(30):
            plans = together.next(members, costs)
            if step and all(plan.kind == "plain" for plan in plans):
                plain.append((n, step))
                costs.measured("plain", SEVERAL_H100.plain_ms(n), n, n)
            trees = together.share(grown(members, plans, step))
            together.meanwhile()
            together.observe(trees, [None] * n, 10.0)
    assert [n for n, _ in plain] == [8, 16]  # fewer and more say enough of twelve, fewer alone of none
    assert costs.knows("plain", 12) and not costs.knows("plain", 24) and costs.knows("plain", 1)
    assert not costs.knows("plain", 3)


@pytest.mark.parametrize("plain", [6.0, 9.0, 10.5, 12.0, 14.0])
def test_a_width_that_would_starve_a_text_gives_way_to_a_narrower_one(plain: float):
    """Not the whole set of drafting texts with it: of the widths that leave it enough of its speed the best is taken."""
    together, costs = Together(DEPTH), JointCosts(SEVERAL_H100.costs())
    for _ in range(3):
        costs.measured("plain", plain, 16, 16)
    members = [free() for _ in range(16)]
    together.next(members, costs)
    for member in members[:8]:
        assert member.adaptive is not None
        for _ in range(6):
            together.prospect(member.adaptive).learn(
                [1.0, *(0.95 - 0.05 * i for i in range(15))], range(16), [16, 8, 4], 16
            )
    asked = Company(members, together.others), frozenset(range(8)), 8, 0
    choice, widest = together.drafting.rate(*asked), together.drafting.rate(*asked, starved=0.0)
    assert choice.slowest * plain >= STARVED or choice.nodes == 0
    assert choice.nodes <= widest.nodes == 48
    assert (choice.nodes == widest.nodes) == (widest.slowest * plain >= STARVED)


# ---- in virtual time


@pytest.mark.parametrize("off", [0.0, 2.0], ids=["honest", "bold"])
@pytest.mark.parametrize("hits", [0.03, 0.3])
@pytest.mark.parametrize("n", [2, 8, 16])
@pytest.mark.parametrize("machine", [JOINT_H100, JOINT_CPU], ids=["h100", "cpu"])
def test_never_below_plain_batching(machine: JointMachine, n: int, hits: float, off: float):
    run = decode_together(texts(n, (hits, 0.8, 0.3), off=off), machine, 300)
    late = slice(150, None)
    assert 1000 * n * len(run.ms[late]) / sum(run.ms[late]) >= 0.97 * plain_rate(
        machine, n
    ) or run.rate > plain_rate(machine, n)
    assert run.rate >= (0.94 if off == 0 else 0.9) * plain_rate(
        machine, n
    )  # an engine's first texts, of which nothing was known


@pytest.mark.parametrize("n", [4, 8])
def test_easy_texts_are_drafted_and_hard_ones_do_not_starve(n: int):
    run = decode_together(texts(n, EASY, HARD), JOINT_H100, 200)
    assert run.rate >= (1150 if n == 8 else 850)
    assert 1000 * min(run.tokens) / sum(run.ms) >= 0.5 * plain_rate(JOINT_H100, n) / n


def test_one_heap_is_worth_more_than_equal_shares():
    """Half easy, half hard, eight of them; equal shares of as many columns, after the same drafts."""

    def equal(together: Together, trees: list[Tree], plans: list[Plan]) -> list[Tree]:
        cut = together.share(trees)
        columns = sum(tree.width for tree in cut)
        return [tree.first(columns // len(trees) - 1) for tree in trees]

    shared = decode_together(texts(8, EASY, HARD), JOINT_H100, 200)
    assert shared.rate >= 1.08 * decode_together(texts(8, EASY, HARD), JOINT_H100, 200, share=equal).rate


@pytest.mark.parametrize(
    "machine, n, times",
    [
        (SEVERAL_H100, 4, 1.08),
        (SEVERAL_H100, 8, 1.08),
        (SEVERAL_H100, 16, 1.08),
        (SEVERAL_H200, 4, 1.1),
        (SEVERAL_H200, 8, 1.1),
        (SEVERAL_H200, 16, 1.05),
    ],
)
def test_one_heap_is_worth_more_than_as_many_columns_as_a_pass_has(
    machine: JointMachine, n: int, times: float
):
    """Half easy, half hard, by what passes were measured to take; shares of 64 columns, after drafts as long."""
    columns = 64 // n
    plan = Plan("tree", columns - 1, depth=columns - 1)

    def equal(together: Together, trees: list[Tree], plans: list[Plan]) -> list[Tree]:
        together.share(trees)
        return [tree.first(columns - 1) for tree in trees]

    shared = decode_together(texts(n, EASY, HARD), machine, 160)
    others = decode_together(texts(n, EASY, HARD), machine, 80, share=equal, plan=lambda p: [plan] * n)
    assert shared.rate >= times * others.rate


def test_longer_drafts_are_looked_at_though_tries_could_take_all_that_is_saved():
    """Texts that are left out wait while a longer draft is saved for; the next longer one and the whole one take turns."""
    looks = []

    class Noted(Together):
        def observe(self, *came: object) -> None:  # type: ignore[override]
            if self._step.chosen.longer and not self._due:
                looks.append(max((plan.depth or 0) + 1 for plan in self._plans))
            super().observe(*came)  # type: ignore[arg-type]

    draft = {4: 1.0, 8: 1.0, 12: 1.1, 16: 1.2, 17: 4.0, 32: 6.0, 64: 12.0}
    hopeless = (0.05, 0.5, 0.3)
    made = texts(8, (0.75, 0.5, 0.3), hopeless, hopeless)
    decode_together(made, replace(SEVERAL_H200, draft=draft), 400, together=Noted(DEPTH))
    assert len(looks) >= 4 and {8, 16} <= set(looks)


def test_drafts_shrink_when_there_are_many():
    def columns(n: int) -> int:
        together, seen = Together(DEPTH), []

        def note(plans: list[Plan]) -> list[Plan]:
            seen.append(max([(plan.depth or 0) + 1 for plan in plans]))
            return plans

        decode_together(texts(n, EASY), JOINT_H100, 60, together=together, plan=note)
        return sorted(seen)[len(seen) // 2]

    assert columns(2) > columns(16)


def test_a_text_that_turns_easy_is_found():
    """One of two is hopeless for 300 words, then easy: left out, tried now and then, drafted soon after it has turned."""
    seen = []

    def note(plans: list[Plan]) -> list[Plan]:
        seen.append(plans[0].kind != "plain")
        return plans

    hard, easy, turning = Placed(0.03, 1), Placed(0.97, 3, spread=0.3), Placed(0.03, 1)
    turning.at = lambda place, depth: (hard if place < 300 else easy).at(place, depth)  # type: ignore[method-assign]
    run = decode_together([turning, Placed(0.03, 2)], JOINT_CPU, 700, plan=note)
    assert run.tokens[0] > 1200
    assert sum(seen[20:300]) <= 14
    assert sum(seen[-100:]) >= 90


# ---- what passes cost


def test_costs_of_several_are_those_of_one_and_what_each_adds():
    alone = Costs()
    alone.learn([Point("plain", 1, 0, 8.0), Point("verify", 8, 0, 9.0), Point("verify", 16, 0, 10.0)])
    costs = JointCosts(alone)
    assert costs.of("verify", 12, 3) == pytest.approx(9.5)
    assert costs.of("verify", 32, 3) == pytest.approx(12.0)  # on the line of the last two
    assert costs.of("draft", 32, 3) == 0.0
    for _ in range(3):
        costs.measured("verify", 11.0, 16, 3)
    assert costs.of("verify", 16, 3) == pytest.approx(11.0)
    assert costs.of("verify", 8, 3) == pytest.approx(10.0)
    assert costs.of("verify", 8, 5) == pytest.approx(11.0)
    assert costs.of("verify", 8, 1) == pytest.approx(9.0)


def test_a_wide_pass_that_was_not_measured_is_hoped_to_be_cheap():
    """Between what was measured it is no dearer than on their line, and no dearer than the narrower ones let hope: else a width
    behind which costs rise would never be tried."""
    alone = Costs()
    alone.learn([Point("plain", 1, 0, 8.0), Point("draft", 8, 0, 1.0), Point("draft", 16, 0, 2.0)])
    costs = JointCosts(alone)
    for _ in range(3):
        costs.measured("draft", 20.0, 128, 8)
    assert costs.of("draft", 12, 1) == pytest.approx(1.5)
    assert costs.of("draft", 64, 8) == pytest.approx(8.0)  # on the line of 8 and 16
    assert costs.of("draft", 128, 8) == pytest.approx(20.0)
    for _ in range(3):
        costs.measured("draft", 19.0, 64, 8)
    assert costs.of("draft", 96, 8) == pytest.approx(19.5)  # of 64 and 128: the other line is above
    assert costs.of("draft", 64, 8) == pytest.approx(19.0)


def test_a_slow_machine_is_slow_for_several_too():
    alone = Costs()
    alone.learn([Point("plain", 1, 0, 8.0), Point("verify", 8, 0, 9.0)])
    costs = JointCosts(alone)
    for _ in range(3):
        costs.measured("verify", 10.0, 8, 4)
    for _ in range(5):
        alone.measured("plain", 16.0)
        alone.measured("verify", 18.0, 8)
    assert costs.of("verify", 8, 4) == pytest.approx(20.0)


def test_blocks_halve():
    assert blocks(15) == [16, 8, 4] and blocks(3) == [4] and blocks(7) == [8, 4]


@pytest.mark.parametrize("patience", [1.0, PATIENCE])
def test_a_step_that_builds_graphs_takes_what_a_plain_one_does_at_the_least(patience: float) -> None:
    """Costs that are derived from others may come to nothing."""
    costs = Costs()
    costs.measured("verify", 1.0, 4)
    joint, known = JointCosts(costs), Experience()
    for _ in range(5):
        joint.measured("plain", 2.0, 4, 4)
    together = Together(DEPTH, account=Account(patience=patience))
    members = [free(known=known) for _ in range(4)]
    trees = together.share(grown(members, together.next(members, joint)))
    assert any(tree.n_nodes for tree in trees)
    together._expected = lambda nodes: 0.0
    accepted = [greedy(tree, np.full(tree.width, 99, np.int32)) for tree in trees]
    together.observe(trees, accepted, 9.0, usual=False)  # 4 tokens in the time of a plain step
    together.catch_up()
    assert together.account.left == patience * 4 * 2.0
    assert together.account.ahead == pytest.approx(2 + (1 - 2) / 16)
