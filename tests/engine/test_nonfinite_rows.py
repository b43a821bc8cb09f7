"""Tests of a sequence with overflow: it ends with an error by name, leaves no NaN in the caches, and does not affect the others.

A token's embedding is NaN or infinite, so that its keys and values are, and those of all that follow. Where this build and
machine have a GPU the same is tested there: it multiplies rows that a mask hides by 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.candidates import CandidateBlock
from dflash_ggml.decode.forest import Forest
from dflash_ggml.decode.sequence import Sequence
from dflash_ggml.decode.tree import expand
from dflash_ggml.engine.accept import Acceptance
from dflash_ggml.engine.slot import Slot
from dflash_ggml.engine.step import Step
from dflash_ggml.errors import DeviceError, NonFiniteError
from dflash_ggml.ggml.device import F16, F32, list_devices
from reference import kv_toys, toys
from reference.engine_kit import Solo, generate, sampler

BAD = 61  # <|im_start|>, which the toys never write
TYPES = ("type_k", "type_v", "draft_type_k", "draft_type_v")
IDS = np.random.default_rng(3).integers(0, 50, 300).tolist()
DEVICES = ["cpu", *(["gpu"] if any(d.is_gpu for d in list_devices()) else [])]
HOW: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.8, "seed": 3},
    "reduced": {"temperature": 0.8, "seed": 3},
    "whole rows": {"keep_logits": True},
}


def overflowing(path: Path, name: str, value: float, row: int | None = BAD) -> None:
    """Let a tensor of a file, or one row of it, hold `value`."""
    reader = GGUFReader(path, "r+")
    data = next(t for t in reader.tensors if t.name == name).data
    data[slice(None) if row is None else row] = value
    reader.data.flush()


@pytest.fixture(scope="module", params=[("qwen35", np.inf), ("laguna", np.nan)], ids=str)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One with recurrent layers, whose draft has a ring; and one with rings of its own."""
    arch, value = request.param
    folder = tmp_path_factory.mktemp("overflowing")
    if arch == "laguna":
        sizes: dict[str, Any] = {"n_layers": 3, "period": 3, "window": 12, "n_rot": 16, "yarn": 8.0}
        sizes |= {"head_dim": 128, "sharp": 3.0, "mix": 0.3}  # milder: no text of it hangs on rounding
        files = kv_toys.write_pair(folder, 41, {"head_dim": 128, "own_tables": True}, arch=arch, **sizes)
    else:
        files = toys.write_pair(
            folder, 5, window=100, full_layers=1, head_dim=128, n_ctx=4096, own_tables=True
        )
    overflowing(files[0], "token_embd.weight", value)
    return files


@pytest.fixture(scope="module", params=DEVICES)
def engine(request: pytest.FixtureRequest, pair: tuple[Path, Path]) -> Any:
    with load(pair, request.param) as found:
        yield found


@pytest.fixture(autouse=True)
def left_in_order(request: pytest.FixtureRequest) -> Any:
    """Slots are closed after a test, whatever came of it."""
    yield
    if "engine" in request.fixturenames:
        for slot in request.getfixturevalue("engine").slots:
            slot.close()


def load(pair: tuple[Path, Path], device: str = "cpu", **options: Any) -> Solo:
    base: dict[str, Any] = {"n_ctx": 2048, "n_batch": 64, "n_threads": 1, "calibrate": "never", "parallel": 3}
    base |= {"mode": "tree", "spec": ("dflash",), "n_gpu_layers": 0 if device == "cpu" else -1}
    found = Solo.load(EngineConfig(*pair, **base | options))
    assert found.device.is_gpu == (device == "gpu")
    return found


def nonfinite(engine: Solo) -> list[int]:
    """Rows of the caches, and of the draft's rings, in which there is NaN or infinity."""
    caches = [(t, engine.passes.n_rows) for t in (*engine.passes.state.kv.slices, *engine.drafter.rows)]
    caches += [(t, n * engine.parallel) for t, n, *_ in engine.drafter.rings]
    found = set[int]()
    for t, n in caches:
        data = engine.device.read_bytes(t, np.empty(n * t.nb[1], np.uint8)).reshape(n, -1)
        if t.type == F32:
            numbers = data.view(np.float32)
        elif t.type == F16:
            numbers = data.view(np.float16)
        else:  # the scales of Q8_0 blocks
            numbers = (
                data[:, : t.ne[0] // 32 * 34].reshape(n, -1, 34)[:, :, :2].reshape(n, -1).view(np.float16)
            )
        found |= set(np.flatnonzero(~np.isfinite(numbers).all(1)).tolist())
    return sorted(found)


def written(slot: Slot, n: int, **options: Any) -> tuple[list[int], np.ndarray]:
    """The next n tokens, and the logits behind them."""
    how = {"stop": lambda token: False, "max_tokens": n, "keep_logits": True, **options}
    found = list(slot.generate(sampler(slot), **how))
    assert not slot.sequence.undraftable
    return [t for step in found for t in step.tokens], np.stack(
        [row for step in found for row in step.logits]
    )


def begun(slot: Slot, how: dict[str, Any], mode: str, pending: int | None = None) -> Sequence:
    """A run whose first token is `pending`."""
    how = dict(how)
    options = {"keep_logits": how.pop("keep_logits", False), "mode": mode, "stop": lambda token: False}
    run = slot.begin(sampler(slot, **how), max_tokens=60, **options)
    slot.first()
    if pending is not None:
        run.pending = pending
    return run


@pytest.fixture(params=HOW)
def how(request: pytest.FixtureRequest, engine: Solo) -> Any:
    """How tokens are chosen; a device may reduce rows before they are read."""
    before, engine.passes.reduces = engine.passes.reduces, request.param == "reduced"
    yield HOW[request.param]
    engine.passes.reduces = before


def in_all_passes(mine: Slot) -> list[Any]:
    """Tokens and logits of a sequence in passes of all kinds, and its state at the end."""
    found: list[Any] = []
    for mode in ("plain", "tree"):
        found += written(mine, 12, mode=mode)
        for n in (3, 40, 100):
            mine.prefill(IDS[200 : 200 + n])
            found.append(mine.logits)
    found += [a.copy() for a in mine.snapshot().live]
    return found


def beside(engine: Solo, contaminate: Callable[[Slot], None], state_index: int) -> list[Any]:
    """Output of a sequence with this state index: alone, after a step of both, and after the other's end; `contaminate` is
    called for the other, whose slot stays open meanwhile."""
    for slot in engine.slots:
        slot.close()
    slots = [engine.open(300), engine.open(300)]
    mine, other = slots[state_index], slots[1 - state_index]
    mine.prefill(IDS[:70])
    other.prefill(IDS[100:170])
    contaminate(other)
    assert not nonfinite(engine)
    found = in_all_passes(mine)
    other.close()
    found += written(mine, 5)
    mine.close()
    return found


def same(found: list[Any], expected: list[Any]) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def keeps_none(slot: Slot, begin: int) -> None:
    """A sequence with a non-finite part is not usable; its earlier prefix can be restored."""
    engine = slot.engine
    if slot.n_tokens > begin:
        with pytest.raises(DeviceError, match="reset"):
            slot.snapshot()
    else:
        slot.snapshot()
    slot.reset()
    assert not nonfinite(engine)
    slot.prefill(IDS[100:110])
    generate(slot, max_tokens=4)


@pytest.mark.parametrize(("state_index", "rows"), [(0, "every"), (1, "last")])
def test_prompts(engine: Solo, state_index: int, rows: str) -> None:
    """Of one batch or in the first of two; what was there before continues."""

    def contaminate(slot: Slot) -> None:
        kept = slot.snapshot(with_rows=False)
        output_then = generate(slot, max_tokens=6)
        slot.restore(kept)
        taken: list[np.ndarray] = []
        for prompt in ([BAD], [*IDS[:70], BAD, *IDS[:70]]):
            with pytest.raises(NonFiniteError, match="NaN"):
                slot.prefill(prompt, take_row=taken.append if rows == "every" else None)
            assert not nonfinite(engine)
            with pytest.raises(DeviceError, match="reset"):
                slot.prefill([1])
            slot.restore(kept)
            assert generate(slot, max_tokens=6) == output_then
            slot.restore(kept)
        with pytest.raises(NonFiniteError):
            slot.prefill([BAD])

    same(beside(engine, contaminate, state_index), beside(engine, lambda _: None, state_index))


@pytest.mark.parametrize(("state_index", "mode"), [(0, "plain"), (0, "tree"), (1, "tree")])
def test_steps_of_one(engine: Solo, state_index: int, mode: str, how: dict[str, Any]) -> None:
    def contaminate(slot: Slot) -> None:
        begin = slot.n_tokens
        run = begun(slot, how, mode, BAD)
        (step,) = engine.step([run])
        assert isinstance(step, NonFiniteError), step
        assert not nonfinite(engine)
        keeps_none(slot, begin)

    same(beside(engine, contaminate, state_index), beside(engine, lambda _: None, state_index))


@pytest.mark.parametrize("mode", ["plain", "tree"])
def test_steps_of_several(engine: Solo, mode: str, how: dict[str, Any]) -> None:
    """The sequences beside it continue as if it had been another token."""
    found = []
    for pending in (58, BAD):
        slots = [engine.open(300) for _ in range(3)]
        for i, slot in enumerate(slots):
            slot.prefill(IDS[10 * i : 10 * i + 50])
        runs = [
            begun(slot, how if i == 1 else {"keep_logits": True}, "tree" if i else mode)
            for i, slot in enumerate(slots)
        ]
        runs[1].pending = pending
        others, rows = [runs[0], runs[2]], [list[np.ndarray](), list[np.ndarray]()]
        for _ in range(3):
            steps = engine.step(runs)
            assert not nonfinite(engine)
            if len(runs) == 3:
                assert isinstance(steps[1], NonFiniteError) == (pending == BAD), steps[1]
                del runs[1], steps[1]
            for i, step in enumerate(steps):
                rows[i] += step.logits
        found.append([(run.history[50:], behind) for run, behind in zip(others, rows)])
        for slot in slots:
            slot.close()
    for (tokens, behind), (expected, rows_then) in zip(*found, strict=True):
        n = min(len(tokens), len(expected))
        assert n > 3 and tokens[:n] == expected[:n]
        n = min(len(behind), len(rows_then))
        np.testing.assert_allclose(behind[:n], rows_then[:n], atol=0.02 if engine.device.is_gpu else 1e-4)


@pytest.mark.parametrize("several", [False, True])
def test_nodes_that_are_not_kept(engine: Solo, monkeypatch, how: dict[str, Any], several: bool) -> None:
    """A draft proposes the token, beside one that is accepted: the output is unchanged."""
    slots = [engine.open(300), engine.open(300)]
    found: list[list[int]] = []
    behind: list[list[np.ndarray]] = []
    for patched in (False, True):
        for i, slot in enumerate(slots):
            slot.reset()
            slot.prefill(IDS[: 50 + i])
        runs = [begun(slot, how, "tree" if patched else "plain") for slot in slots]
        runs = runs if several else runs[:1]
        if patched:
            offer(
                engine,
                {run.state_index: run.history + tokens for run, tokens in zip(runs, found)},
                monkeypatch,
            )
        rows: list[list[np.ndarray]] = [[] for _ in runs]
        while any(run.finish is None for run in runs):
            going = [run for run in runs if run.finish is None]
            for run, step in zip(going, engine.step(going), strict=True):
                assert not isinstance(step, Exception), step
                rows[runs.index(run)] += step.logits or ()
                if len(run.history) > 90:
                    run.finish = "length"
            assert not nonfinite(engine), [r.sequence.tokens for r in runs]
        outputs = [run.history[50 + i + 1 :][:38] for i, run in enumerate(runs)]
        # a GPU's passes of other widths round differently, which may change a draw
        if patched and not (engine.device.is_gpu and "seed" in how):
            assert outputs == found
        if patched:
            for slot in slots:
                slot.snapshot()
            for ours, expected in zip(rows, behind, strict=True):
                n = min(len(ours), len(expected))
                assert n > 30 or not ours
                np.testing.assert_allclose(ours[:n], expected[:n], atol=0.3 if engine.device.is_gpu else 0.05)
        found, behind = outputs, rows


def test_a_nonfinite_node_is_not_accepted(engine: Solo, monkeypatch) -> None:
    """Also one whose token is chosen: the sequence continues from that token."""
    slot = engine.open(300)
    slot.prefill(IDS[:50])
    run = begun(slot, {}, "tree")
    tree = expand(run.pending, CandidateBlock([[7, 8]], [[-0.5, -1.5]]), 2)
    monkeypatch.setattr(engine.passes, "is_nan", lambda graph, column: column == 1)
    monkeypatch.setattr(engine.passes, "choices", lambda graph: np.array([7, 0, 9], np.int32))
    accepted, _ = Acceptance(engine.passes, None, Forest([run], [tree]), [None]).walk(0)
    assert (accepted.path, accepted.tokens) == ((0,), (7,))
    assert run.nonfinite_from == 51
    slot.kv.clear_nonfinite()


def offer(engine: Solo, outputs: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the draft of each state index offer what comes next, and, at every depth and first, the token that overflows."""

    def propose(sequences: Any, budget: int, depth: int | None = None) -> list[CandidateBlock]:
        engine.drafter.take_in([s for s in sequences if s.unseen])
        return [one(sequence) for sequence in sequences]

    def one(sequence: Any) -> CandidateBlock:
        at = sequence.n_tokens + 1
        right = np.array((outputs[sequence.state_index][at : at + 3] + [1] * 3)[:3])
        ids = np.stack([np.full(3, BAD), right], axis=1).astype(np.int32)
        return CandidateBlock(ids, np.tile(np.float32([-0.2, -1.7]), (3, 1)))

    monkeypatch.setattr(engine.drafter, "propose", propose)


def test_hidden_states(engine: Solo) -> None:
    """The held sequence continues."""
    slot = engine.open(300)
    slot.prefill(IDS[:40])
    kept = slot.snapshot(with_rows=False)
    expected = written(slot, 8, mode="tree")
    slot.restore(kept)
    for ids in ([BAD], [*IDS[:100], BAD, 3, *IDS[:100]]):
        with pytest.raises(NonFiniteError, match="NaN"):
            slot.hidden_states(ids, lambda rows: None)
        assert not nonfinite(engine)
    slot.restore(kept)
    same([*written(slot, 8, mode="tree")], [*expected])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("types", [("f32", "f32"), ("q8_0", "q8_0")], ids="/".join)
def test_other_caches(pair: tuple[Path, Path], device: str, types: tuple[str, str]) -> None:
    with load(pair, device, type_k=types[0], type_v=types[1]) as engine:

        def contaminate(slot: Slot) -> None:
            (step,) = engine.step([begun(slot, {}, "tree", BAD)])
            assert isinstance(step, NonFiniteError)

        same(beside(engine, contaminate, 0), beside(engine, lambda _: None, 0))


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("device", DEVICES)
def test_a_nonfinite_draft_leaves_no_nan(tmp_path: Path, device: str, window: int) -> None:
    rings = {"window": window, "full_layers": 1} if window else {}
    files = toys.write_pair(tmp_path, 5, head_dim=128, n_ctx=4096, **rings)
    overflowing(files[1], "blk.0.attn_v.weight", np.nan, None)
    with load(files, device) as engine:
        slots = [engine.open(300), engine.open(300)]
        for slot in slots:
            slot.prefill(IDS[:50])
        assert nonfinite(engine)
        for slot in slots:
            generate(slot, max_tokens=4)
            assert slot.sequence.undraftable
        assert not nonfinite(engine)


@pytest.mark.parametrize("several", [False, True])
def test_a_nonfinite_draft_without_context_leaves_no_nan(tmp_path: Path, several: bool) -> None:
    """Restores a sequence that was decoded without it: only the rows of its block are non-finite."""
    files = toys.write_pair(tmp_path, 5, head_dim=128, n_ctx=4096, window=100, full_layers=1)
    overflowing(files[1], "blk.0.attn_v.weight", np.nan, None)
    with load(files) as engine:
        slots = [engine.open(300), engine.open(300)]
        for slot in slots:
            slot.prefill(IDS[:50])
            generate(slot, max_tokens=4)
            kept = slot.snapshot()
            assert not kept.in_draft.any()
            slot.reset()
            slot.restore(replace(kept, logits=np.ones(slot.n_vocab, np.float32)))
            assert not slot.sequence.undraftable
        runs = [begun(slot, {}, "tree") for slot in slots[: 1 + several]]
        assert all(isinstance(step, Step) for step in engine.step(runs))
        assert runs[0].undraftable and not nonfinite(engine)


@pytest.mark.parametrize("state_index", [0, 1])
@pytest.mark.parametrize("n", [50, 700], ids=["", "the ring has gone round"])
def test_stale_draft_rows_behind_a_continuing_sequence(
    tmp_path: Path, monkeypatch, n: int, state_index: int
) -> None:
    """Nodes that are not kept overflow, and so does the block that they were drafted in: no snapshot has it, nor the caches."""
    files = toys.write_pair(tmp_path, 5, window=100, full_layers=1, head_dim=128, n_ctx=4096, own_tables=True)
    overflowing(files[0], "token_embd.weight", np.inf)
    with load(files, **dict.fromkeys(TYPES, "f16")) as engine:
        slot = [engine.open(900), engine.open(900)][state_index]
        ids = (IDS * 3)[:n]
        slot.prefill(ids)
        expected = generate(slot, max_tokens=8)
        slot.reset()
        slot.prefill(ids)
        run = begun(slot, {}, "tree")
        offer(engine, {state_index: ids + expected}, monkeypatch)
        propose = engine.drafter.propose

        def with_nans(sequences: Any, *args: Any) -> list[CandidateBlock]:
            """As the real one, whose block lies behind the sequence."""
            rows, drafter = propose(sequences, *args), engine.drafter
            (sequence,) = sequences
            for group in drafter.context.groups:
                at = group.rows(
                    sequence.first_row, state_index, sequence.n_tokens, sequence.n_tokens + drafter.block
                )
                for t in group.cache.slices:
                    for row in at.tolist():
                        engine.device.write(t, np.full(t.nb[1] // 2, np.nan, np.float16), row * t.nb[1])
            return rows

        monkeypatch.setattr(engine.drafter, "propose", with_nans)
        (step,) = engine.step([run])
        assert isinstance(step, Step) and step.n_draft and not slot.sequence.inconsistent
        assert not nonfinite(engine)
        monkeypatch.undo()
        while run.finish is None and len(run.history) < n + 8:
            assert isinstance(engine.step([run])[0], Step)
        assert run.history[n : n + 8] == expected
        for part in slot.snapshot().rings:
            assert np.isfinite(part.view(np.float16)).all()


@pytest.mark.parametrize("device", DEVICES)
def test_rings_of_a_draft(tmp_path: Path, device: str) -> None:
    """A prompt that overflows in the embedding the draft reads too, and a step."""
    files = toys.write_pair(tmp_path, 5, window=100, full_layers=1, head_dim=128, n_ctx=4096, own_tables=True)
    overflowing(files[0], "token_embd.weight", np.inf)
    with load(files, device) as engine:
        slot = [engine.open(300), engine.open(300)][1]
        assert engine.drafter.rings
        with pytest.raises(NonFiniteError):
            slot.prefill([*IDS[100:150], BAD, *IDS[150:170]])
        assert not nonfinite(engine)


@pytest.mark.parametrize(
    ("kv", "value", "state_index"), [("f32", np.nan, 0), ("f16", np.inf, 1), ("q8_0", np.nan, 1)]
)
def test_rows_that_are_only_held_on_a_cpu(
    pair: tuple[Path, Path], kv: Any, value: float, state_index: int
) -> None:
    """A CPU reads no tile that is masked entirely: there the values do not matter."""
    with load(pair, type_k=kv, type_v=kv) as engine:

        def beside_one(value: float | None) -> list[Any]:
            slots = [engine.open(300), engine.open(300)]
            mine, other = slots[state_index], slots[1 - state_index]
            mine.prefill(IDS[:70])
            other.prefill(IDS[100:170])
            if value is not None:
                hold(other, value)
            found = in_all_passes(mine)
            for slot in slots:
                slot.close()
            return found

        same(beside_one(value), beside_one(None))


@pytest.mark.parametrize("n_keys", [1, 8])
def test_keys_that_overflow_in_unread_rows_on_a_cpu(pair: tuple[Path, Path], n_keys: int) -> None:
    """Their sequence continues with finite logits, or ends with the error; those beside it are not affected."""
    with load(pair, type_k="f16", type_v="f16", mode="plain") as engine:

        def beside_one(number: int, value: float | None) -> np.ndarray:
            """The logits of a sequence beside one with `value` at this element of its keys."""
            slots, rows = [engine.open(300), engine.open(300)], list[np.ndarray]()
            for i, slot in enumerate(slots):
                slot.prefill(IDS[100 * i : 100 * i + 70])
            if value is not None:
                overflow(slots[1], range(30, 30 + n_keys), number, value)
            runs = [begun(slot, {"keep_logits": True}, "plain") for slot in slots]
            for i in range(8):
                if i == 6:
                    slots[1].sequence.pending = BAD
                mine, *other = engine.step(runs)
                rows += mine.logits
                if other and isinstance(other[0], Step):
                    assert i < 6 and np.isfinite(other[0].logits).all()
                elif other:
                    assert isinstance(other[0], NonFiniteError) and (i == 6 or value is not None)
                    del runs[1]
                    slots[1].reset()
                    assert not nonfinite(engine)
            for slot in slots:
                slot.close()
            return np.stack(rows)

        expected = beside_one(0, None)
        for number in (0, 9, 31):
            for value in (np.inf, -np.inf):
                np.testing.assert_allclose(beside_one(number, value), expected, atol=2e-3)


def overflow(slot: Slot, tokens: range, number: int, value: float) -> None:
    """Let a number of these tokens' keys, which are float16, be `value`."""
    keys = slot.engine.passes.state.kv.slices[0]
    for at in tokens:
        offset = (slot.sequence.first_row + at) * keys.nb[1] + 2 * number
        slot.engine.device.write(keys, np.array([value], np.float16), offset)
    assert len(nonfinite(slot.engine)) == len(tokens)


@pytest.mark.parametrize("ends", ["reset", "restore"])
def test_unnoticed_nonfinite_keys_are_cleared_with_their_sequence(pair: tuple[Path, Path], ends: str) -> None:
    """However long before they were written: once it has ended with the error and is forgotten nothing of it is left."""
    with load(pair, type_k="f16", type_v="f16", mode="plain") as engine:
        slot = [engine.open(300), engine.open(300)][1]
        slot.prefill(IDS[:10])
        kept = slot.snapshot()
        slot.prefill(IDS[:60])
        overflow(slot, range(30, 31), 9, np.inf)
        (step,) = engine.step([begun(slot, {}, "plain", BAD)])
        assert isinstance(step, NonFiniteError) and slot.sequence.inconsistent
        slot.reset() if ends == "reset" else slot.restore(kept)
        assert not nonfinite(engine)


def hold(slot: Slot, value: float) -> None:
    """Set all rows, rings, recurrent states and pending features of a sequence to `value`, or scales of it."""
    engine, tensors, state = slot.engine, slot.kv.tensors(), slot.engine.passes.state
    parts = [
        (t, slot.sequence.first_row * t.nb[1], (slot.n_tokens + engine.over) * t.nb[1])
        for t in tensors.caches
    ]
    parts += [(t, slot.state_index * n * t.nb[1], n * t.nb[1]) for t, n, _ in tensors.rings]
    parts += [(t, 0, int(np.prod(list(t.ne))) * 4) for part in tensors.live for t in part]
    if state.features.tensor is not None:
        parts += [(state.features.tensor, 0, state.features.nbytes)]
    for t, offset, size in parts:
        number = np.array(value, np.float32 if t.type == F32 else np.float16).tobytes()
        engine.device.write(t, np.frombuffer(number * (size // len(number)), np.uint8), offset)
