"""Tests of prefill batches: which sizes exist, and that the output does not depend on them. About 5 s."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.engine.batches import QUICK, SLOWEST, BatchSizes, joined_columns
from reference.engine_kit import Solo

Files = tuple[Path, Path | None]


def sizes_of(batches: BatchSizes, n: int) -> list[int]:
    """The passes of a prompt of `n` tokens."""
    found: list[int] = []
    while sum(found) < n:
        found.append(batches.next(n - sum(found)))
    return found


@pytest.mark.parametrize("most", [1, 16, 300, 512, 2048, 4096])
def test_a_prompt_is_cut_into_full_batches_and_few_other_widths(most: int) -> None:
    batches, widths = BatchSizes(most), set()
    for n in (*range(1, 300), 333, 511, 600, 2048, 5000):
        found = sizes_of(batches, n)
        assert sum(found) == n and found == sorted(found, reverse=True) and found[0] <= most
        assert found[: n // most] == [most] * (n // most)
        assert [batches.next(size) for size in found] == found, "a piece is cut no further"
        assert len(found) - n // most <= 4
        widths.update(found)
    assert len(widths) <= 1 + most // 256 + 15 + 7 + 7


def test_only_the_clock_of_a_paced_prompt_changes_its_batches() -> None:
    fixed, paced, cpu = (
        BatchSizes(4096),
        BatchSizes(4096, paced=True, is_gpu=True),
        BatchSizes(512, paced=True),
    )
    paced.took(1024, 0.9 * QUICK)
    assert (fixed.limit, paced.limit, cpu.limit) == (4096, 2048, 128)
    for batches in (fixed, paced, cpu):
        batches.took(batches.limit // 2, 100 * SLOWEST)
    assert (fixed.limit, paced.limit, cpu.limit) == (4096, 2048, 128), "a part says nothing about the whole"
    for batches in (fixed, paced, cpu):
        batches.took(batches.limit, 1.5 * SLOWEST)
    assert (fixed.limit, paced.limit, cpu.limit) == (4096, 1024, 64)
    for batches in (paced, cpu):
        batches.took(batches.limit, 0.9 * SLOWEST)
    assert (paced.limit, cpu.limit) == (1024, 64)
    for batches in (paced, cpu):
        for _ in range(9):
            batches.took(batches.limit, 0.9 * QUICK)
    assert (paced.limit, cpu.limit) == (4096, 512), "never above what there is memory for"
    cpu.took(512, 1000 * SLOWEST)
    assert cpu.limit == 32
    small = BatchSizes(5, paced=True)
    small.took(5, 1000 * SLOWEST)
    assert small.limit == 5


@pytest.mark.parametrize("most", [16, 256, 1024, 4096])
@pytest.mark.parametrize("others", [1, 8, 9, 40])
def test_beside_others_all_columns_have_the_widths_of_batches(most: int, others: int) -> None:
    batches, columns = BatchSizes(4096), joined_columns(others)
    assert columns >= others
    for n in (*range(1, 300), 333, 511, 600, 2048, 5000):
        left = n
        while left:
            size = batches.joined(left, others, most)
            assert 0 < size <= left and (size % 8 == 0 or size == left)
            assert size + columns <= max(most, columns + 8)
            assert batches.next(size + columns) == size + columns or size <= 8
            left -= size


@pytest.fixture(scope="module")
def engine(f32_target: Path, f32_draft: Path):
    config = EngineConfig(
        f32_target,
        f32_draft,
        n_ctx=1024,
        type_k="f32",
        type_v="f32",
        n_threads=1,
        n_gpu_layers=0,
        calibrate="never",
    )
    with Solo.load(config) as loaded:
        yield loaded


def prompt(n: int) -> list[int]:
    return np.random.default_rng(n).integers(100, 1000, n).tolist()


def test_any_split_gives_the_same_logits_context_and_text(engine: Solo) -> None:
    ids = prompt(345)
    logits, outputs, held = [], [], []
    for most in (7, 64, 200, 1024):
        engine.batches = BatchSizes(most)
        engine.reset()
        engine.prefill(ids)
        logits.append(engine.logits.copy())
        assert engine.drafter is not None
        held.append([engine.device.read(rows, 64 * len(ids)).copy() for rows in engine.drafter.rows])
        steps = engine.generate(
            Sampler(SamplingParams(temperature=0), engine.n_vocab), max_tokens=12, mode="tree", budget=7
        )
        outputs.append([token for step in steps for token in step.tokens])
    scale = np.abs(logits[0]).max()
    for row, text, rows in zip(logits[1:], outputs[1:], held[1:], strict=True):
        assert np.abs(row - logits[0]).max() <= 2e-5 * scale
        assert text == outputs[0]
        for a, b in zip(rows, held[0], strict=True):
            assert np.abs(a - b).max() <= 2e-5 * np.abs(b).max()


def test_progress_and_cancel_come_with_every_batch_of_a_chosen_size(engine: Solo) -> None:
    engine.batches = BatchSizes(64, paced=True)
    seen: list[int] = [0]
    engine.reset()
    engine.prefill(prompt(300), lambda done, total: seen.append(done))
    assert seen[-1] == 300 and max(b - a for a, b in pairwise(seen)) <= 64
    engine.reset()
    seen.clear()
    engine.prefill(prompt(300), lambda done, total: seen.append(done), lambda: len(seen) == 2)
    assert engine.n_tokens == seen[1] < 300
    engine.prefill(prompt(300)[engine.n_tokens :])
    there = engine.logits.copy()
    engine.batches = BatchSizes(512)
    engine.reset()
    engine.prefill(prompt(300))
    np.testing.assert_allclose(there, engine.logits, atol=2e-5 * np.abs(there).max())


def test_few_graphs_serve_prompts_of_all_lengths(engine: Solo) -> None:
    engine.batches = BatchSizes(256)
    for n in (300, 427):
        engine.reset()
        engine.prefill(prompt(n))
    before = engine.passes.graphs.builds
    for n in (556, 683):
        engine.reset()
        engine.prefill(prompt(n))
    assert engine.passes.graphs.builds == before, (
        "a longer text has the same widths, and no row count of its own"
    )


def test_where_the_size_is_chosen(f32_target: Path) -> None:
    config = {"n_ctx": 64, "n_threads": 1, "n_gpu_layers": 0, "calibrate": "never"}
    for options, expected in (
        ({}, (256, True)),
        ({"n_batch": 48}, (48, False)),
        ({"mode": "plain"}, (256, False)),
        ({"reproducible": True}, (256, False)),
    ):
        with Solo.load(EngineConfig(f32_target, None, **config, **options)) as loaded:
            assert (loaded.batches.most, loaded.batches.paced) == expected
