"""Tests of prefill in 8-bit floats: which graphs and matmuls ask for it, and how it is reported.

CPUs ignore the request, so one that claims kernels for it shows what is asked.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.engine.kernel_tuning import FP8_COLUMNS, FP8_TYPES
from dflash_ggml.ggml.bindings import Tensor, ffi, lib
from dflash_ggml.ggml.device import Device, key
from dflash_ggml.ggml.graph import Graph
from dflash_ggml.session.disk_cache import state_identity
from dflash_ggml.session.events import Usage
from dflash_ggml.session.openai_parts import timings_dict
from dflash_ggml.session.requests import CompletionRequest
from dflash_ggml.session.session import Session, run_completion
from reference.engine_kit import Solo

IDS = np.random.default_rng(8).integers(0, 500, FP8_COLUMNS + 20).tolist()


def load(files: Sequence[Path], **options: Any) -> Solo:
    base = {"n_ctx": 1024, "n_batch": 512, "n_gpu_layers": 0, "n_threads": 1, "calibrate": "never"}
    return Solo.load(EngineConfig(*files, **{**base, **options}))


def written(engine: Solo, n: int = 8, mode: str = "tree") -> list[int]:
    engine.reset()
    engine.prefill(IDS)
    sampler = Sampler(SamplingParams(temperature=0), engine.n_vocab)
    steps = engine.generate(sampler, max_tokens=n, mode=mode, stop=lambda t: False)
    return [token for step in steps for token in step.tokens]


@pytest.fixture
def demo_pair(demo_target: Path, demo_draft: Path) -> tuple[Path, Path]:
    return demo_target, demo_draft


@pytest.fixture
def claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that claims to have the kernels."""
    monkeypatch.setattr(Device, "has_fp8_matmuls", True)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, set[str]]]]:
    """Columns and matrices of the matmuls of each graph that may round."""
    found: list[tuple[int, set[str]]] = []
    allow = Graph.allow_fp8

    def allow_fp8(graph: Graph, weights: Sequence[Tensor]) -> int:
        matrices = {key(w) for w in weights}
        nodes = [lib.ggml_graph_node(graph.cgraph, i) for i in range(graph.n_nodes)]
        named = [t for t in nodes if t.src[0] != ffi.NULL and key(t.src[0]) in matrices]
        n = allow(graph, weights)
        assert n == len(named)
        found.append((int(named[0].ne[1]), {ffi.string(t.src[0].name).decode() for t in named}))
        return n

    monkeypatch.setattr(Graph, "allow_fp8", allow_fp8)
    yield found


def test_matmuls_of_prompts_ask_for_it_and_no_others(
    demo_pair: tuple[Path, Path], claimed: None, asked: list[tuple[int, set[str]]]
) -> None:
    with load(demo_pair, prefill_fp8=True) as engine:
        names = {name for name, w in engine.passes.weights.items() if w.ne[1] > 1 and w.type in FP8_TYPES}
        shaped = {name for name in names if engine.passes.weights[name].ne[1] % 16 == 0}
        layers = {name for name in shaped if name.startswith("blk.")}
        asked.clear()  # what was reserved
        written(engine)
        assert [columns for columns, _ in asked] == [FP8_COLUMNS], "the batch behind it has 20"
        assert asked[0][1] == layers and "output.weight" not in layers
        engine.reset()
        engine.prefill(IDS[: FP8_COLUMNS - 1])
        assert len(asked) == 1, "few columns stay exact"
        assert engine.prefill_fp8


def test_it_is_off_by_default(
    demo_pair: tuple[Path, Path], claimed: None, asked: list[tuple[int, set[str]]]
) -> None:
    with load(demo_pair) as engine:
        written(engine)
        assert not asked and not engine.prefill_fp8


def test_a_device_that_ignores_the_request_computes_the_same(
    demo_pair: tuple[Path, Path], claimed: None
) -> None:
    with load(demo_pair) as engine:
        exact = written(engine)
    with load(demo_pair, prefill_fp8=True) as engine:
        assert written(engine) == exact


@pytest.mark.parametrize(
    ("options", "why"),
    [({}, "it takes a Hopper GPU"), ({"n_batch": 256}, "batches of 384 tokens and more, these have 256")],
    ids=["a CPU", "narrow batches"],
)
def test_it_says_once_that_it_has_no_effect(
    demo_pair: tuple[Path, Path],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    asked: list[tuple[int, set[str]]],
    options: dict[str, Any],
    why: str,
) -> None:
    if options:
        monkeypatch.setattr(Device, "has_fp8_matmuls", True)
    with caplog.at_level(logging.WARNING), load(demo_pair, prefill_fp8=True, **options) as engine:
        written(engine)
        (said,) = (r.getMessage() for r in caplog.records if "--prefill-fp8" in r.getMessage())
        assert said.startswith("--prefill-fp8 has no effect: ") and why in said
        assert not asked and not engine.prefill_fp8
        mine = state_identity(engine)
    with load(demo_pair, **options) as engine:
        assert state_identity(engine) == mine, "the rows are exact"


def test_floats_are_left_as_they_are(
    toy_pair: tuple[Path, Path], caplog: pytest.LogCaptureFixture, claimed: None
) -> None:
    with caplog.at_level(logging.WARNING), load(toy_pair, prefill_fp8=True) as engine:
        assert not engine.prefill_fp8
    assert any("no matrix has a type" in r.getMessage() for r in caplog.records)


def test_it_is_reported_and_its_rows_are_not_mixed_with_exact_ones(
    demo_pair: tuple[Path, Path], caplog: pytest.LogCaptureFixture, claimed: None
) -> None:
    with load(demo_pair) as engine:
        exact = state_identity(engine)
    with caplog.at_level(logging.WARNING), load(demo_pair, prefill_fp8=True) as engine:
        assert state_identity(engine) != exact
        events = run_completion(Session(engine), CompletionRequest(prompt="Hi", max_tokens=2))
        (usage,) = (e for e in events if isinstance(e, Usage))
        assert usage.prefill_fp8 and timings_dict(usage)["prefill_fp8"] is True
    assert any("not the model's own" in r.getMessage() for r in caplog.records)


def test_no_decoding_joins_a_pass_of_a_prompt(demo_pair: tuple[Path, Path], claimed: None) -> None:
    with load(demo_pair, parallel=3) as engine:
        assert engine.can_join
    with load(demo_pair, parallel=3, prefill_fp8=True) as engine:
        assert not engine.can_join
