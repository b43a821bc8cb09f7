"""Tests of mode `auto` on a virtual clock: never much worse than the best fixed mode, and soon there after a change."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest

from dflash_ggml.config import Mode
from dflash_ggml.policy.costs import Costs
from dflash_ggml.policy.policy import HOPELESS_AFTER, Policy
from reference.virtual_clock import (
    CPU,
    EPYC,
    H100,
    Machine,
    Parts,
    Run,
    Source,
    SyntheticSequence,
    by_turns,
    decode,
)

DEPTH, BUDGET = 15, 31
MODES: list[tuple[Mode, int]] = [
    ("plain", 31),
    ("chain", 31),
    *(("tree", budget) for budget in (3, 7, 15, 31)),  # type: ignore[list-item]
]


def auto(machine: Machine, costs: Costs | None = None) -> Policy:
    return Policy(
        DEPTH, machine.costs() if costs is None else costs, is_gpu=machine is not CPU and machine is not EPYC
    )


def best_fixed(machine: Machine, text: Source, n: int) -> float:
    """Tokens per millisecond of the best fixed mode."""
    runs = [decode(auto(machine), machine, [text], n, mode=mode, budget=budget) for mode, budget in MODES]
    return max(run.rate() for run in runs)


def one_after_another(
    policy: Policy, machine: Machine, sources: list[SyntheticSequence], n: int
) -> list[Run]:
    return [decode(policy, machine, [text], n, seed=i) for i, text in enumerate(sources)]


def rate_of(runs: list[Run]) -> float:
    return sum(sum(run.emitted) for run in runs) / sum(sum(run.ms) for run in runs)


@pytest.mark.parametrize("off", [0.0, -2.0, 2.0], ids=["honest", "shy", "bold"])
@pytest.mark.parametrize("hits", [0.1, 0.5, 0.85])
@pytest.mark.parametrize("machine", [H100, CPU], ids=["h100", "cpu"])
def test_never_slower(machine: Machine, hits: float, off: float):
    """Ten sequences of 250 tokens, one after another on one engine."""
    best = best_fixed(machine, SyntheticSequence(hits, seed=3, off=off), 2500)
    sources = [SyntheticSequence(hits, 100 + i, off=off) for i in range(10)]
    runs = one_after_another(auto(machine), machine, sources, 250)
    assert rate_of(runs) >= 0.97 * best
    assert min(run.rate() for run in runs) * machine.plain >= 0.92


@pytest.mark.parametrize("pair", [(0.12, 0.88), (0.35, 0.8), (0.02, 0.93)])
@pytest.mark.parametrize("machine", [H100, CPU], ids=["h100", "cpu"])
def test_a_sequence_that_changes(machine: Machine, pair: tuple[float, float]):
    """High and low acceptance alternating, 300 tokens each: better than any fixed width, which fits one of them at most."""
    text = by_turns(*pair, seed=7)
    best = best_fixed(machine, text, 3600)
    assert decode(auto(machine), machine, [text], 3600).rate() >= 0.97 * best


def test_a_machine_that_slows_down():
    """All passes take three times as long from some step on: within a few steps the choice is the best again."""
    slow = Machine(
        H100.plain * 3,
        {w: ms * 3 for w, ms in H100.verify.items()},
        {w: ms * 3 for w, ms in H100.draft.items()},
    )
    best = best_fixed(slow, SyntheticSequence(0.8, 5), 3000)
    run = decode(auto(H100), lambda at: H100 if at < 300 else slow, [SyntheticSequence(0.8, 5)], 4000)
    changed = next(i for i in range(len(run.emitted)) if sum(run.emitted[:i]) >= 300)
    assert run.rate(changed + 20) >= 0.97 * best


def test_nothing_needs_to_be_known_before():
    best = best_fixed(H100, SyntheticSequence(0.8, 5), 4000)
    run = decode(auto(H100, Costs()), H100, [SyntheticSequence(0.8, 5)], 4000)
    assert run.rate(40) >= 0.97 * best
    assert run.rate() >= 0.95 * best


def test_a_wrong_measurement_is_not_believed_for_ever():
    """One width took four times as long while the machine was busy."""
    best = best_fixed(H100, SyntheticSequence(0.8, 5), 6000)
    costs = Costs()
    for point in H100.costs().points():
        costs.learn([point._replace(ms=point.ms * (4 if (point.kind, point.width) == ("verify", 32) else 1))])
    run = decode(auto(H100, costs), H100, [SyntheticSequence(0.8, 5)], 12_000)
    assert run.rate(len(run.ms) // 2) >= 0.97 * best


def test_where_drafting_does_not_pay_trying_costs_one_per_cent():
    runs = one_after_another(auto(CPU), CPU, [SyntheticSequence(0.05, i) for i in range(20)], 200)[5:]
    assert rate_of(runs) * CPU.plain >= 1 / 1.02
    assert 0 < sum(block > 0 for run in runs for block in run.blocks) < 60


def test_steps_that_wait_for_the_next_try_choose_nothing(monkeypatch):
    """Planning must stay short beside a plain step of a small model."""
    looked, best = 0, Policy._best

    def counted(self: Policy, *args: object) -> object:
        nonlocal looked
        looked += 1
        return best(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Policy, "_best", counted)
    run = decode(auto(CPU), CPU, [SyntheticSequence(0.05)], 2000)
    tries = sum(block > 0 for block in run.blocks)
    assert 0 < tries < 60 and looked <= 2 * tries + 2


def test_a_drafted_step_that_lost_is_reconsidered_at_once(monkeypatch):
    """Otherwise a CPU drafts on for up to 16 steps, by the forecasts of other sequences."""
    looked, look = set(), Policy._refresh

    def noted(self: Policy, *args: object) -> None:
        looked.add(self._now)
        look(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Policy, "_refresh", noted)
    run = decode(auto(CPU), replace(CPU, noise=0.0), [SyntheticSequence(0.7, 1)], 400)
    steps = zip(run.blocks[:-1], run.ms, run.emitted)
    lost = [i for i, (block, ms, n) in enumerate(steps, 1) if block and ms > 1.01 * n * CPU.plain]
    assert len(lost) > 20 and all(i + 1 in looked for i in lost)


def test_a_draft_that_promises_too_much_is_found_out_soon():
    """What steps gave counts like what was expected of them: ten drafted steps of the first sixty, not fifteen."""
    runs = [decode(auto(CPU), CPU, [SyntheticSequence(0.3, seed, off=3.0)], 80) for seed in range(8)]
    assert np.mean([sum(width > 0 for width in run.columns) for run in runs]) <= 12


def test_a_sequence_that_begins_to_repeat_is_drafted_at_once():
    """Low acceptance for 400 tokens, then twenty tokens over and over, which the draft predicts; 60 of them are seen first."""

    def word(at: int) -> int:
        return at if at < 400 else at % 20

    text = Parts(
        [SyntheticSequence(0.05, 3, word=word), SyntheticSequence(0.97, 4, word=word)], lambda at: at >= 400
    )
    run = decode(auto(CPU), CPU, [text], 1200)
    at = np.cumsum(run.emitted)
    late = [width > 0 for width, end in zip(run.columns, at) if end > 480]
    assert np.mean(late) >= 0.95
    assert run.rate() >= 0.98 * best_fixed(CPU, text, 1200)


def test_repetition_that_a_draft_does_not_foretell_is_tried_ever_more_seldom():
    usual, repeating = (
        decode(auto(CPU), CPU, [SyntheticSequence(0.05, 2, word=word)], 4000)
        for word in (None, lambda at: at % 20)
    )
    assert sum(b > 0 for b in repeating.blocks) < sum(b > 0 for b in usual.blocks) + 15
    assert repeating.rate() * CPU.plain > 0.98


@pytest.mark.parametrize("seed", range(3))
def test_no_device_has_to_be_busy_for_it(monkeypatch, seed: int):
    """What `catch_up` does is done in time where it is never called."""
    there = decode(auto(CPU), CPU, [SyntheticSequence(0.8, seed)], 600)
    monkeypatch.setattr(Policy, "catch_up", lambda self: None)
    assert decode(auto(CPU), CPU, [SyntheticSequence(0.8, seed)], 600).rate() >= 0.97 * there.rate()
    assert decode(auto(H100), H100, [SyntheticSequence(0.8, seed)], 600).rate() * H100.plain > 2.5


def test_what_cannot_pay_takes_one_per_cent_at_most():
    never = Machine(1.0, {2: 30.0, 32: 40.0}, {16: 5.0, 8: 3.0})
    run = decode(Policy(DEPTH, never.costs()), never, [SyntheticSequence(0.99)], 20_000)
    assert 0 < sum(block > 0 for block in run.blocks) < 70  # a draft of 3 or 5 ms each
    assert not any(run.columns) and run.rate() >= 0.985


@pytest.mark.parametrize("ms", [20.0, 2000.0])
@pytest.mark.parametrize("machine", [H100, CPU], ids=["h100", "cpu"])
def test_one_slow_draft_does_not_end_drafting(machine: Machine, ms: float):
    """Nothing was calibrated, and the only draft that was measured took long."""
    costs = Costs()
    costs.measured("plain", machine.plain, context=32)
    costs.measured("draft", ms, DEPTH + 1, 33)
    policy = auto(machine, costs)
    runs = one_after_another(policy, machine, [SyntheticSequence(0.85, seed) for seed in range(5)], 300)
    assert runs[-1].rate() >= 0.8 * best_fixed(machine, SyntheticSequence(0.85, 5), 3000)


def test_what_seems_not_to_pay_is_tried_when_that_is_saved_up():
    """What is known of drafts is wrong, by a factor that no acceptance makes up for."""
    costs = Costs()
    costs.learn([p._replace(ms=150.0 if p.kind == "draft" else p.ms) for p in H100.costs().points()])
    runs = one_after_another(
        auto(H100, costs), H100, [SyntheticSequence(0.85, seed) for seed in range(8)], 1000
    )
    assert runs[-1].rate() >= 2 / H100.plain


def test_a_draft_that_is_never_right_is_reported_once(caplog):
    policy = auto(H100)
    with caplog.at_level(logging.WARNING):
        runs = one_after_another(
            policy, H100, [SyntheticSequence(0.9, seed, never=True) for seed in range(12)], 300
        )
    assert policy.drafted >= HOPELESS_AFTER and policy.right == 0
    (record,) = caplog.records
    assert "none of the first 40 drafts was right" in record.getMessage()
    assert runs[-1].rate() * H100.plain > 0.98


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("hits", [0.3, 0.8, 0.9])
def test_a_machine_on_which_passes_are_disturbed_now_and_then(hits: float, seed: int):
    """3 % of all passes, plain ones too, take five times as long: no reason to decode plainly where drafts pay."""
    busy, text = replace(CPU, spikes=0.03), SyntheticSequence(hits, seed)
    best = best_fixed(busy, text, 2000)
    run = decode(Policy(DEPTH, busy.costs()), busy, [text], 2000, seed=seed)
    assert run.rate() >= 0.95 * best


def test_an_underconfident_draft_is_calibrated():
    sources = [SyntheticSequence(0.97, seed, off=-2.0) for seed in range(6)]
    runs = one_after_another(auto(EPYC), EPYC, sources, 300)
    assert np.mean([run.rate() for run in runs[1:]]) >= 1.08 / EPYC.plain


# ---- what one sequence may lose


@pytest.mark.parametrize("n", [40, 200, 800])
@pytest.mark.parametrize("kind", ["never", "by fits and starts", "easy, then misleading"])
@pytest.mark.parametrize("machine", [replace(CPU, noise=0.0)], ids=["cpu"])
def test_no_sequence_loses_more_than_its_bound(machine: Machine, kind: str, n: int):
    """The first sequence of an engine, and one after sequences for which drafting paid."""
    from dflash_ggml.policy.ledger import MOST, SHARE

    never = SyntheticSequence(0.95, 1, never=True)
    text = {
        "never": never,
        "by fits and starts": Parts(
            [SyntheticSequence(0.9, 1, off=2.0), SyntheticSequence(0.05, 2, off=2.0)],
            lambda at: at // 12 % 4 > 0,
        ),
        "easy, then misleading": Parts([SyntheticSequence(0.9, 3), never], lambda at: at >= 150),
    }[kind]
    for before in (0, 4):
        policy = Policy(DEPTH, machine.costs())
        for seed in range(before):
            decode(policy, machine, [SyntheticSequence(0.9, seed)], 200)
        run = decode(policy, machine, [text], n)
        lost = np.cumsum(run.ms) / machine.plain - (1 + SHARE) * np.cumsum(run.emitted)
        dearest = float((np.array(run.ms) / machine.plain - run.emitted).max())
        assert lost.max() <= MOST + dearest + 1e-6
        assert any(run.blocks)
