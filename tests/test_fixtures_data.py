"""Tests that the embedded files are the ones described by their README and the fixtures."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np

import dflash_ggml
import fixtures

DATA = Path(dflash_ggml.__file__).parent / "data"


def test_checksums_match_the_readme():
    stated = dict(re.findall(r"^([0-9a-f]{64})  (\S+)$", (DATA / "README.md").read_text(), re.MULTILINE))
    found = {hashlib.sha256(path.read_bytes()).hexdigest(): path.name for path in DATA.glob("*.gguf")}
    assert found == stated and len(found) == 3


def test_package_data_stays_below_40_megabytes():
    assert sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file()) < 40_000_000


def test_greedy_cases_are_consistent():
    cases = fixtures.greedy_cases()
    assert len(cases) == 8
    for case in cases:
        assert len(case.greedy) == len(case.runner_up) == case.gap.shape[0] == 200
        assert (case.gap > 0).all() and all(a != b for a, b in zip(case.greedy, case.runner_up))
        assert sum(case.chain_steps) == 199
        assert int(case.points[0].row.argmax()) == case.greedy[0]
        for point in case.points[:-1]:
            assert point.tokens[: len(case.prompt)] == case.prompt
            assert int(point.top_ids[0]) == case.greedy[len(point.tokens) - len(case.prompt)]
            assert (np.diff(point.top_logits) <= 0).all()


def test_draft_blocks_are_consistent():
    for block in fixtures.draft_blocks():
        n = len(block.tokens) - 1
        assert block.features.shape == (n, 5 * 256)
        assert block.hidden.shape == block.hidden_exact.shape == (16, 256)
        assert np.abs(block.hidden - block.hidden_exact).max() < 2e-3
        assert (np.diff(block.top_log_probs, axis=1) <= 0).all()


def test_fixture_files_are_small():
    assert sum(path.stat().st_size for path in fixtures.HERE.iterdir() if path.is_file()) < 3_000_000
