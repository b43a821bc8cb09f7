"""What speculation may lose against plain decoding is bounded, whatever was expected of it."""

from __future__ import annotations

from dflash_ggml.policy.ledger import LOOK_AGAIN, MOST, SHARE, START, Ledger


def test_losses_are_what_there_was_at_first_and_a_share_of_what_plain_steps_take():
    ledger, lost, plain, others = Ledger(), 0.0, 0.0, 0.0
    for step in range(5000):
        if ledger.wants_plain(True):
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
    ledger = Ledger()
    for _ in range(100):
        ledger.speculative(4.0, 8.0, 4.0)
    ledger.begin(4.0)
    assert ledger.left == START * 4.0


def test_plain_decoding_is_seen_at_once_where_it_is_not_known_and_seldom_where_it_is():
    ledger = Ledger()
    assert [ledger.wants_plain(False), ledger.wants_plain(False)] == [False, True]
    ledger.plain(4.0)
    due = []
    for step in range(3 * LOOK_AGAIN):
        if ledger.wants_plain(True):
            ledger.plain(4.0)
            due.append(step)
        else:
            ledger.speculative(4.0, 8.0, 4.0)
    assert len(due) == 2


def test_a_machine_that_slept_within_a_step_is_soon_forgiven():
    ledger, waited = Ledger(), 0
    ledger.speculative(60_000.0, 6.0, 4.0)
    while ledger.is_empty:
        assert ledger.wants_plain(True)
        ledger.plain(4.0)
        waited += 1
    assert waited <= START / SHARE + 1


def test_it_says_how_many_steps_have_to_be_plain():
    ledger = Ledger(left=-6.01)
    steps = ledger.plain_steps(4.0)
    for _ in range(steps - 1):
        ledger.plain(4.0)
    assert ledger.is_empty
    ledger.plain(4.0)
    assert not ledger.is_empty and ledger.plain_steps(4.0) == 0
