"""Tests of DFlash, DFlash2 and DSpark drafts: lattices against numpy in float64, unchanged output. 8 seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.tree import expand, spine
from reference import toys
from reference.engine_kit import Solo, fresh, generate
from reference.numpy_draft import BlockDraft

KINDS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash-yarn-rot-own": {"yarn": 4.0, "draft_rot": 32, "own_tables": True, "draft_layers": 3},
    "dflash-eight-windows": {"draft_layers": 8, "window": 24, "n_layers": 9, "taps": tuple(range(8))},
    "laguna": {"normed_taps": True, "window": 24, "n_heads": 3, "draft_layers": 3},
    "laguna-without-windows": {"normed_taps": True, "taps": (0, 1, 3)},
    "dflash2": {"draft": "dflash2", "window": 24, "causal": False},
    "dflash2-block10-kernel4": {
        "draft": "dflash2",
        "conv_kernel": 4,
        "conv_group": 8,
        "block_size": 10,
        "window": 9,
    },
    "dspark-block7": {"draft": "dspark", "block_size": 7, "confidence": True, "pair_scale": 2.0},
    "dspark-masks": {"draft": "dspark", "from_anchor": False},
    "dspark-gated": {"draft": "dspark", "gated": True, "block_size": 16, "pair_scale": 2.0},
    "dspark-reduced": {"draft": "dspark", "n_draft_vocab": 40, "taps": (0, 1, 2)},
}


class Pair:
    """An engine on a toy pair, the same draft in numpy, and the features that the engine's target gave."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.target, self.draft = toys.write_pair(folder, 60 + list(KINDS).index(kind), **KINDS[kind])
        self.config = EngineConfig(
            self.target,
            self.draft,
            n_ctx=256,
            n_threads=1,
            type_k="f32",
            type_v="f32",
            reference=True,
            calibrate="never",
        )
        self.engine = Solo.load(self.config)
        self.numpy = BlockDraft(self.draft, self.target)

    def prefill(self, ids: list[int]) -> np.ndarray:
        """Features float64 [tokens, n_taps * D] of a prompt that the engine has read."""
        engine, drafter, kept = self.engine, self.engine.drafter, []
        assert drafter is not None
        ordinary = drafter.append  # type: ignore[attr-defined]

        def append(graph, features, *where):
            kept.append(graph.output(graph.cont(features), f"features{len(kept)}"))
            ordinary(graph, features, *where)

        drafter.append = append  # type: ignore[attr-defined]
        fresh(engine, ids)
        drafter.append = ordinary  # type: ignore[attr-defined]
        read = np.concatenate([engine.device.read(part).reshape(part.ne[1], -1) for part in kept])
        engine.passes.graphs.clear()
        return read.astype(np.float64)


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    found = Pair(tmp_path_factory.mktemp("pair"), request.param)
    yield found
    found.engine.close()


def prompt(pair: Pair, n: int) -> list[int]:
    return np.random.default_rng(n).integers(0, pair.engine.n_vocab - 4, n).tolist()


@pytest.mark.parametrize("n", [1, 5, 40])
def test_a_lattice_is_numpys(pair: Pair, n: int) -> None:
    """Ids, log-probabilities and pair scores of all depths after contexts shorter and longer than a window."""
    features = pair.prefill(prompt(pair, n))
    engine = pair.engine
    assert engine.drafter is not None
    engine.sequence.pending = 7
    rows = engine.drafter.propose([engine.sequence], 31)[0]
    assert len(rows.ids) == engine.drafter.depth
    ids, log_probs, pairs = pair.numpy.candidates(features, 7, rows.ids.shape[1])
    np.testing.assert_allclose(rows.log_probs, log_probs, atol=2e-4)
    same = rows.ids == ids
    assert same.all() or np.diff(log_probs, axis=1).max(where=~same[:, 1:], initial=-1) > -1e-4, (
        "near-ties only"
    )
    if rows.pairs is None:
        assert not pairs.any()
    elif same.all():
        np.testing.assert_allclose(rows.pairs, pairs, atol=5e-4)
    chain = spine(7, rows, len(rows.ids)).tokens[1:].tolist()
    assert chain == pair.numpy.chain(features, 7, rows.ids.shape[1])


@pytest.mark.parametrize("mode", ["chain", "tree"])
def test_output_is_unchanged(pair: Pair, mode: str) -> None:
    """Greedy and sampled, over steps of every kind of acceptance."""
    for sampling in ({}, {"temperature": 1.0, "seed": 3}):
        plain = generate(fresh(pair.engine), max_tokens=80, mode="plain", sampling=sampling)
        assert generate(fresh(pair.engine), max_tokens=80, mode=mode, sampling=sampling) == plain


def test_a_draft_sees_the_same_whatever_the_steps_were(pair: Pair) -> None:
    """After 40 tokens written in trees it proposes what it does after one prompt of the same tokens."""
    engine = pair.engine
    assert engine.drafter is not None
    generate(fresh(engine), max_tokens=40, mode="tree")
    tokens, pending = engine.tokens, engine.pending
    stepped = engine.drafter.propose([engine.sequence], 31)[0]
    fresh(engine, tokens)
    engine.sequence.pending = pending
    read = engine.drafter.propose([engine.sequence], 31)[0]
    np.testing.assert_allclose(stepped.log_probs, read.log_probs, atol=1e-4)
    assert np.array_equal(stepped.ids, read.ids)


def test_a_tree_expects_more_than_a_chain(pair: Pair) -> None:
    """By the draft's own probabilities, of as many nodes."""
    engine = pair.engine
    assert engine.drafter is not None
    for n in (3, 20):
        fresh(engine, prompt(pair, n))
        engine.sequence.pending = 5
        rows = engine.drafter.propose([engine.sequence], 31)[0]
        chain, tree = spine(5, rows, len(rows.ids)), expand(5, rows, len(rows.ids))
        assert np.exp(tree.log_probs[1:]).sum() >= np.exp(chain.log_probs[1:]).sum() - 1e-6


def test_shorter_blocks(pair: Pair) -> None:
    engine = pair.engine
    assert engine.drafter is not None
    for depth in (1, 2, engine.drafter.depth):
        fresh(engine)
        engine.sequence.pending = 5
        assert len(engine.drafter.propose([engine.sequence], 31, depth)[0].ids) == depth


def test_quantised_weights_run(tmp_path: Path) -> None:
    """Tables of which rows are looked up, and matrices split in two, also of a quantised file."""
    for name, draft in (
        ("Q8_0", {"draft": "dflash2"}),
        ("Q8_0", {"draft": "dspark", "gated": True}),
        ("F16", {"draft": "dspark", "gated": True, "confidence": True}),
    ):
        target, file = toys.write_pair(tmp_path, 90, kind=toys.GGMLQuantizationType[name], **draft)
        config = EngineConfig(target, file, n_ctx=128, n_threads=1, mode="chain", calibrate="never")
        with Solo.load(replace(config, budget=8)) as engine:
            assert len(generate(fresh(engine), max_tokens=20)) == 20
            assert engine.sequence.statistics.drafted > 0
