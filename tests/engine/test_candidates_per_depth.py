"""Tests of the number of candidates per depth: as requested, or by budget; output is unchanged."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_ggml.cli.arguments import add_model_options, engine_config
from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.errors import ConfigError
from dflash_ggml.llama.options import LlamaOptions
from reference import toys
from reference.engine_kit import Solo


@pytest.mark.parametrize(
    ("budget", "option", "n"), [(1, None, 8), (15, None, 8), (16, None, 16), (256, None, 16), (7, 3, 3), (63, 5, 5)]
)  # fmt: skip
def test_by_budget_unless_named(budget: int, option: int | None, n: int) -> None:
    assert EngineConfig(Path("x"), budget=budget, candidates=option).n_candidates == n


@pytest.mark.parametrize("option", [0, 65, "8", 1.5])
def test_what_is_no_number_of_candidates(option: object) -> None:
    with pytest.raises(ConfigError, match="candidates: .* is outside 1..64"):
        EngineConfig(Path("x"), candidates=option)  # type: ignore[arg-type]


def test_every_face_can_name_them(toy_pair: tuple[Path, Path]) -> None:
    parser = argparse.ArgumentParser()
    add_model_options(parser)
    files = ["-m", str(toy_pair[0]), "-md", str(toy_pair[1])]
    assert engine_config(parser.parse_args([*files, "--candidates", "5"])).n_candidates == 5
    assert engine_config(parser.parse_args([*files, "--budget", "9"])).n_candidates == 8
    assert LlamaOptions(str(toy_pair[0]), candidates=5).engine_config(None).n_candidates == 5


def test_the_draft_proposes_that_many_and_output_is_unchanged(toy_pair: tuple[Path, Path]) -> None:
    outputs = set()
    for budget, option, n in ((31, None, 16), (15, None, 8), (31, 1, 1), (31, 64, 64)):
        base = EngineConfig(*toy_pair, n_ctx=256, n_threads=1, mode="tree", reference=True)
        config = replace(base, budget=budget, candidates=option, type_k="f32", type_v="f32")
        with Solo.load(config) as engine:
            engine.prefill([3, 1, 4, 1, 5])
            sampler = Sampler(SamplingParams(temperature=0), engine.n_vocab)
            steps = list(engine.generate(sampler, max_tokens=60, stop=lambda t: False))
            outputs.add(tuple(t for step in steps for t in step.tokens))
            assert engine.drafter is not None
            rows = engine.drafter.propose([engine.sequence], budget)[0]
            assert rows.ids.shape == (engine.drafter.depth, n)  # type: ignore[attr-defined]
    assert len(outputs) == 1


def test_a_selector_gives_as_many_as_it_was_trained_for_unless_named(tmp_path: Path) -> None:
    pair = toys.write_pair(tmp_path, 7, draft="dflash2")
    for option, n in ((None, 6), (3, 3), (9, 9)):
        config = EngineConfig(*pair, n_ctx=256, n_threads=1, candidates=option, calibrate="never")
        with Solo.load(config) as engine:
            engine.prefill([3, 1, 4, 1, 5])
            engine.sequence.pending = 9
            rows = engine.drafter.propose([engine.sequence], 31)[0]  # type: ignore[union-attr]
            assert rows.ids.shape == (engine.drafter.depth, n)  # type: ignore[attr-defined, union-attr]
