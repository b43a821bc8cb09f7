"""What is planned for a mode."""

from __future__ import annotations

import pytest

from dflash_ggml.decode.adaptive import Adaptive
from dflash_ggml.decode.candidates import Rows
from dflash_ggml.decode.controller import controller
from dflash_ggml.decode.costs import Costs
from dflash_ggml.decode.plan import Plan
from dflash_ggml.decode.sequence import Sequence
from dflash_ggml.errors import ConfigError


@pytest.mark.parametrize(
    "mode, depth, plan",
    [
        ("auto", 0, Plan("plain", 0)),
        ("plain", 15, Plan("plain", 0)),
        ("chain", 15, Plan("chain", 15)),
        ("chain", 7, Plan("chain", 7)),
        ("tree", 15, Plan("tree", 31)),
    ],
)
def test_the_plan_of_a_mode(mode, depth, plan):
    assert controller(mode, 31, depth).next(Sequence(), Costs()) == plan


def test_auto_with_a_draft_decides_every_step():
    assert isinstance(controller("auto", 31, 15), Adaptive)


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
    assert Plan("tree", 3, choose=lambda tree: tree).build(9, rows).tokens.tolist() == [9, 1, 3, 4]
