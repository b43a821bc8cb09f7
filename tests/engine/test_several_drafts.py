"""Tests of several drafts in one tree: each proposes what it does alone, and output is unchanged. 3 seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import exp
from pathlib import Path

import numpy as np
import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.candidates import CandidateBlock, CombinedCandidates
from dflash_ggml.decode.tree import expand
from dflash_ggml.drafts import registry
from dflash_ggml.drafts.combined import CombinedDrafter, CombinedSource
from dflash_ggml.errors import ConfigError
from reference import toys
from reference.engine_kit import Solo, fresh, generate


@pytest.fixture(scope="module", params=[(0, 2), (1, 3)], ids=["apart", "a layer of both"])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return toys.write_pair(folder, 31, nextn=True, draft="dflash2", taps=request.param, window=24)


def config(files: tuple[Path, Path], **options) -> EngineConfig:
    base = EngineConfig(*files, n_ctx=256, n_batch=16, n_threads=1, reference=True, calibrate="never")
    return replace(base, **{"type_k": "f32", "type_v": "f32", "spec": ("dflash2", "mtp"), **options})


@pytest.fixture
def engine(files: tuple[Path, Path]) -> Iterator[Solo]:
    """One that drafts with the file and with the target's prediction head."""
    with Solo.load(config(files, spec=("dflash2", "mtp"))) as engine:
        assert isinstance(engine.drafter, CombinedDrafter) and engine.drafter.name == "dflash2+mtp"
        yield engine


def proposals(engine: Solo, tokens: list[int]) -> list[CandidateBlock]:
    fresh(engine, tokens)
    engine.sequence.pending = 7
    assert engine.drafter is not None
    found = engine.drafter.propose([engine.sequence], 31)[0]
    return list(found.drafts) if isinstance(found, CombinedCandidates) else [found]  # type: ignore[list-item]


def test_each_proposes_what_it_does_alone(engine: Solo, files: tuple[Path, Path]) -> None:
    """From its own part of the features."""
    tokens = np.random.default_rng(1).integers(0, 60, 40).tolist()
    together = proposals(engine, tokens)
    for part, options in zip(together, ({"spec": ("dflash2",)}, {"draft": None})):
        with Solo.load(config(files, **options)) as alone:
            (expected,) = proposals(alone, tokens)
            assert np.array_equal(part.ids, expected.ids)
            np.testing.assert_allclose(part.log_probs, expected.log_probs, atol=1e-5)


@pytest.mark.parametrize("mode", ["chain", "tree", "auto"])
def test_output_is_unchanged(engine: Solo, mode: str) -> None:
    for sampling in ({}, {"temperature": 1.0, "seed": 3}):
        plain = generate(fresh(engine), max_tokens=70, mode="plain", sampling=sampling)
        assert generate(fresh(engine), max_tokens=70, mode=mode, sampling=sampling) == plain


def test_both_see_every_step(engine: Solo) -> None:
    """After steps of all kinds, and from a snapshot, they propose what they do after one prompt."""
    fresh(engine)
    for mode in ("tree", "plain", "chain"):
        generate(engine, max_tokens=9, mode=mode)
        engine.prefill([engine.pending])
    tokens = engine.tokens
    engine.sequence.pending = 7
    assert engine.drafter is not None
    stepped = engine.drafter.propose([engine.sequence], 31)[0]
    assert engine.drafter.seen(engine.sequence).all() and not engine.sequence.unseen
    for a, b in zip(stepped.drafts, proposals(engine, tokens)):
        np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-4)
    snapshot = engine.snapshot()
    expected = generate(engine.restore(snapshot) or engine, max_tokens=20, mode="tree")
    engine.restore(snapshot)
    assert generate(engine, max_tokens=20, mode="tree") == expected


def test_the_plan_knows_what_both_take(engine: Solo, files: tuple[Path, Path]) -> None:
    both = engine.drafter.nbytes
    with (
        Solo.load(config(files, spec=("dflash2",))) as first,
        Solo.load(config(files, draft=None)) as second,
    ):
        for name, size in both.items():
            assert size == sum(e.drafter.nbytes.get(name, 0) for e in (first, second)), name


def test_one_node_for_a_token_of_both() -> None:
    a = CandidateBlock([[5, 6], [8, 9]], np.log([[0.6, 0.2], [0.5, 0.3]]))
    b = CandidateBlock([[7, 5]], np.log([[0.5, 0.4]]))
    tree = expand(0, CombinedCandidates([a, b]), 10)
    assert tree.n_nodes == 7
    found = {}
    for node in range(1, tree.width):
        parent = int(tree.parents[node])
        found[int(tree.tokens[parent]), int(tree.tokens[node])] = exp(
            tree.log_probs[node] - tree.log_probs[parent]
        )
    # below the first token only one draft goes on, and its distribution is all there is
    expected = {(0, 5): 0.5, (0, 7): 0.25, (0, 6): 0.1} | {
        (p, t): q for p in (5, 6) for t, q in ((8, 0.5), (9, 0.3))
    }
    assert found == pytest.approx(expected, rel=1e-5)


def test_taps_that_are_not_contiguous(files: tuple[Path, Path], tmp_path: Path) -> None:
    other = toys.write_pair(tmp_path, 32, taps=(1,))[1]
    wide = toys.write_pair(tmp_path, 33, taps=(0, 2))[1]
    with pytest.raises(ConfigError, match="taps must be contiguous"):
        CombinedSource([registry.open_draft(wide), registry.open_draft(other)])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_with_prompt_lookup_too(files: tuple[Path, Path], temperature: float) -> None:
    with Solo.load(config(files, spec=("dflash2", "mtp", "suffix"))) as engine:
        ids = [3, 1, 4, 1, 5, 9, 2, 6] * 4
        options = {"max_tokens": 60, "sampling": {"temperature": temperature, "seed": 2}}
        plain = generate(fresh(engine, ids), mode="plain", **options)
        assert generate(fresh(engine, ids), mode="tree", **options) == plain


def test_a_head_that_is_asked_for_and_not_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another source that was named drafts, with a warning; where there is none, that is an error."""
    pair = toys.write_pair(tmp_path, 34)
    with pytest.raises(ConfigError, match="has no prediction head"):
        Solo.load(config(pair, draft=None, spec=("dflash", "mtp")))
    with Solo.load(config(pair, draft=pair[1], spec=("dflash", "mtp"))) as engine:
        assert engine.drafter is not None and engine.drafter.name == "dflash"
    assert caplog.text.count("has no prediction head (mtp) to draft with; what else is named drafts") == 1
