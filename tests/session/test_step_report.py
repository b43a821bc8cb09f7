"""Tests of what a step's report shows of its tree, and what it omits."""

from __future__ import annotations

import numpy as np

from dflash_ggml.decode.tree import Tree
from dflash_ggml.engine.step import Step
from dflash_ggml.session.events import StepReport
from reference.fake_engine import byte_vocabulary


def test_lookup_nodes_that_were_not_accepted_are_not_shown() -> None:
    """They may be from the answer to somebody else."""
    tree = Tree(
        np.arange(65, 70, dtype=np.int32),
        np.array([-1, 0, 1, 0, 3], np.int32),
        np.array([0, 1, 2, 1, 2], np.int32),
        np.zeros(5, np.float32),
        sources=np.array([0, 2, 3, 1, 2], np.uint8),
    )
    report = StepReport.of(Step((66, 9), "tree", tree, path=(0, 1)), byte_vocabulary())
    assert report.tokens == (65, 66, -1, 68, -1) and report.sources == (0, 2, 3, 1, 2)
    assert [bool(text) for text in report.texts] == [True, True, False, True, False]
