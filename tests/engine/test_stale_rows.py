"""Tests of stale cache rows: whatever values a sequence leaves behind, the next one equals that of a fresh engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.engine.slot import Slot
from dflash_ggml.errors import DeviceError
from dflash_ggml.ggml.device import F32
from dflash_ggml.state.snapshot import Snapshot, Tensors
from reference import kv_toys, toys
from reference.engine_kit import Solo

IDS = np.random.default_rng(3).integers(0, 60, 400).tolist()
# around the tiles of 64 rows that a prompt is read in, and longer than a ring's window
PROMPTS = [5, 40, 100, 300]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A draft with a ring and with rows of all tokens."""
    return toys.write_pair(
        tmp_path_factory.mktemp("stale"), 5, window=100, full_layers=1, draft_layers=2, n_ctx=4096
    )


@pytest.fixture(scope="module", params=["draft", "target"])
def either(
    request: pytest.FixtureRequest, pair: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """The same, and one whose target has rings."""
    if request.param == "draft":
        return pair
    sizes: dict[str, Any] = {
        "arch": "laguna",
        "n_layers": 3,
        "period": 3,
        "window": 12,
        "n_rot": 16,
        "yarn": 8.0,
    }
    return kv_toys.write_pair(tmp_path_factory.mktemp("rings"), 41, **sizes)


def load(pair: tuple[Path, Path], types: tuple[str, str] = ("f16", "f16"), **options: Any) -> Solo:
    base = {"n_ctx": 600, "n_batch": 64, "n_threads": 1, "n_gpu_layers": 0, "mode": "tree"}
    base |= {"type_k": types[0], "type_v": types[1], "calibrate": "never"}
    return Solo.load(EngineConfig(*pair, **base | options))


def parts_of(snapshot: Snapshot) -> list[np.ndarray]:
    """All arrays of a snapshot with rows."""
    return [*snapshot.live, *(part for block in snapshot.rows or () for part in block.parts), *snapshot.rings]


def write(slot: Slot, n_prompt: int, n: int = 8) -> tuple[np.ndarray, list[int]]:
    """The logits after a prompt, and n tokens behind it."""
    slot.reset()
    slot.prefill(IDS[:n_prompt])
    logits = slot.logits.copy()
    return logits, go_on(slot, n)


def go_on(slot: Slot, n: int = 8) -> list[int]:
    sampler = Sampler(SamplingParams(temperature=0), slot.n_vocab)
    steps = slot.generate(sampler, max_tokens=n, stop=lambda t: False)
    tokens = [token for step in steps for token in step.tokens]
    assert not slot.sequence.undraftable
    return tokens


def contaminate(slot: Slot, value: float, first: int = 0) -> None:
    """Set all rows that the sequence has written from `first` on to `value`, or scales of it."""
    device, tensors = slot.engine.device, slot.kv.tensors()
    for t, row, n in [
        *(
            (t, slot.sequence.first_row + first, slot.n_tokens + slot.engine.over - first)
            for t in tensors.caches
        ),
        *((t, slot.state_index * n_rows, n_rows) for t, n_rows, _ in tensors.rings),
    ]:
        number = np.array(value, np.float32 if t.type == F32 else np.float16).tobytes()
        data = np.frombuffer(number * (n * t.nb[1] // len(number)), np.uint8)
        device.write(t, data, row * t.nb[1])


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("types", [("f32", "f32"), ("f16", "f16"), ("q8_0", "q4_0")], ids="/".join)
def test_a_sequence_after_a_nonfinite_one(pair, types, value):
    with load(pair, types) as engine:
        expected = [write(engine, n) for n in PROMPTS]
    with load(pair, types) as engine:
        for n, (logits, tokens) in zip(PROMPTS, expected):
            write(engine, 400)
            contaminate(engine, value)
            found = write(engine, n)
            np.testing.assert_array_equal(found[0], logits)
            assert found[1] == tokens


def test_a_slot_after_a_nonfinite_one(pair):
    """Also where a sequence moved away from rows, and another comes there."""
    with load(pair, parallel=3, n_ctx=1024) as engine:
        first = engine.open(300)
        expected = [write(first, n) for n in PROMPTS[:3]]
        for n, (logits, tokens) in zip(PROMPTS, expected):
            write(first, 250)
            second = engine.open(100)
            contaminate(first, np.nan, first=60)
            first.close()
            first = engine.open(300)
            found = write(first, n)
            np.testing.assert_array_equal(found[0], logits)
            assert found[1] == tokens
            second.close()
        write(first, 250)
        blocking = engine.open(20)
        contaminate(first, np.nan)
        at = first.sequence.first_row
        assert first.grow(500) and first.sequence.first_row != at
        other = engine.open(100)
        assert other.sequence.first_row == at
        assert write(other, 40)[1] == expected[1][1]
        blocking.close()


def test_a_sequence_that_continues_from_a_snapshot(pair):
    """One with its rows, and one whose rows are still there."""
    with load(pair) as engine:
        outputs = []
        for value, with_rows in ((None, True), (np.nan, True), (np.nan, False)):
            engine.reset()
            engine.prefill(IDS[:40])
            kept = engine.snapshot(with_rows)
            engine.prefill(IDS[40:400])
            if value is not None:
                contaminate(engine, value, first=0 if with_rows else 40)
            engine.restore(kept)
            engine.prefill(IDS[200:240])
            outputs.append(go_on(engine))
        assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize("types", [("f16", "f16"), ("q8_0", "q4_0")], ids="/".join)
def test_a_sequence_that_grows_among_nonfinite_rows(either, types):
    """Over many tiles of them, with buckets of rows and trees that reach further than the sequence."""
    ids = np.random.default_rng(4).integers(0, 60, 2500).tolist()

    def outputs(value: float | None) -> list[Any]:
        found: list[Any] = []
        with load(either, types, n_ctx=4096, n_batch=256) as engine:
            engine.prefill(ids)
            if value is not None:
                contaminate(engine, value)
            for n, m in ((5, 280), (2040, 16)):
                engine.reset()
                engine.prefill(ids[100 : 100 + n])
                found += [engine.logits.copy(), go_on(engine, m), engine.tokens]
        return found

    for a, b in zip(outputs(np.nan), outputs(None)):
        np.testing.assert_array_equal(a, b)


def test_a_slot_that_grows_into_nonfinite_rows(either):
    """In place, and moved elsewhere; also while it is extended in steps."""

    def outputs(value: float | None) -> list[list[int]]:
        found = []
        with load(either, parallel=3, n_ctx=1500, mode="plain") as engine:
            slots = [engine.open(300), engine.open(600)]
            for slot in slots:
                write(slot, 280)
                if value is not None:
                    contaminate(slot, value)
            for slot in slots:
                slot.close()
            first = engine.open(100)
            first.prefill(IDS[:60])
            sampler = Sampler(SamplingParams(temperature=0), first.n_vocab)
            run = first.begin(sampler, max_tokens=500, stop=lambda t: False)
            first.first()
            second, at = None, first.sequence.first_row
            while run.finish is None:
                (step,) = engine.step([run])
                assert not isinstance(step, Exception), step
                if first.n_tokens > 350 and second is None:
                    second = engine.open(100)
                    found.append(write(second, 50)[1])
            found.append(first.tokens)
            assert first.sequence.first_row != at or len(first.tokens) < 550
        return found

    assert outputs(np.nan) == outputs(None)


def test_a_cpu_clears_rows_when_a_sequence_reaches_them(pair, monkeypatch):
    """The first ones when a slot is closed, and none far behind the sequence."""
    cleared: list[tuple[int, int]] = []
    with load(pair, parallel=2, n_ctx=1500) as engine:
        first = engine.open(1200)
        first.prefill(IDS * 2)
        monkeypatch.setattr(Tensors, "clear_rows", lambda _, first, end: cleared.append((first, end)))
        first.close()
        assert cleared == [(0, 256)]
        cleared.clear()
        second = engine.open(1200)
        second.prefill(IDS[:40])
        go_on(second, 8)
        assert cleared and max(end for _, end in cleared) == 256


def test_a_preempted_sequence_that_continues(pair):
    """In a slot where a longer sequence overflowed."""

    def preempted(value: float | None) -> tuple[list[int], np.ndarray, bool]:
        with load(pair, parallel=2, n_ctx=1500, budget=127) as engine:
            first = engine.open(600)
            first.prefill(IDS[:40])
            sampler = Sampler(SamplingParams(temperature=0), first.n_vocab)
            run = first.begin(sampler, max_tokens=20, stop=lambda t: False, keep_logits=True)
            first.first()
            engine.step([run])
            kept = first.snapshot()
            first.close()
            second = engine.open(600)
            assert second.state_index == 0
            write(second, 300)
            longer = second.snapshot(with_rows=False)
            if value is not None:
                contaminate(second, value)
            second.restore(kept)
            second.resume(run)
            assert not second.can_restore(longer)
            rows: list[np.ndarray] = []
            while run.finish is None:
                (step,) = engine.step([run])
                assert not isinstance(step, Exception), step
                rows += step.logits
            return second.tokens, np.stack(rows), run.undraftable

    expected, found = preempted(None), preempted(np.nan)
    assert found[0] == expected[0] and not found[2]
    np.testing.assert_array_equal(found[1], expected[1])


def test_a_snapshot_longer_than_the_nonfinite_sequence(either):
    """The ring's rows that are in no snapshot."""
    with load(either) as engine:
        outputs = []
        for value in (None, np.nan):
            engine.reset()
            engine.prefill(IDS[:350])
            kept = engine.snapshot()
            engine.reset()
            engine.prefill(IDS[100:110])
            if value is not None:
                contaminate(engine, value)
            engine.restore(kept)
            engine.prefill(IDS[200:240])
            outputs.append((engine.logits.copy(), go_on(engine)))
        np.testing.assert_array_equal(outputs[0][0], outputs[1][0])
        assert outputs[0][1] == outputs[1][1]


@pytest.mark.parametrize("n", [3, 40, 600])
@pytest.mark.parametrize("held", [3, 405])
def test_hidden_states_beside_a_nonfinite_sequence(either, held, n):
    """While it is held, after it, and where no rows are free behind it; they leave nothing behind."""

    def hidden(engine: Solo) -> np.ndarray:
        parts: list[np.ndarray] = []
        engine.hidden_states((IDS + IDS)[:n], parts.append)
        return np.concatenate(parts)

    with load(either) as engine:
        expected = hidden(engine)
        text = write(engine, 100)
    with load(either) as engine:
        engine.prefill(IDS[:held])
        contaminate(engine, np.nan)
        np.testing.assert_array_equal(hidden(engine), expected)
        engine.reset()
        np.testing.assert_array_equal(hidden(engine), expected)
        engine.prefill(IDS[:held])
        before = engine.snapshot()
        np.testing.assert_array_equal(hidden(engine), expected)
        after = engine.snapshot()
        for a, b in zip(parts_of(before), parts_of(after), strict=True):
            np.testing.assert_array_equal(a, b)
        found = write(engine, 100)
        np.testing.assert_array_equal(found[0], text[0])
        assert found[1] == text[1]


def test_a_slot_is_released_where_clearing_fails(pair, monkeypatch):
    with load(pair, parallel=2, n_ctx=1024) as engine:
        unused = engine.open(300)

        def fails(*_: object) -> None:
            raise DeviceError("out of order")

        with monkeypatch.context() as broken:
            broken.setattr(Tensors, "clear_rings", fails)
            unused.close()  # nothing is cleared where nothing was written
            slot = engine.open(300)
            slot.prefill(IDS[:40])
            with pytest.raises(DeviceError, match="out of order"):
                slot.close()
        assert not engine.slots and engine.passes.rows.longest == engine.passes.n_rows
        with pytest.raises(DeviceError, match="closed"):
            slot.reset()


def test_rows_that_may_be_wanted_again_stay(pair):
    """Until something is written over them."""
    with load(pair) as engine:
        engine.prefill(IDS[:300])
        before = engine.snapshot()
        kept = engine.snapshot(with_rows=False)
        engine.reset()
        assert engine.can_restore(kept)
        engine.restore(kept)
        for a, b in zip(parts_of(engine.snapshot()), parts_of(before), strict=True):
            np.testing.assert_array_equal(a, b)
        engine.reset()
        engine.prefill(IDS[100:110])
        for t in engine.kv.tensors().caches:
            dead = engine.device.read_bytes(t, np.empty(246 * t.nb[1], np.uint8), 10 * t.nb[1])
            assert not dead.any()
