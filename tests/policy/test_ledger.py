"""Tests of the bound on what speculation may lose against plain decoding, whatever was expected of it."""

from __future__ import annotations

from dflash_ggml.policy.ledger import MOST, SHARE, START, Ledger


def test_losses_are_what_there_was_at_first_and_a_share_of_what_plain_steps_take():
    ledger, lost, plain, others = Ledger(), 0.0, 0.0, 0.0
    for step in range(5000):
        if ledger.is_empty:
            ledger.plain(4.0)
            plain += 4.0
        else:
            ledger.speculative(10.0, 6.0, 4.0)
            lost, others = lost + 4.0, others + 10.0
        assert lost <= 4.0 * START + SHARE * plain + 4.0, step  # one step may overdraw it
    assert others and plain > 30 * others


def test_gains_are_kept_for_later_losses_but_not_all_of_them():
    ledger = Ledger()
    ledger.speculative(8.0, 4.0, 4.0)
    assert ledger.left == START * 4.0 - 4.0
    for _ in range(1000):
        ledger.speculative(4.0, 8.0, 4.0)
    assert ledger.left == MOST * 4.0 and not ledger.is_empty
    for _ in range(round(MOST)):
        ledger.speculative(8.0, 4.0, 4.0)
    assert ledger.is_empty


def test_what_others_gained_is_not_for_a_new_sequence_to_lose():
    for part in (0.0, 0.5, 1.0):
        ledger = Ledger()
        for _ in range(100):
            ledger.speculative(4.0, 8.0, 4.0)
        ledger.begin(4.0, part)
        assert ledger.left == START * 4.0


def test_what_others_lost_counts_for_their_part():
    for part, left in ((0.0, 8.0), (0.5, 16.0), (1.0, 24.0)):
        ledger = Ledger()
        ledger.speculative(8.0, 0.0, 4.0)
        ledger.begin(6.0, part)
        assert ledger.left == left


def test_while_plain_decoding_is_unknown_a_new_sequence_changes_nothing():
    ledger = Ledger(left=-2.0)
    ledger.begin(0.0, 1.0)
    assert ledger.left == -2.0


def test_a_machine_that_slept_within_a_step_is_soon_forgiven():
    ledger, waited = Ledger(), 0
    ledger.speculative(60_000.0, 6.0, 4.0)
    while ledger.is_empty:
        ledger.plain(4.0)
        waited += 1
    assert waited <= START / SHARE + 1


def test_it_counts_the_steps_that_have_to_be_plain():
    ledger = Ledger(left=-6.01)
    steps = ledger.plain_steps(4.0)
    for _ in range(steps - 1):
        ledger.plain(4.0)
    assert ledger.is_empty
    ledger.plain(4.0)
    assert not ledger.is_empty and ledger.plain_steps(4.0) == 0
