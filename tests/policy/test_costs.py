"""Tests of predicted pass times, from what was measured."""

from __future__ import annotations

import pytest

from dflash_ggml.policy.costs import WINDOW, Costs, Point, step_ends


def test_costs_are_medians_of_the_last_measurements():
    costs = Costs()
    assert costs.of("verify", 8, 100) is None
    for ms in (5.0, 1.0, 3.0):
        costs.measured("verify", ms, 8, 100)
    assert costs.of("verify", 8, 127) == 3.0, "contexts of one power of two are one"
    assert costs.of("verify", 16, 100) is None
    for _ in range(WINDOW):
        costs.measured("verify", 9.0, 8, 100)
    assert costs.of("verify", 8, 100) == pytest.approx(9.0)


def test_other_contexts_lie_on_a_line():
    costs = Costs()
    costs.learn([Point("plain", 1, 100, 2.0), Point("plain", 1, 1100, 4.0), Point("verify", 8, 100, 3.0)])
    assert costs.of("plain", 1, 4100) == pytest.approx(10.0)
    assert costs.of("plain", 1, 500) == pytest.approx(2.8)
    # a verify pass that was measured at one context has a plain step's slope
    assert costs.of("verify", 8, 1100) == pytest.approx(5.0)
    # two slopes of the target make a line over the widths: here every column costs
    costs.learn([Point("verify", 4, 100, 2.5), Point("verify", 4, 1100, 10.5)])
    assert costs.of("verify", 8, 1100) == pytest.approx(3.0 + 16.0)
    assert costs.of("verify", 16, 100) is None
    costs.learn([Point("verify", 2, 100, 2.2), Point("verify", 16, 100, 5.0), Point("verify", 16, 1100, 6.0)])
    assert costs.of("verify", 2, 1100) == pytest.approx(2.2 + 4.0)
    assert costs.of("verify", 8, 1100) == pytest.approx(3.0 + 8.0 - 7.0 / 3)
    costs.learn([Point("draft", 16, 1100, 5.0), Point("draft", 16, 100, 6.0)])
    assert costs.of("draft", 16, 10_000) == pytest.approx(5.0), "a longer context is not cheaper"


def test_contexts_that_are_near_each_other_make_no_slope():
    """A sequence that ended soon after a power of two; the next one begins with a few tokens, or with many."""
    costs = Costs()
    for n in range(90, 130):
        costs.measured("plain", 1.0 if n < 128 else 1.1, context=n)
    for n in (5, 60, 300, 5000):
        assert 1.0 <= (costs.of("plain", 1, n) or 0.0) <= 1.1, n


def test_no_context_is_so_short_that_a_pass_takes_nothing():
    costs = Costs()
    for n, ms in ((100, 1.0), (200, 3.0)):
        costs.measured("plain", ms, context=n)
    assert [(costs.of("plain", 1, n) or 0.0) > 0 for n in (0, 1, 10, 50)] == [True] * 4


def test_widths_between_measured_ones_lie_on_a_line():
    costs = Costs()
    costs.learn(
        [Point("plain", 1, 0, 1.0), *(Point("verify", w, 0, ms) for w, ms in [(4, 4.0), (8, 2.0), (16, 6.0)])]
    )
    curve = costs.curve("verify")
    assert curve == [(1, 1.0), (4, 2.0), (8, 2.0), (16, 6.0)], "wider passes bound narrower ones"
    costs.learn([Point("draft", 16, 0, 1.0), Point("commit", 1, 0, 0.1), Point("host", 8, 0, 0.2)])
    took = costs.drafted([1, 3, 7, 9, 15], 16)
    assert took == pytest.approx({1: 2.6333, 3: 3.3, 7: 3.3, 9: 7.3, 15: 7.3}, abs=1e-3)
    assert Costs().drafted([7], 16) == {7: 0.0}


def test_a_machine_that_slows_down_slows_all_widths():
    """Also those that have not run since."""
    costs = calibrated()
    for _ in range(10):
        costs.measured("verify", 16.0, 8)
        costs.measured("draft", 4.2, 16)
    assert costs.pace == pytest.approx(2.0)
    assert costs.of("plain") == pytest.approx(2.0) and costs.of("verify", 4) == pytest.approx(8.0)
    assert costs.of("draft", 16) == pytest.approx(4.2, rel=0.05)
    for _ in range(20):
        costs.measured("verify", 8.0, 8)
        costs.measured("draft", 2.0, 16)
    assert costs.pace == pytest.approx(1.0) and costs.of("verify", 8) == pytest.approx(8.0, rel=0.1)
    assert costs.of("plain") == pytest.approx(1.0)


@pytest.mark.parametrize("kind, width, usual", [("verify", 8, 8.0), ("draft", 16, 2.0), ("plain", 1, 1.0)])
@pytest.mark.parametrize("times", [0.5, 1.4, 3.0])
def test_one_pass_that_is_another_than_it_was_stays_one(kind, width, usual, times):
    costs = calibrated()
    for _ in range(200):
        for k, w, ms in (("verify", 8, 8.0), ("draft", 16, 2.0), ("plain", 1, 1.0)):
            costs.measured(k, ms * (times if k == kind else 1), w)
    assert costs.pace == pytest.approx(1.0)
    assert costs.of(kind, width) == pytest.approx(usual * times)
    assert costs.of("verify", 4) == pytest.approx(4.0)


@pytest.mark.parametrize("kind, width, usual", [("verify", 8, 8.0), ("draft", 16, 2.0), ("plain", 1, 1.0)])
def test_one_wrong_measurement_moves_nothing(kind, width, usual):
    costs = calibrated()
    before = costs.points()
    costs.measured(kind, 50 * usual, width)
    assert costs.points() == before and costs.pace == 1.0


def test_a_clock_that_stands_still():
    costs = calibrated()
    for _ in range(50):
        for kind, width in (("plain", 1), ("draft", 16), ("verify", 8)):
            costs.measured(kind, 0.0, width)
    for _ in range(100):
        for kind, width, ms in (("plain", 1, 1.0), ("draft", 16, 2.0), ("verify", 8, 8.0)):
            costs.measured(kind, ms, width)
    assert costs.of("plain") == pytest.approx(1.0) and costs.of("verify", 4) == pytest.approx(4.0, rel=0.01)


def test_passes_of_one_kind_teach_nothing_about_others():
    costs = calibrated()
    for _ in range(50):
        costs.measured("plain", 1.5)
    assert costs.of("plain") == pytest.approx(1.5) and costs.of("verify", 4) == pytest.approx(4.0)


def calibrated() -> Costs:
    costs = Costs()
    points = [Point("plain", 1, 0, 1.0), Point("draft", 16, 0, 2.0)]
    costs.learn([*points, *(Point("verify", w, 0, float(w)) for w in (2, 4, 8))])
    return costs


def test_points_can_be_learned_again():
    costs, other = Costs(), Costs()
    for context in (10, 3000):
        for kind in ("plain", "draft", "verify", "commit", "host"):
            for i in range(5):
                costs.measured(kind, 1.0 + i + context / 1000, 16, context)
    points = costs.points()
    other.learn(points)
    assert other.points() == points and len(points) == 10
    assert [p.kind for p in points[::2]] == ["plain", "verify", "draft", "commit", "host"]


# ---- several sequences


def test_costs_of_several_are_those_of_one_and_what_each_adds():
    costs = Costs()
    costs.learn([Point("plain", 1, 0, 8.0), Point("verify", 8, 0, 9.0), Point("verify", 16, 0, 10.0)])
    assert costs.expected("verify", 12, 0, 3) == pytest.approx(9.5)
    assert costs.expected("verify", 32, 0, 3) == pytest.approx(12.0)  # on the line of the last two
    assert costs.expected("draft", 32, 0, 3) == 0.0
    for _ in range(3):
        costs.measured("verify", 11.0, 16, 0, 3)
    costs.catch_up()
    assert costs.expected("verify", 16, 0, 3) == pytest.approx(11.0)
    assert costs.expected("verify", 8, 0, 3) == pytest.approx(10.0)
    assert costs.expected("verify", 8, 0, 5) == pytest.approx(11.0)
    assert costs.expected("verify", 8, 0, 1) == pytest.approx(9.0)
    assert len(costs.points()) == 3, "what is kept in a file is of one sequence"


def test_a_wide_pass_that_was_not_measured_is_hoped_to_be_cheap():
    """Between what was measured it is no dearer than on their line, and no dearer than the narrower ones let hope: else a width
    behind which costs rise would never be tried."""
    costs = Costs()
    costs.learn([Point("plain", 1, 0, 8.0), Point("draft", 8, 0, 1.0), Point("draft", 16, 0, 2.0)])
    for _ in range(3):
        costs.measured("draft", 20.0, 128, 0, 8)
    costs.catch_up()
    assert costs.expected("draft", 12) == pytest.approx(1.5)
    assert costs.expected("draft", 64, 0, 8) == pytest.approx(8.0)  # on the line of 8 and 16
    assert costs.expected("draft", 128, 0, 8) == pytest.approx(20.0)
    for _ in range(3):
        costs.measured("draft", 19.0, 64, 0, 8)
    costs.catch_up()
    assert costs.expected("draft", 96, 0, 8) == pytest.approx(19.5)  # of 64 and 128: the other line is above
    assert costs.expected("draft", 64, 0, 8) == pytest.approx(19.0)


def test_a_slow_machine_is_slow_for_several_too():
    costs = Costs()
    costs.learn([Point("plain", 1, 0, 8.0), Point("verify", 8, 0, 9.0)])
    for _ in range(3):
        costs.measured("verify", 10.0, 8, 0, 4)
    for _ in range(5):
        costs.measured("plain", 16.0)
        costs.measured("verify", 18.0, 8)
    costs.catch_up()
    assert costs.expected("verify", 8, 0, 4) == pytest.approx(20.0)


@pytest.mark.parametrize("n", [5, 8])
def test_plain_steps_of_more_sequences_than_one_has_columns_are_known_too(n: int):
    """The widest pass of one sequence has four columns: what more sequences take is measured all the same."""
    costs = Costs()
    costs.learn([Point("plain", 1, 32, 1.0), Point("verify", 2, 32, 1.2), Point("verify", 4, 32, 1.6)])
    for _ in range(4):
        costs.measured("plain", 3.0, n, 32, n)
    assert costs.knows_plain(n) and not costs.knows_plain(4 * n)
    assert costs.expected("plain", n, 32, n) == pytest.approx(3.0)


def test_plain_steps_are_known_between_numbers_that_were_measured():
    costs = Costs()
    assert not costs.knows_plain(1)
    costs.measured("plain", 1.0)
    for n in (8, 16):
        costs.measured("plain", float(n), n, 0, n)
    assert [costs.knows_plain(n) for n in (1, 3, 8, 12, 16, 24)] == [True, False, True, True, True, False]


def test_step_ends():
    assert step_ends(64)[:9] == [1, 2, 3, 4, 5, 6, 7, 15, 23] and step_ends(64)[-1] == 63
    assert step_ends(64, 5)[:5] == [1, 2, 3, 11, 19] and step_ends(64, 5)[-1] == 59
    assert step_ends(4) == [1, 2, 3] and step_ends(8, 8) == [] and step_ends(8, 9) == []
