"""`auto` on a clock that is not the machine's: never much worse than the best fixed mode, and soon there after a change."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest

from dflash_ggml.decode.accept import Accepted
from dflash_ggml.decode.adaptive import HOPELESS_AFTER, Adaptive
from dflash_ggml.decode.candidates import Rows
from dflash_ggml.decode.controller import controller
from dflash_ggml.decode.costs import Costs
from dflash_ggml.decode.experience import Experience
from dflash_ggml.decode.tree import Tree, chain
from dflash_ggml.decode.widths import block_choices, step_ends
from reference.virtual_clock import CPU, H100, RANKS, Machine, Run, Text, calibrated, decode

DEPTH, BUDGET = 15, 31
MODES = [("plain", 31), ("chain", 31), *(("tree", budget) for budget in (3, 7, 15, 31))]


def best_fixed(machine: Machine, text: Callable[[], object], n: int) -> tuple[float, dict[str, Run]]:
    """Tokens per millisecond of the best fixed mode, and all of them."""
    runs = {
        f"{mode} {budget}": decode(controller(mode, budget, DEPTH), calibrated(machine), machine, text(), n)
        for mode, budget in MODES
    }
    return max(run.rate() for run in runs.values()), runs


def auto(known: Experience | None = None) -> Adaptive:
    chosen = controller("auto", BUDGET, DEPTH, experience=known)
    assert isinstance(chosen, Adaptive)
    return chosen


@pytest.mark.parametrize("off", [0.0, -2.0, 2.0], ids=["honest", "shy", "bold"])
@pytest.mark.parametrize("hits", [0.1, 0.5, 0.85])
@pytest.mark.parametrize("machine", [H100, CPU], ids=["h100", "cpu"])
def test_never_slower(machine: Machine, hits: float, off: float):
    """Ten texts of 250 tokens, one after another on one engine."""
    best, _ = best_fixed(machine, lambda: Text(hits, seed=3, off=off), 2500)
    known, costs = Experience(), calibrated(machine)
    runs = [decode(auto(known), costs, machine, Text(hits, 100 + i, off=off), 250) for i in range(10)]
    rate = sum(sum(run.tokens) for run in runs) / sum(sum(run.ms) for run in runs)
    assert rate >= 0.97 * best
    assert min(run.rate() for run in runs) * machine.plain >= 0.92


@pytest.mark.parametrize("pair", [(0.12, 0.88), (0.35, 0.8), (0.02, 0.93)])
@pytest.mark.parametrize("machine", [H100, CPU], ids=["h100", "cpu"])
def test_a_text_that_changes(machine: Machine, pair: tuple[float, float]):
    """Easy and hard by turns, 300 tokens each: better than any fixed width, which fits one of them at most."""

    def text() -> Callable[[int], Text]:
        parts = [Text(hits, 7 + i) for i, hits in enumerate(pair)]
        return lambda at: parts[at // 300 % 2]

    best, _ = best_fixed(machine, text, 3600)
    assert decode(auto(), calibrated(machine), machine, text(), 3600).rate() >= 0.97 * best


def test_a_machine_that_slows_down():
    """All passes take three times as long from some step on: within a few steps the choice is the best again."""
    slow = Machine(
        H100.plain * 3,
        {w: ms * 3 for w, ms in H100.verify.items()},
        {w: ms * 3 for w, ms in H100.draft.items()},
    )
    best, _ = best_fixed(slow, lambda: Text(0.8, 5), 3000)
    run = decode(auto(), calibrated(H100), lambda at: H100 if at < 300 else slow, Text(0.8, 5), 4000)
    changed = next(i for i in range(len(run.tokens)) if sum(run.tokens[:i]) >= 300)
    assert run.rate(changed + 20) >= 0.97 * best


def test_nothing_needs_to_be_known_before():
    best, _ = best_fixed(H100, lambda: Text(0.8, 5), 4000)
    run = decode(auto(), Costs(), H100, Text(0.8, 5), 4000)
    assert run.rate(40) >= 0.97 * best
    assert run.rate() >= 0.95 * best


def test_a_wrong_measurement_is_not_believed_for_ever():
    """One width took four times as long while the machine was busy: it is tried again."""
    best, _ = best_fixed(H100, lambda: Text(0.8, 5), 6000)
    costs = Costs()
    for point in calibrated(H100).points():
        costs.learn([point._replace(ms=point.ms * (4 if (point.kind, point.width) == ("verify", 32) else 1))])
    run = decode(auto(), costs, H100, Text(0.8, 5), 12_000)
    assert run.rate(len(run.ms) // 2) >= 0.97 * best


def test_where_drafting_does_not_pay_trying_costs_one_per_cent():
    known, costs = Experience(), calibrated(CPU)
    runs = [decode(auto(known), costs, CPU, Text(0.05, i), 200) for i in range(20)]
    late = runs[5:]
    ms = sum(sum(run.ms) for run in late)
    plain = sum(sum(run.tokens) for run in late) * CPU.plain
    assert ms <= 1.02 * plain
    assert 0 < sum(columns > 0 for run in late for columns in run.drafted) < 60


def test_steps_that_wait_for_the_next_try_look_nothing_up(monkeypatch):
    """Decisions must stay short beside a plain step of a small model."""
    looked, drafted = 0, Costs.drafted

    def counted(self: Costs, *args: object) -> dict[int, float]:
        nonlocal looked
        looked += 1
        return drafted(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Costs, "drafted", counted)
    run = decode(auto(), calibrated(CPU), CPU, Text(0.05), 2000)
    tries = sum(columns > 0 for columns in run.drafted)
    assert 0 < tries < 60 and looked <= 5 * tries


def test_a_draft_that_promises_too_much_is_found_out_soon():
    """What steps gave counts like what was expected of them: ten drafted steps of the first sixty, not fifteen."""
    drafted = [
        sum(width > 0 for width in decode(auto(), calibrated(CPU), CPU, Text(0.3, seed, off=3.0), 80).widths)
        for seed in range(8)
    ]
    assert np.mean(drafted) <= 12


def test_a_text_that_begins_to_repeat_itself_is_drafted_at_once():
    """Hard for 400 words, then twenty words over and over, which the draft foretells: 60 of them are seen before it is tried."""

    def text() -> Callable[[int], Text]:
        parts = [Text(0.05, 3), Text(0.97, 4)]
        return lambda at: parts[at >= 400]

    def word(at: int) -> int:
        return at if at < 400 else at % 20

    run = decode(auto(), calibrated(CPU), CPU, text(), 1200, word=word)
    at = np.cumsum(run.tokens)
    assert all(run.widths[i] for i in range(len(at)) if at[i] > 460)
    best, _ = best_fixed(CPU, text, 1200)
    assert run.rate() >= best


def test_repetition_that_a_draft_does_not_foretell_is_tried_ever_more_seldom():
    usual, repeating = (
        decode(auto(), calibrated(CPU), CPU, Text(0.05, 2), 4000, word=word)
        for word in (None, lambda at: at % 20)
    )
    assert sum(w > 0 for w in repeating.widths) < sum(w > 0 for w in usual.widths) + 15
    assert repeating.rate() * CPU.plain > 0.98


class Prompt(Adaptive):
    """Learns at once what could wait."""

    def observe(self, tree: Tree, accepted: Accepted) -> None:
        super().observe(tree, accepted)
        self.catch_up()


@pytest.mark.parametrize("machine", [H100, CPU], ids=["h100", "cpu"])
def test_what_is_learned_later_is_learned_in_time(machine: Machine):
    runs = [
        decode(kind(BUDGET, DEPTH, Experience()), calibrated(machine), machine, Text(0.6, 1), 600)
        for kind in (Adaptive, Prompt)
    ]
    assert runs[0].widths == runs[1].widths and len(set(runs[0].widths)) > 1


def test_where_drafting_cannot_pay_it_is_not_tried():
    never = Machine(1.0, {2: 30.0, 32: 40.0}, {16: 5.0, 8: 3.0})
    run = decode(auto(), calibrated(never), never, Text(0.99), 500)
    assert not any(run.widths)


@pytest.mark.parametrize("ms", [20.0, 2000.0])
@pytest.mark.parametrize("machine", [H100, CPU], ids=["h100", "cpu"])
def test_one_slow_draft_does_not_end_drafting(machine: Machine, ms: float):
    """Nothing was calibrated, and the only draft of a short first text took long. What a text may lose at once is little, so it
    takes some of it to come back."""
    known, costs = Experience(), Costs()
    decode(auto(known), costs, machine, Text(0.85), 2)
    assert known.drafted == 1
    costs.__init__()
    costs.measured("plain", machine.plain, context=32)
    costs.measured("draft", ms, DEPTH + 1, 33)
    runs = [decode(auto(known), costs, machine, Text(0.85, seed), 300) for seed in range(5)]
    best, _ = best_fixed(machine, lambda: Text(0.85, 5), 3000)
    assert runs[-1].rate() >= 0.8 * best


def test_what_seems_not_to_pay_is_tried_when_that_is_saved_up():
    """What is known of drafts is wrong, by a factor that no acceptance makes up for."""
    points = [p._replace(ms=150.0 if p.kind == "draft" else p.ms) for p in calibrated(H100).points()]
    known, costs = Experience(), Costs()
    costs.learn(points)
    runs = [decode(auto(known), costs, H100, Text(0.85, seed), 1000) for seed in range(8)]
    assert not any(runs[0].widths)
    assert runs[-1].rate() >= 2 / H100.plain


def test_what_cannot_pay_takes_one_per_cent_at_most():
    never = Machine(1.0, {2: 30.0, 32: 40.0}, {16: 5.0, 8: 3.0})
    known = Experience()
    run = decode(auto(known), calibrated(never), never, Text(0.99), 20_000)
    assert 0 < known.drafted < 40  # a draft of 5 ms each
    assert run.rate() >= 0.988


class Wrong(Text):
    """Nothing that the draft says is right."""

    def draft(self, depth: int) -> tuple[Rows, np.ndarray]:
        rows, _ = super().draft(depth)
        return rows, np.full(depth, RANKS)


def test_a_draft_that_is_never_right_is_reported_once(caplog):
    known, costs = Experience(), calibrated(H100)
    with caplog.at_level(logging.WARNING):
        for seed in range(12):
            run = decode(auto(known), costs, H100, Wrong(0.9, seed), 300)
    assert known.drafted >= HOPELESS_AFTER and known.right == 0
    (record,) = caplog.records
    assert "none of the first 40 drafts was right" in record.getMessage()
    assert run.rate() * H100.plain > 0.98


def test_copies_without_a_draft_are_not_reported_as_one(caplog):
    """Beside other texts a controller learns of trees that others planned."""
    known = Experience()
    controller = Adaptive(31, 0, known)
    tree, nothing = chain(2, [3, 4, 5], [-0.1, -0.1, -0.1]), Accepted((0,), (7,))
    with caplog.at_level(logging.WARNING):
        for _ in range(2 * HOPELESS_AFTER):
            controller.learn(tree, nothing)
    assert not caplog.records and known.drafted == 0


def test_the_step_ends():
    assert step_ends(31) == [1, 2, 3, 5, 7, 15, 23, 31]
    assert step_ends(1) == [1] and step_ends(4) == [1, 2, 3, 4] and step_ends(20) == [1, 2, 3, 5, 7, 15, 20]
    assert block_choices(15) == [16, 8] and block_choices(3) == [4]
