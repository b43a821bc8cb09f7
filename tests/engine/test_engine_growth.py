"""Caches that move: nothing keeps pointing to where they were, and an interrupt or a lack of memory on the way is noticed."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.engine.engine import Engine
from dflash_ggml.errors import DeviceError
from dflash_ggml.ggml.store import Store

IDS = np.random.default_rng(3).integers(0, 60, 4300).tolist()


@pytest.fixture()
def engine(toy_pair):
    config = EngineConfig(*toy_pair, n_ctx=8192, kv_type="f32", reference=True, n_threads=1, n_gpu_layers=0)
    with Engine.load(config) as e:
        yield e


def write(engine: Engine, n: int, **options) -> list[int]:
    sampler = Sampler(SamplingParams(temperature=0), engine.n_vocab)
    steps = engine.generate(sampler, max_tokens=n, stop=lambda t: False, mode="tree", **options)
    return [t for step in steps for t in step.tokens]


def test_a_prefill_after_growth_writes_to_the_caches_there_are(engine):
    """A prompt's graph writes to the draft's cache as well: it must not outlive that cache's place."""
    engine.prefill(IDS[:4060])
    write(engine, 15)
    engine.reset()
    engine.prefill(IDS[:4060])
    write(engine, 60)  # beyond 4,096 rows
    engine.reset()
    for t in engine.drafter.rows:
        engine.device.write(t, np.full(t.ne[0] * t.ne[1], 7.0, np.float32))
    engine.prefill(IDS[:4060])
    for t in engine.drafter.rows:
        rows = engine.device.read(t).reshape(-1, t.ne[0])[:4060]
        assert (rows != 7).any(axis=1).all(), "rows of the draft's context went elsewhere"


def test_an_interrupt_while_a_cache_moves_asks_for_a_reset(engine, monkeypatch):
    """Half of the rows may be gone by then."""
    engine.prefill(IDS[:4080])
    grow = type(engine.passes.state.kv).grow

    def interrupted(cache, n_rows):
        grow(cache, n_rows)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(engine.passes.state.kv), "grow", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(engine, 40)
    monkeypatch.undo()
    with pytest.raises(DeviceError, match="reset"):
        engine.prefill([1])
    engine.reset()
    engine.prefill(IDS[:10])
    assert len(write(engine, 5)) == 5


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_memory_that_runs_out_loses_no_row(engine, monkeypatch, failing):
    """Of the target's cache, its mask or the draft's cache: what there was is brought back, elsewhere in memory."""
    engine.prefill(IDS[:4090])
    snapshot = engine.snapshot()
    allocate, calls = Store.allocate, []

    def full(store, *args, **options):
        calls.append(1)
        if len(calls) == failing + 1:
            raise DeviceError("no room")
        return allocate(store, *args, **options)

    monkeypatch.setattr(Store, "allocate", full)
    with pytest.raises(DeviceError, match="no room"):
        write(engine, 40)
    monkeypatch.undo()
    assert engine.tokens == IDS[:4090]
    engine.prefill([7])
    text = write(engine, 40)
    engine.restore(snapshot)
    engine.prefill([7])
    assert write(engine, 40) == text
    engine.reset()
    engine.prefill([*IDS[:4090], 7])
    assert write(engine, 40) == text


def test_a_narrow_tree_at_the_end_of_a_cache(engine):
    """A commit moves rows behind its path too: they must exist."""
    for n in range(4088, 4096):
        engine.reset()
        engine.prefill(IDS[:n])
        assert len(write(engine, 12, budget=1)) == 12


def test_more_rows_than_were_planned_are_refused(engine):
    for rows_of in (engine.passes, engine.drafter):
        with pytest.raises(DeviceError, match="room for"):
            rows_of.ensure_rows(100_000)
    engine.sequence.first_slot = 8000
    with pytest.raises(DeviceError, match="room for"):
        engine.prefill(IDS)
    engine.sequence.first_slot = 0


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
