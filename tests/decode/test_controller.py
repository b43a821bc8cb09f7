"""What is planned for a mode, and what passes are said to cost."""

from __future__ import annotations

import pytest

from dflash_ggml.decode.candidates import Rows
from dflash_ggml.decode.controller import Plan, controller
from dflash_ggml.decode.costs import WINDOW, Costs
from dflash_ggml.decode.sequence import Sequence
from dflash_ggml.errors import ConfigError


@pytest.mark.parametrize(
    "mode, depth, plan",
    [
        ("auto", 15, Plan("tree", 31)),
        ("auto", 0, Plan("plain", 0)),
        ("plain", 15, Plan("plain", 0)),
        ("chain", 15, Plan("chain", 15)),
        ("chain", 7, Plan("chain", 7)),
        ("tree", 15, Plan("tree", 31)),
    ],
)
def test_the_plan_of_a_mode(mode, depth, plan):
    assert controller(mode, 31, depth).next(Sequence(), Costs()) == plan


@pytest.mark.parametrize(
    "mode, depth, said", [("chain", 0, "draft"), ("tree", 0, "draft"), ("forest", 15, "mode")]
)
def test_a_mode_that_cannot_be_is_refused(mode, depth, said):
    with pytest.raises(ConfigError, match=said):
        controller(mode, 31, depth)


def test_a_plan_builds_its_tree():
    rows = Rows([[1, 2], [3, 4]], [[-0.1, -2.5], [-0.2, -1.8]])
    assert Plan("chain", 2).build(9, rows).tokens.tolist() == [9, 1, 3]
    assert Plan("tree", 3).build(9, rows).tokens.tolist() == [9, 1, 3, 4]
    assert Plan("tree", 3, chain_seed=True).build(9, rows).tokens.tolist() == [9, 1, 3, 4]


def test_costs_are_medians_of_the_last_measurements():
    costs = Costs()
    assert costs.of("verify", 8, 100) is None
    for ms in (5.0, 1.0, 3.0):
        costs.measured("verify", ms, 8, 100)
    assert costs.of("verify", 8, 127) == 3.0, "contexts of one power of two are one"
    assert costs.of("verify", 8, 128) is None and costs.of("verify", 16, 100) is None
    for _ in range(WINDOW):
        costs.measured("verify", 9.0, 8, 100)
    assert costs.of("verify", 8, 100) == 9.0
