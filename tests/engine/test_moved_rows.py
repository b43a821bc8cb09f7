"""Tests of moving a sequence's cache rows on the device: target and draft continue bit for bit."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.decode.sequence import Sequence
from dflash_ggml.engine import passes
from dflash_ggml.engine.slot import Slot
from dflash_ggml.ggml.device import list_devices
from dflash_ggml.state.kv_type import KV_TYPES
from dflash_ggml.state.pool import ADJACENT, UNIT
from dflash_ggml.state.snapshot import Tensors
from reference.engine_kit import Solo

IDS = np.random.default_rng(5).integers(0, 60, 700).tolist()


DEVICES = ["cpu", *(["gpu"] if any(d.is_gpu for d in list_devices()) else [])]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def load(pair: tuple[Path, Path], device: str, **options: object) -> Solo:
    base = {"n_ctx": 1024, "n_batch": 128, "n_threads": 1, "mode": "tree", "parallel": 3}
    base |= {"n_gpu_layers": 0 if device == "cpu" else -1}
    return Solo.load(EngineConfig(*pair, **base | {"calibrate": "never", "spec": ("dflash",)} | options))  # type: ignore[arg-type]


def sizes(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a run, so that short sequences take several."""
    monkeypatch.setattr(passes, "MOVED_AT_ONCE", at_once)


@pytest.mark.parametrize("types", [*zip(KV_TYPES, KV_TYPES), ("q8_0", "q4_0")], ids="/".join)
def test_rows_of_every_type_keep_their_bits(
    toy_pair: tuple[Path, Path], device: str, types: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To lower and higher rows, over themselves and not; what lies beside them stays."""
    sizes(64, monkeypatch)
    rng = np.random.default_rng(8)
    with load(toy_pair, device, type_k=types[0], type_v=types[1]) as engine:
        caches = engine.kv.tensors().caches
        assert len(caches) > 2  # a draft's are among them
        held = [rng.integers(0, 100, (t.ne[1], t.nb[1]), np.uint8) for t in caches]
        for t, data in zip(caches, held):
            engine.device.write(t, data)
        for first, to, n in ((0, 300, 200), (300, 270, 200), (270, 290, 131), (290, 291, 16), (700, 256, 1)):
            engine.passes.move_rows(caches, first, to, n)
            for t, data in zip(caches, held):
                data[to : to + n] = data[first : first + n].copy()
                found = engine.device.read_bytes(t, np.empty(data.nbytes, np.uint8))
                np.testing.assert_array_equal(found.reshape(data.shape), data)


def contaminate(slot: Slot, rows: range) -> None:
    """NaN in all bytes of cache rows."""
    for t in slot.kv.tensors().caches:
        nan = np.frombuffer(b"\xff" * t.nb[1] * len(rows), np.uint8)
        slot.engine.device.write(t, nan, rows.start * t.nb[1])


def steps(slot: Slot, n: int) -> list[tuple[int, ...]]:
    """What steps of a sequence emit; how many tokens each has is the draft's part."""
    sampler = Sampler(SamplingParams(temperature=0), slot.n_vocab)
    found = slot.generate(sampler, max_tokens=n, stop=lambda token: False, mode="tree")
    return [step.tokens for step in found]


@pytest.mark.parametrize("types", [("f32", "f32"), ("q8_0", "q4_0")], ids="/".join)
def test_a_moved_sequence_continues(
    toy_pair: tuple[Path, Path], device: str, types: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over rows of NaN, which are not part of it, with all features of the draft, and without a copy through the host."""
    sizes(64, monkeypatch)

    def written(moves: list[int]) -> list[list[tuple[int, ...]]]:
        found = []
        with load(toy_pair, device, type_k=types[0], type_v=types[1], reference=True) as engine:
            first, slot = engine.open(200), engine.open(200)
            slot.prefill(IDS[:180])
            found.append(steps(slot, 20))
            first.close()
            if moves:
                contaminate(slot, range(slot.kv.allocated.stop, engine.passes.n_rows))
            engine.passes.rows.mark_stale(range(slot.kv.allocated.stop, engine.passes.n_rows))
            seen = engine.drafter.seen(slot.sequence)
            for at in moves:
                slot.kv.move(range(at, at + len(slot.kv.allocated)))
            assert not moves or slot.sequence.first_row == moves[-1]
            assert seen.sum() > 180 and (engine.drafter.seen(slot.sequence) == seen).all()
            slot.prefill(IDS[180:330])
            found += [steps(slot, 40), [tuple(slot.tokens)]]
            slot.close()
            assert engine.passes.rows.longest == engine.passes.n_rows
        return found

    expected = written([])
    monkeypatch.setattr(Tensors, "read_rows", None)
    assert written([0, UNIT, 3 * UNIT, 2 * UNIT, 4 * UNIT]) == expected
    assert max(len(step) for step in expected[1]) > 1


@pytest.mark.parametrize("by", [-2 * UNIT, -UNIT, UNIT])
def test_rows_behind_a_moved_sequence_are_not_read(toy_pair: tuple[Path, Path], device: str, by: int) -> None:
    """A longer sequence that overflowed, some of whose rows are the new sequence's."""
    with load(toy_pair, device) as engine:
        expected = []
        for shift in (0, by):
            first, slot = engine.open(300), engine.open(600)
            first.close()
            slot.prefill(IDS[:100])
            kept = slot.snapshot(with_rows=False)
            slot.prefill(IDS[100:600])
            start = slot.sequence.first_row
            assert start + by >= 0
            contaminate(slot, range(start + 100, start + 600))
            slot.restore(kept)
            slot.prefill(IDS[300:310])  # from here on no sequence wants the rows behind
            if shift:
                slot.kv.move(range(start + shift, start + shift + len(slot.kv.allocated)))
            slot.prefill(IDS[310:400])
            expected.append((slot.logits.tolist(), steps(slot, 200)))
            slot.close()
        assert expected[0] == expected[1]


def begun(slot: Slot, ids: list[int]) -> Sequence:
    """A greedy text behind a prompt."""
    slot.prefill(ids)
    sampler = Sampler(SamplingParams(temperature=0), slot.n_vocab)
    run = slot.begin(sampler, max_tokens=100, stop=lambda token: False)
    slot.first()
    return run


def test_a_step_may_move_those_that_it_is_of(toy_pair: tuple[Path, Path], device: str) -> None:
    """For one of them, to rows in which a closed sequence has left NaN."""
    with load(toy_pair, device) as engine:
        pool, written = engine.passes.rows, []
        pool.spacing = ADJACENT
        for shift in (False, True):
            gone, moved, grown = (engine.open(200) for _ in range(3))
            others = [pool.allocate(pool.longest)] if shift else []
            full = len(grown.kv.allocated) - engine.over
            runs = [begun(moved, IDS[:100]), begun(grown, IDS[300 : 300 + full])]
            start, left = moved.sequence.first_row, gone.kv.allocated
            gone.close()
            if shift:
                contaminate(moved, left)
                pool.mark_stale(left)
            steps = engine.step(runs)
            assert (moved.sequence.first_row < start) == shift and not any(run.isolated for run in runs)
            written.append([step.tokens for step in steps])
            for slot in engine.slots:
                slot.close()
            for rows in others:
                pool.free(rows)
        assert written[0] == written[1]


@pytest.mark.parametrize("call", ["prefill", "hidden_states"])
def test_no_sequence_moves_during_a_pass(toy_pair: tuple[Path, Path], device: str, call: str) -> None:
    """A prompt of another thread that wants rows waits for it."""
    with load(toy_pair, device) as engine:
        pool = engine.passes.rows
        pool.spacing = ADJACENT
        gone, moved, grown = (engine.open(200) for _ in range(3))
        others = pool.allocate(pool.longest)
        moved.prefill(IDS[:100])
        rows = moved.kv.allocated
        gone.close()
        work = {
            "prefill": lambda: grown.prefill(IDS[:300]),
            "hidden_states": lambda: grown.hidden_states(IDS[:300], lambda part: None),
        }[call]
        thread = threading.Thread(target=work)
        with engine.passing:  # as a step holds it
            thread.start()
            thread.join(0.3)
            assert moved.kv.allocated == rows
        thread.join()
        assert moved.kv.allocated != rows and len(grown.kv.allocated) >= 300
        pool.free(others)
