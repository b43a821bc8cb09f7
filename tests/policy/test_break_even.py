"""Tests of the acceptance length at which a width begins to pay, from synthetic costs."""

from __future__ import annotations

import pytest

from dflash_ggml.policy.break_even import break_even, where_it_pays
from dflash_ggml.policy.costs import Costs, Point

PLAIN, COMMIT = Point("plain", 1, 64, 10.0), Point("commit", 1, 64, 1.0)
DRAFTS = [Point("draft", 8, 64, 2.0), Point("draft", 16, 64, 4.0)]


def costs(*points: Point) -> Costs:
    found = Costs()
    found.learn(points)
    return found


def test_a_step_over_plain() -> None:
    found = break_even(
        costs(PLAIN, COMMIT, *DRAFTS, Point("verify", 8, 64, 17.0), Point("verify", 16, 64, 37.0)), 15, 15, 64
    )
    assert [one.nodes for one in found] == [1, 2, 3, 4, 5, 6, 7, 15]
    seven, fifteen = found[-2:]
    # half a block holds the longest path of 7 nodes; 15 nodes go twice as deep with the whole
    assert (seven.columns, seven.block, seven.ms, seven.length, seven.reach) == (8, 8, 20.0, 2.0, 8)
    assert (fifteen.columns, fifteen.block, fifteen.length, fifteen.reach) == (16, 16, 4.2, 16)
    assert all(one.can_pay for one in found[3:])


def test_the_whole_block_where_half_of_it_cannot_reach() -> None:
    found = break_even(costs(PLAIN, COMMIT, *DRAFTS, Point("verify", 16, 64, 87.0)), 15, 15, 64)
    assert (found[-1].block, found[-1].length, found[-1].reach, found[-1].can_pay) == (16, 9.2, 16, True)


def test_costs_of_the_context_asked_for() -> None:
    points = [Point("plain", 1, 4000, 20.0), Point("verify", 8, 4000, 77.0), Point("verify", 8, 64, 17.0)]
    at = {n: break_even(costs(PLAIN, COMMIT, *DRAFTS, *points), 7, 15, n)[-1].length for n in (64, 4000)}
    assert at == pytest.approx({64: 2.0, 4000: 4.0})


@pytest.mark.parametrize("points", [[], [PLAIN], [PLAIN, *DRAFTS], [PLAIN, Point("verify", 8, 64, 9.0)]])
def test_nothing_is_predicted_without_measurements(points: list[Point]) -> None:
    assert break_even(costs(*points), 31, 15, 64) == [] and where_it_pays([]) == ""


def test_the_printed_summary() -> None:
    cheap = break_even(
        costs(PLAIN, COMMIT, *DRAFTS, Point("verify", 2, 64, 12.0), Point("verify", 8, 64, 17.0)), 7, 15, 64
    )
    assert where_it_pays(cheap) == "drafting pays from 1.50 tokens a step on with 1 node, from 2.00 with 7"
    dear = break_even(
        costs(PLAIN, COMMIT, *DRAFTS, Point("verify", 2, 64, 30.0), Point("verify", 8, 64, 97.0)), 7, 15, 64
    )
    assert not any(one.can_pay for one in dear)
    assert where_it_pays(dear) == (
        "drafting cannot pay: 7 nodes would have to give 10.0 tokens a step, and 8 are the most; auto decodes plainly"
    )
