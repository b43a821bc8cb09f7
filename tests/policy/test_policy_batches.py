"""Tests of the policy in batches: one heap allots the columns, at least one each; plain batching where drafting does not pay."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_ggml.config import Mode
from dflash_ggml.decode.accept import Accepted
from dflash_ggml.decode.candidates import CandidateBlock
from dflash_ggml.decode.sequence import Sequence
from dflash_ggml.decode.tree import Tree, root_only
from dflash_ggml.errors import ConfigError
from dflash_ggml.policy.plan import PLAIN, Plan, plan_of
from dflash_ggml.policy.policy import Policy, Result, StepTimes
from reference.virtual_clock import (
    CPU,
    H100,
    JOINT_CPU,
    JOINT_H100,
    LINEAR_CPU,
    SEVERAL_H100,
    SEVERAL_H200,
    JointMachine,
    Parts,
    Run,
    SyntheticSequence,
    decode,
)

DEPTH = 15
HIGH_ACCEPTANCE, LOW_ACCEPTANCE, HOPELESS, LOOPING = (
    (0.92, 0.8, 0.4),
    (0.47, 1.5, 0.6),
    (0.03, 0.8, 0.4),
    (0.97, 0.3, 0.4),
)


def synthetic(n: int, *kinds: tuple[float, float, float], off: float = 0.0) -> list[SyntheticSequence]:
    made = [kinds[i % len(kinds)] for i in range(n)]
    return [SyntheticSequence(h, i, spread=s, others=o, off=off) for i, (h, s, o) in enumerate(made)]


def policy_for(machine: JointMachine) -> Policy:
    return Policy(DEPTH, machine.costs(), is_gpu=machine not in (JOINT_CPU, LINEAR_CPU))


def plain_rate(machine: JointMachine, n: int) -> float:
    return n / machine.plain_ms(n)


# ---- plans and cuts


def sequence(mode: Mode = "auto", budget: int = 31) -> Sequence:
    return Sequence([0] * 9, 7, mode=mode, budget=budget)


def grown(sequences: list[Sequence], plans: list[Plan], seed: int = 0) -> list[Tree]:
    """A tree of made-up candidates for every plan."""
    found = []
    for i, (one, plan) in enumerate(zip(sequences, plans)):
        rows, _ = SyntheticSequence(0.6 + 0.005 * i, seed, spread=1.0, length=64).at(i, DEPTH)
        assert one.pending is not None
        found.append(root_only(one.pending) if plan.kind == "plain" else plan.build(one.pending, rows))
    return found


def nothing(trees: list[Tree]) -> Result:
    return Result(trees, [None] * len(trees), StepTimes(1.0, 0.0, 9.0, 0.1, 0.1))


@pytest.mark.parametrize("n", [1, 2, 5, 16, 40, 64])
def test_every_sequence_has_its_column_and_no_more_are_taken_than_there_are(n: int):
    policy, sequences = policy_for(JOINT_H100), [sequence() for _ in range(n)]
    for step in range(20):
        plans = policy.plan(sequences)
        trees = grown(sequences, plans, step)
        cut = policy.cut(trees)
        assert sum(tree.width for tree in cut) <= max(64, n)
        assert all(
            tree.width >= 1 and np.array_equal(tree.tokens, whole.tokens[: tree.width])
            for tree, whole in zip(cut, trees)
        )
        assert len({plan.depth for plan in plans if plan.kind != "plain"}) <= 1
        policy.record(nothing(cut))


def test_a_requested_width_stays_while_it_fits():
    policy = policy_for(JOINT_H100)
    sequences = [
        sequence(), sequence("tree", 15), sequence("chain", 12), sequence("plain"), sequence()
    ]  # fmt: skip
    for step in range(4):
        plans = policy.plan(sequences)
        assert plans[1:4] == [Plan("tree", 15), Plan("chain", DEPTH), PLAIN]
        cut = policy.cut(grown(sequences, plans, step))
        assert [tree.n_nodes for tree in cut[1:4]] == [15, DEPTH, 0]
        assert all(plan.depth in (None, DEPTH) for plan in plans if plan.kind != "plain")
        policy.record(nothing(cut))
    crowd = [sequence("tree", 31) for _ in range(5)]
    cut = policy.cut(grown(crowd, policy.plan(crowd)))
    assert sum(tree.width for tree in cut) <= 64 and min(tree.width for tree in cut) > 4


def test_the_budget_of_a_request_is_its_own():
    policy, sequences = policy_for(JOINT_H100), [sequence(budget=3), sequence()]
    for step in range(12):
        cut = policy.cut(grown(sequences, policy.plan(sequences), step))
        assert cut[0].n_nodes <= 3
        policy.record(nothing(cut))


@pytest.mark.parametrize("n", [1, 2, 8])
@pytest.mark.parametrize("at", [1, 3, 6])
def test_a_sequence_whose_draft_failed_is_not_drafted_again_and_ends_no_other(n: int, at: int):
    policy, sequences = policy_for(SEVERAL_H100), [sequence() for _ in range(n)]
    for step in range(12):
        plans = policy.plan(sequences)
        if step > at:
            assert plans[-1] == PLAIN
        trees = grown(sequences, plans, step)
        if step == at:
            sequences[-1].undraftable = True
            trees[-1] = root_only(7)
        cut = policy.cut(trees)
        policy.catch_up()
        policy.record(nothing(cut))


@pytest.mark.parametrize(
    "mode, depth, plan",
    [
        ("auto", 0, PLAIN),
        ("plain", 15, PLAIN),
        ("chain", 15, Plan("chain", 15)),
        ("chain", 7, Plan("chain", 7)),
        ("tree", 15, Plan("tree", 31)),
        ("auto", 15, None),
    ],
)
def test_the_plan_of_a_mode(mode, depth, plan):
    assert plan_of(mode, 31, depth) == plan


@pytest.mark.parametrize(
    "mode, depth, message", [("chain", 0, "draft"), ("tree", 0, "draft"), ("forest", 15, "mode")]
)
def test_a_mode_that_cannot_be_is_refused(mode, depth, message):
    with pytest.raises(ConfigError, match=message):
        plan_of(mode, 31, depth)


def test_a_plan_builds_its_tree():
    rows = CandidateBlock([[1, 2], [3, 4]], [[-0.1, -2.5], [-0.2, -1.8]])
    assert Plan("chain", 2).build(9, rows).tokens.tolist() == [9, 1, 3]
    assert Plan("tree", 3).build(9, rows).tokens.tolist() == [9, 1, 3, 4]
    assert Plan("tree", 3, chain_seed=True).build(9, rows).tokens.tolist() == [9, 1, 3, 4]


# ---- in virtual time


@pytest.mark.parametrize("off", [0.0, 2.0], ids=["honest", "bold"])
@pytest.mark.parametrize("hits", [0.03, 0.3])
@pytest.mark.parametrize("n", [2, 8, 16])
@pytest.mark.parametrize("machine", [JOINT_H100, JOINT_CPU], ids=["h100", "cpu"])
def test_never_below_plain_batching(machine: JointMachine, n: int, hits: float, off: float):
    run = decode(policy_for(machine), machine, synthetic(n, (hits, 0.8, 0.3), off=off), steps=300)
    late = n * 150 / sum(run.ms[150:])
    assert late >= 0.97 * plain_rate(machine, n) or run.rate() > plain_rate(machine, n)
    assert run.rate() >= (0.94 if off == 0 else 0.9) * plain_rate(
        machine, n
    )  # nothing was known of the first sequences


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("off", [0.0, 2.0, 4.0], ids=["honest", "bold", "certain"])
@pytest.mark.parametrize("restart_every", [0, 60], ids=["long", "short"])
def test_drafts_that_never_hit_cost_next_to_nothing(n: int, off: float, restart_every: int):
    run = decode(
        policy_for(LINEAR_CPU),
        LINEAR_CPU,
        synthetic(n, HOPELESS, off=off),
        steps=700,
        restart_every=restart_every,
    )
    assert run.rate() >= 0.97 * plain_rate(LINEAR_CPU, n)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_repeating_sequences_slow_nothing_down(n: int):
    rates = [
        decode(policy_for(LINEAR_CPU), LINEAR_CPU, made, steps=700).rate() / plain_rate(LINEAR_CPU, n)
        for made in (synthetic(n, LOOPING), synthetic(1, LOOPING) + synthetic(n, HOPELESS)[1:])
    ]
    assert rates[0] >= 1.1 and rates[1] >= 0.97


@pytest.mark.parametrize("n", [2, 8])
@pytest.mark.parametrize("looping", [0, 1, 8])
def test_costs_that_are_far_off_lose_no_more(n: int, looping: int):
    """Of drafted steps half of what they take is measured, so that they seem to pay where they do not."""
    made = synthetic(min(n, looping), LOOPING) + synthetic(n, HOPELESS)[looping:]
    run = decode(policy_for(LINEAR_CPU), LINEAR_CPU, made, steps=700, reported=0.5)
    assert run.rate() >= 0.96 * plain_rate(LINEAR_CPU, n)


@pytest.mark.parametrize("n", [4, 8])
def test_high_acceptance_is_drafted_and_low_does_not_starve(n: int):
    run = decode(policy_for(JOINT_H100), JOINT_H100, synthetic(n, HIGH_ACCEPTANCE, LOW_ACCEPTANCE), steps=200)
    assert 1000 * run.rate() >= (1150 if n == 8 else 850)
    assert min(run.tokens) / sum(run.ms) >= 0.5 * plain_rate(JOINT_H100, n) / n


@pytest.mark.parametrize(
    "machine, n, times",
    [
        (SEVERAL_H100, 4, 1.08),
        (SEVERAL_H100, 8, 1.08),
        (SEVERAL_H100, 16, 1.06),
        (SEVERAL_H200, 4, 1.1),
        (SEVERAL_H200, 8, 1.08),
        (SEVERAL_H200, 16, 1.04),
    ],
)
def test_one_heap_is_worth_more_than_as_many_columns_as_a_pass_has(
    machine: JointMachine, n: int, times: float
):
    """Mixed sequences, by measured pass times; shares of 64 columns, after drafts as long."""
    columns = 64 // n
    plan = Plan("tree", columns - 1, depth=columns - 1)

    def equal(policy: Policy, trees: list[Tree]) -> list[Tree]:
        policy.cut(trees)
        return [tree.first(columns - 1) for tree in trees]

    def run(**how) -> Run:
        return decode(policy_for(machine), machine, synthetic(n, HIGH_ACCEPTANCE, LOW_ACCEPTANCE), **how)

    others = run(steps=80, cut=equal, plan=lambda p: [plan] * n)
    assert run(steps=160).rate() >= times * others.rate()


def test_drafts_shrink_when_there_are_many():
    def columns(n: int) -> int:
        run = decode(policy_for(JOINT_H100), JOINT_H100, synthetic(n, HIGH_ACCEPTANCE), steps=60)
        return sorted(run.blocks)[len(run.blocks) // 2]

    assert columns(2) > columns(16)


def test_a_rise_in_acceptance_is_noticed():
    """One of two has near-zero acceptance for 300 tokens, then a high one: left out, probed now and then, drafted soon after
    the change."""
    seen = []

    def note(plans: list[Plan]) -> list[Plan]:
        seen.append(plans[0].kind != "plain")
        return plans

    turning = Parts(
        [SyntheticSequence(0.03, 1), SyntheticSequence(0.97, 3, spread=0.3)], lambda at: at >= 300
    )
    run = decode(
        policy_for(JOINT_CPU), JOINT_CPU, [turning, SyntheticSequence(0.03, 2)], steps=700, plan=note
    )
    assert run.tokens[0] > 1200
    assert sum(seen[20:300]) <= 14
    assert sum(seen[-100:]) >= 90


def test_a_lone_sequence_is_a_batch_of_one():
    """One that is left when others end is planned as any other."""
    policy, sequences = Policy(DEPTH, CPU.costs()), [sequence() for _ in range(3)]
    for step in range(30):
        now = sequences[: 3 - step // 10]
        cut = policy.cut(grown(now, policy.plan(now), step))
        policy.catch_up()
        policy.record(nothing(cut))
    assert len(policy.notes) == 1


def test_plain_batching_gets_known_though_drafting_pays():
    """What drafting is held against: a plain step, for about as many sequences."""
    policy = policy_for(SEVERAL_H100)
    for n in (8, 16, 12):
        before = policy.costs.knows_plain(n)
        run = decode(policy, SEVERAL_H100, synthetic(n, HIGH_ACCEPTANCE), steps=30)
        assert sum(not drafting for drafting in run.drafting) == (0 if before else 1)
        assert policy.costs.knows_plain(n)
    assert not policy.costs.knows_plain(24)


def test_building_the_graphs_of_a_shape_is_no_loss_but_once():
    """A cache that is too small for the graphs builds them again and again: that counts."""
    policy, text = Policy(DEPTH, H100.costs(), is_gpu=True), SyntheticSequence(0.9, 3)
    decode(policy, H100, [text], steps=30)
    left: list[float] = []
    for _ in range(3):
        one = Sequence([-1] * 4000, 7, mode="auto", budget=31)
        plan = policy.plan([one])[0]
        (tree,) = policy.cut([plan.build(7, text.at(40, DEPTH)[0])])
        left.append(policy.draft_ledger.left or 0.0)
        policy.record(Result([tree], [Accepted((0,), (5,))], StepTimes(1.0, 0.0, 900.0), {"verify"}))
        left.append(policy.draft_ledger.left or 0.0)
    lost = [before - after for before, after in zip(left[::2], left[1::2])]
    assert 0 < lost[0] < 2 * H100.plain and lost[2] > 2 * lost[0]
