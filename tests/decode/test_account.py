"""What drafts may lose against plain batching is bounded, whatever was expected of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from dflash_ggml.decode.account import BEGINS, GRAPHS, HOLDS, OFTEN, SELDOM, SHARE, Account
from dflash_ggml.decode.costs import Costs, Point
from dflash_ggml.decode.joint_costs import JointCosts
from dflash_ggml.decode.together import Together
from reference.virtual_clock import LINEAR_CPU, JointMachine, JointRun, Placed, decode_together

DEPTH, STEPS = 15, 700
HOPELESS, LOOPING = 0.03, 0.97


def texts(n: int, looping: int, off: float = 0.0) -> list[Placed]:
    """n texts, so many of which repeat themselves."""
    found = [Placed(LOOPING, seed, spread=0.3) for seed in range(looping)]
    return found + [Placed(HOPELESS, seed, spread=0.8, off=off) for seed in range(looping, n)]


def of_plain(run: JointRun, n: int) -> float:
    """How many times as fast as plain batching."""
    return run.rate * LINEAR_CPU.plain_ms(n) / (1000 * n)


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("off", [0.0, 2.0, 4.0], ids=["honest", "bold", "certain"])
@pytest.mark.parametrize("new_text", [0, 60], ids=["long", "short"])
def test_drafts_that_never_hit_cost_next_to_nothing(n: int, off: float, new_text: int):
    run = decode_together(texts(n, 0, off), LINEAR_CPU, STEPS, DEPTH, new_text=new_text)
    assert of_plain(run, n) >= 0.97


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("looping", [1, 8])
def test_texts_that_repeat_themselves_slow_nobody_down(n: int, looping: int):
    run = decode_together(texts(n, min(looping, n)), LINEAR_CPU, STEPS, DEPTH)
    assert of_plain(run, n) >= 0.97
    if n <= looping or n == 2:
        assert of_plain(run, n) >= (1.1 if n <= looping else 1.05)


@pytest.mark.parametrize("n", [2, 8])
@pytest.mark.parametrize("looping", [0, 1, 8])
def test_costs_that_are_far_off_lose_no_more(n: int, looping: int):
    """Of drafted steps half of what they take is measured, so that they seem to pay where they do not."""
    run = decode_together(texts(n, min(looping, n)), LINEAR_CPU, STEPS, DEPTH, told=0.5)
    assert of_plain(run, n) >= 0.96


def test_losses_are_what_there_was_to_begin_with_and_a_share_of_what_plain_steps_take():
    account, lost = Account(), 0.0
    plain = others = 0.0
    for step in range(5000):
        if account.wants_plain(4.0):
            account.paid(4.0)
            plain += 4.0
        else:
            account.came(10.0, 6.0, 4.0)
            lost, others = lost + 4.0, others + 10.0
        assert lost <= 4.0 * BEGINS + SHARE * plain + 4.0, step  # one step may overdraw it
    assert others and plain > 30 * others


def test_gains_are_kept_for_later_losses_but_not_all_of_them():
    account = Account()
    for _ in range(1000):
        account.came(4.0, 8.0, 4.0)
    assert account.left == HOLDS * 4.0 and not account.is_empty
    for _ in range(8):
        account.came(8.0, 4.0, 4.0)
    assert account.is_empty


def test_plain_batching_is_seen_again_the_more_often_the_less_that_costs():
    def every(gain: float) -> int:
        account = Account()
        due = []
        for step in range(3000):
            if account.wants_plain(4.0):
                account.paid(4.0)
                due.append(step)
            else:
                account.came(8.0, 8.0 * gain, 4.0)
        return max(after - before for before, after in pairwise(due[2:]))

    assert every(1.0) <= OFTEN + 2 < every(1.5) <= every(3.0) <= SELDOM + 1


def test_it_is_seen_in_a_row_of_steps():
    account = Account(in_a_row=3)
    account.came(4.0, 8.0, 4.0)
    wants = [account.wants_plain(None if step < 6 else 4.0) for step in range(12)]
    assert wants == [False, *[True] * 3, False, *[True] * 3, *[False] * 4]


def test_building_graphs_is_free_until_its_time_is_used_up():
    """On a GPU too, where there are more of them: else a cache that is too small for a text's graphs would cost for ever."""
    once, patient = Account(), Account(patience=3.0)
    assert sum(once.built(10.0, 4.0) for _ in range(20)) == pytest.approx(GRAPHS * 4.0)
    assert sum(patient.built(10.0, 4.0) for _ in range(20)) == pytest.approx(3 * GRAPHS * 4.0)


def test_a_step_of_which_no_time_is_left_says_nothing_of_what_it_was_worth():
    account = Account()
    account.came(0.0, 0.0, 0.0)
    assert (account.left, account.ahead) == (0.0, Account().ahead)


def test_a_step_that_is_plain_for_the_account_looks_at_nothing():
    together = Together(DEPTH)
    decode_together(texts(4, 0), LINEAR_CPU, 20, DEPTH, together=together)
    together.account.left = -1.0
    before = together.costs.step
    run = decode_together(texts(4, 0), LINEAR_CPU, 10, DEPTH, together=together)
    assert not any(run.drafting) and together.costs.step == before


def test_a_patient_account_begins_and_holds_as_many_times_as_much():
    account = Account(patience=25.0)
    account.came(8.0, 4.0, 4.0)
    assert account.left == 25 * BEGINS * 4.0 - 4.0
    for _ in range(1000):
        account.came(4.0, 8.0, 4.0)
    assert account.left == 25 * HOLDS * 4.0


def test_a_machine_that_slept_within_a_step_is_soon_forgiven():
    account, waited = Account(), 0
    account.came(60_000.0, 6.0, 4.0)
    while account.is_empty:
        assert account.wants_plain(4.0)
        account.paid(4.0)
        waited += 1
    assert waited <= BEGINS / SHARE + 1


@pytest.mark.parametrize("n", [5, 8])
def test_plain_batching_of_more_texts_than_one_has_columns_is_known_too(n: int):
    """The widest pass of one text has four columns: what more texts take is measured all the same."""
    narrow = replace(LINEAR_CPU, verify={1: 1.0, 2: 1.2, 4: 1.6, 128: 26.4})
    few = [Point("verify", w, 32, narrow.verify_ms(w, 1)) for w in (2, 4)]
    costs = Costs()
    costs.learn([Point("plain", 1, 32, 1.0), *few])
    joint = JointCosts(costs)
    for _ in range(4):
        joint.measured("plain", narrow.plain_ms(n), n, n, 32)
    assert joint.knows("plain", n) and not joint.knows("plain", 4 * n)
    assert joint.of("plain", n, n, 32) == pytest.approx(narrow.plain_ms(n))


def test_what_is_lost_is_bounded_where_texts_are_more_than_one_has_columns(monkeypatch: pytest.MonkeyPatch):
    """Eight texts, three nodes: half of what drafted steps take is measured, so that they seem to pay."""

    def costs(machine: JointMachine) -> Costs:
        found = Costs()
        verify = [Point("verify", w, 32, machine.verify_ms(w, 1)) for w in (2, 4)]
        draft = [Point("draft", w, 32, machine.draft_ms(w)) for w in (8, 16)]
        found.learn([Point("plain", 1, 32, machine.verify_ms(1, 1)), *verify, *draft])
        return found

    monkeypatch.setattr(JointMachine, "costs", costs)
    run = decode_together(texts(8, 0), LINEAR_CPU, STEPS, DEPTH, budget=3, told=0.5)
    assert of_plain(run, 8) >= 0.96
