"""Tests of a draft with non-finite output: it is dropped for the sequence, which continues with the target's own tokens."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.candidates import CandidateBlock, NonFiniteDraft
from dflash_ggml.policy.costs import Costs
from reference.engine_kit import Solo, fresh, generate
from reference.toys import write_pair


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return write_pair(tmp_path, 11)


def opened(pair: tuple[Path, Path], **options: Any) -> Solo:
    options = {"n_threads": 1, "n_gpu_layers": 0, "reference": True, **options}
    return Solo.load(EngineConfig(*pair, **options))


@pytest.fixture
def cheap_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs under which `auto` drafts, whatever the clock says."""
    measured = Costs.measured

    def underreport(costs: Costs, kind: Any, ms: float, *more: int, **named: int) -> None:
        measured(costs, kind, 10.0 if kind in ("plain", "verify") else 0.1, *more, **named)

    monkeypatch.setattr(Costs, "measured", underreport)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("mode", ["auto", "chain", "tree"])
def test_damaged_weights(pair: tuple[Path, Path], cheap_drafts, mode: Any, value: float, caplog) -> None:
    with opened(pair) as engine:
        expected = generate(fresh(engine), max_tokens=40, mode="plain")
    reader = GGUFReader(pair[1], "r+")
    next(t for t in reader.tensors if t.name == "blk.0.attn_v.weight").data[:] = value
    reader.data.flush()
    del reader
    with opened(pair, spec=("dflash",), calibrate="never") as engine, caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert generate(fresh(engine), max_tokens=40, mode=mode) == expected
        assert engine.sequence.statistics.drafted == 0
    messages = [r.getMessage() for r in caplog.records]
    assert len(messages) == 1 and "draft produced NaN or infinite values" in messages[0]


def test_in_the_middle_of_a_sequence(pair: tuple[Path, Path], monkeypatch, caplog) -> None:
    with opened(pair) as engine, caplog.at_level(logging.WARNING):
        expected = generate(fresh(engine), max_tokens=60, mode="plain")
        n_drafts, propose = 0, engine.drafter.propose

        def failing(*args: Any) -> list[Any]:
            nonlocal n_drafts
            n_drafts += 1
            return [NonFiniteDraft("NaN")] if n_drafts == 4 else propose(*args)

        monkeypatch.setattr(engine.drafter, "propose", failing)
        assert generate(fresh(engine), max_tokens=60, mode="tree") == expected
        assert n_drafts == 4 and engine.sequence.statistics.drafted > 0
        # another sequence drafts again, and may continue from a snapshot of this one
        kept = engine.snapshot()
        assert generate(fresh(engine), max_tokens=60, mode="tree") == expected
        assert n_drafts > 4
        engine.restore(kept)
    assert len(caplog.records) == 1


def test_what_is_no_number() -> None:
    for value in (np.nan, 1.0, np.inf):
        with pytest.raises(NonFiniteDraft):
            CandidateBlock([[1]], [[value]])
