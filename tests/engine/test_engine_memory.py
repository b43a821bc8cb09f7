"""Tests of a sequence's memory: reserved once, and an interrupt while it is cleared or restored is noticed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.errors import DeviceError
from dflash_ggml.ggml.bindings import lib
from dflash_ggml.ggml.store import Store
from dflash_ggml.ggml.weights import Source, has_matmul_layout
from reference.engine_kit import Solo
from reference.kv_toys import VARIANTS, write_target

IDS = np.random.default_rng(3).integers(0, 60, 4300).tolist()


@pytest.fixture()
def engine(toy_pair):
    config = EngineConfig(
        *toy_pair, n_ctx=8192, type_k="f32", type_v="f32", reference=True, n_threads=1, n_gpu_layers=0
    )
    with Solo.load(config) as e:
        yield e


def write_on(engine: Solo, n: int) -> list[int]:
    """Continue after the pending token."""
    engine.prefill([engine.pending])
    return write(engine, n)


def write(engine: Solo, n: int, **options) -> list[int]:
    sampler = Sampler(SamplingParams(temperature=0), engine.n_vocab)
    steps = engine.generate(sampler, max_tokens=n, stop=lambda t: False, mode="tree", **options)
    return [t for step in steps for t in step.tokens]


def test_nothing_moves_and_no_graph_is_lost_while_a_sequence_grows(engine):
    """The caches of the whole context are there from the start."""
    addresses = [t.data for t in (*engine.passes.state.kv.slices, *engine.drafter.rows)]
    engine.prefill(IDS[:4060])
    write(engine, 15)
    graphs = {key for key, _ in engine.passes.graphs}
    taken = engine.nbytes
    write_on(engine, 60)  # beyond 4,096 rows
    assert graphs <= {key for key, _ in engine.passes.graphs}
    assert addresses == [t.data for t in (*engine.passes.state.kv.slices, *engine.drafter.rows)]
    assert {**engine.nbytes, "scratch": 0} == {**taken, "scratch": 0}


@pytest.mark.parametrize("part", ["target", "draft"])
def test_a_context_that_does_not_fit_is_refused_before_any_work(toy_pair, monkeypatch, part):
    reserve, calls = Store.reserve, []

    def full(store):
        calls.append(1)
        if len(calls) == (1 if part == "target" else 2):
            raise DeviceError("no room")
        return reserve(store)

    monkeypatch.setattr(Store, "reserve", full)
    with pytest.raises(DeviceError, match="no room"):
        Solo.load(EngineConfig(*toy_pair, n_ctx=8192, n_threads=1, n_gpu_layers=0))


def test_a_narrow_tree_at_the_end_of_a_cache(engine):
    """A commit moves rows behind its path too: they must exist."""
    for n in range(4088, 4096):
        engine.reset()
        engine.prefill(IDS[:n])
        assert len(write(engine, 12, budget=1)) == 12


def test_more_rows_than_were_planned_are_refused(engine):
    with pytest.raises(DeviceError, match="cache rows needed"):
        engine.passes.bucket(100_000)
    engine.sequence.first_row = 8000
    with pytest.raises(DeviceError, match="cache rows needed"):
        engine.prefill(IDS)
    engine.sequence.first_row = 0


class Broken(Exception):
    pass


def broken(*_):
    raise Broken


@pytest.mark.parametrize("where", ["state", "draft"])
def test_a_reset_that_is_broken_off_asks_for_another(engine, monkeypatch, where):
    engine.prefill(IDS[:20])
    text = write(engine, 30)
    owner, name = (engine.passes.state, "reset") if where == "state" else (engine.drafter, "reset")
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(Broken):
        engine.reset()
    monkeypatch.undo()
    with pytest.raises(DeviceError, match="reset"):
        engine.prefill([1])
    engine.reset()
    engine.prefill(IDS[:20])
    assert write(engine, 30) == text


@pytest.mark.parametrize("with_rows", [True, False])
def test_a_restore_that_is_broken_off_asks_for_a_reset(engine, monkeypatch, with_rows):
    engine.prefill(IDS[:20])
    bare, whole = engine.snapshot(with_rows=False), engine.snapshot()
    text = write(engine, 30)
    monkeypatch.setattr(engine.drafter, "restore_seen", broken)
    with pytest.raises(Broken):
        engine.restore(whole if with_rows else bare)
    monkeypatch.undo()
    with pytest.raises(DeviceError, match="reset"):
        engine.prefill([1])
    assert not engine.can_restore(bare), "its rows may have been written over"
    engine.restore(whole)
    engine.prefill([])
    engine.reset()
    engine.prefill(IDS[:20])
    assert write(engine, 30) == text


def test_a_closed_engine_takes_nothing(engine):
    engine.prefill(IDS[:20])
    engine.close()
    engine.close()
    assert engine.nbytes["scratch"] == 0


def test_a_gpu_limit_warns_once_that_it_has_no_effect_on_the_cpu(toy_pair, caplog):
    config = EngineConfig(*toy_pair, n_ctx=256, n_threads=1, n_gpu_layers=0, calibrate="never")
    for limit, n_warnings in ((None, 0), (1 << 30, 1)):
        caplog.clear()
        with Solo.load(replace(config, gpu_memory=limit)):
            assert sum("gpu_memory" in r.getMessage() for r in caplog.records) == n_warnings


def test_a_tied_embedding_is_copied_where_matmuls_have_a_layout_of_their_own(tmp_path):
    """Rows are looked up in the file's bytes, logits come from a copy in the layout; the plan counts it."""
    path = write_target(tmp_path, 46, GGMLQuantizationType.Q8_0, **VARIANTS[46])
    logits = {}
    for reference in (True, False):
        with Solo.load(EngineConfig(path, n_ctx=512, reference=reference, n_threads=1, n_gpu_layers=0)) as e:
            weights = e.passes.weights
            source = Source(lib.GGML_TYPE_Q8_0, (64, 64), b"")
            assert ("output.weight" in weights) == has_matmul_layout(e.device, source)
            assert e.memory.parts["target weights"] == weights.nbytes
            e.prefill(IDS[:20])
            logits[reference] = np.array(e.sequence.logits)
    np.testing.assert_allclose(logits[False], logits[True], atol=0.05 * np.abs(logits[True]).max())
