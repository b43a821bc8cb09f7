"""Tests of targets whose window layers keep a ring: same output as with all rows kept. 14 seconds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import test_gpu_rings

from dflash_ggml.config import EngineConfig
from dflash_ggml.errors import ConfigError
from dflash_ggml.session.disk_cache import DiskCache, state_identity
from dflash_ggml.state import ring as rings
from dflash_ggml.state import state as states
from dflash_ggml.state.ring import Ring
from reference import kv_toys
from reference.engine_kit import Solo, force_draft, fresh, generate, sampler, steps

SIZES: dict[str, Any] = {"arch": "laguna", "n_layers": 3, "period": 3, "window": 12, "n_rot": 16, "yarn": 8.0}
IDS = np.random.default_rng(8).integers(0, 60, 1400).tolist()


@pytest.fixture(scope="module", params=["laguna", "gemma3"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return kv_toys.write_pair(tmp_path_factory.mktemp("rings"), 41, **SIZES | {"arch": request.param})


def load(pair: tuple[Path, Path], **options: Any) -> Solo:
    base = {"n_ctx": 1500, "n_batch": 40, "type_k": "f32", "type_v": "f32", "reference": True}
    base |= {"n_threads": 1, "budget": 15, "calibrate": "never"}
    return Solo.load(EngineConfig(*pair, **{**base, **options}))


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings without a row to spare."""
    monkeypatch.setattr(states, "ring_rows", lambda window, columns, n_rows: window - 1 + columns)


@pytest.fixture
def whole(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine whose rings never wrap."""
    with monkeypatch.context() as patch:
        patch.setattr(states, "ring_rows", lambda window, columns, n_rows: n_rows)
        engine = load(pair)
    assert engine.passes.state.rings[0].n_rows == engine.passes.n_rows
    with engine:
        yield engine


def walk(engine: Solo, seed: int) -> list[Any]:
    """All output of prompts in pieces, generations of all modes, snapshots, restores, and separate sequences."""
    rng, found, kept = np.random.default_rng(seed), [], []
    engine.reset()
    engine.prefill(IDS[:5])
    for _ in range(45):
        what = rng.random()
        mode = str(rng.choice(["tree", "chain", "plain"]))
        found.append(generate(engine, max_tokens=int(rng.integers(2, 40)), mode=mode))
        usable = [snapshot for snapshot in kept if engine.can_restore(snapshot)]
        if usable and what < 0.3:
            engine.restore(usable[int(rng.integers(len(usable)))])
        elif what < 0.6:
            kept.append(engine.snapshot(with_rows=bool(rng.integers(2))))
        if engine.n_tokens > 1100:
            engine.reset()
        if what > 0.9:
            rows: list[np.ndarray] = []
            engine.hidden_states(IDS[: int(rng.integers(1, 90))], rows.append)
            found.append(np.concatenate(rows))
        engine.prefill(IDS[: int(rng.choice([1, 3, 39, 41, 150]))])
        found.append(engine.logits.copy())
    return found


@pytest.mark.parametrize("seed", [0])
def test_it_writes_what_all_rows_write(pair: tuple[Path, Path], whole: Solo, tight: None, seed: int) -> None:
    with load(pair) as engine:
        assert engine.passes.state.rings[0].n_rows == 11 + 40
        ours = walk(engine, seed)
    for a, b in zip(ours, walk(whole, seed), strict=True):
        if isinstance(a, list):
            assert a == b
        else:
            np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.parametrize("types", [("f32", "f32"), ("f16", "f16"), ("q8_0", "q4_0")], ids="/".join)
def test_paths_through_all_of_a_tree(pair: tuple[Path, Path], tight: None, types: tuple[str, str]) -> None:
    """Accepted rows move within the ring, past many wraps; the widest tree fills it."""
    with load(pair, budget=47, n_batch=8, type_k=types[0], type_v=types[1]) as engine:
        tokens = generate(fresh(engine, IDS[:50]), max_tokens=400, mode="plain")
        force_draft(engine, tokens, 50)
        assert generate(fresh(engine, IDS[:50]), max_tokens=400, mode="tree") == tokens
        assert engine.sequence.statistics.acceptance_length > 3
        assert engine.passes.state.rings[0].n_rows == 11 + engine.passes.max_width
        moved = [key for key, _ in engine.passes.graphs if key[0] == "commit"]
        assert moved


def test_a_snapshot_has_the_rows_that_are_still_seen(pair: tuple[Path, Path], tight: None) -> None:
    with load(pair) as engine:
        short = fresh(engine, IDS[:6]).snapshot(with_rows=False)
        engine.prefill(IDS[6:300])
        bare = engine.snapshot(with_rows=False)
        for snapshot, rows in ((short, 6), (bare, 11)):
            assert [ring.nbytes for ring in snapshot.rings[:4]] == [rows * 64 * 4] * 4
        tokens = generate(engine, max_tokens=60)
        engine.restore(bare)
        assert generate(engine, max_tokens=60, mode="tree") == tokens
        engine.reset()
        engine.prefill(IDS[200:290])
        full = engine.snapshot()
        with pytest.raises(ConfigError, match="gone"):
            engine.restore(bare)
        engine.prefill(IDS[:200])
        engine.restore(full)
        assert generate(engine, max_tokens=20) == generate(fresh(engine, IDS[200:290]), max_tokens=20)


def test_a_file_has_the_ring(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Another process continues from the file, also with other batches and so another ring."""
    outputs = []
    for n_batch in (40, 300):
        with load(pair, n_batch=n_batch) as engine:
            cache = DiskCache(tmp_path, 1 << 30, state_identity(engine))
            snapshot = cache.load(IDS, len(IDS))
            if snapshot is None:
                engine.prefill(IDS[:1100])
                assert cache.put(engine.snapshot())
                cache.close()
            else:
                engine.restore(snapshot)
            assert engine.n_tokens == 1100
            outputs.append(generate(engine, max_tokens=40, mode="tree"))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("n_states", [1, 3])
@pytest.mark.parametrize("n_batch", [40, 300])
def test_the_plan_is_what_is_allocated(pair: tuple[Path, Path], n_batch: int, n_states: int) -> None:
    with load(pair, n_batch=n_batch, parallel=n_states) as engine:
        state = engine.passes.state
        ring = rings.ring_rows(12, max(n_batch, state.max_width), engine.passes.n_rows)
        assert [r.n_rows for r in state.rings] == [ring]
        rows = state.kv.n_rows + 2 * n_states * ring  # a layer that sees everything, and two
        assert engine.nbytes["target K/V"] == engine.memory.parts["target K/V"] == rows * 2 * 64 * 4


@pytest.mark.parametrize("window", [1, 5, 16, 90])
@pytest.mark.parametrize("start", [0, 3, 60, 64, 70, 300])
def test_every_column_sees_each_of_its_rows_once(window: int, start: int) -> None:
    """Of trees, also deeper ones than the window, and of batches."""
    columns, size = 24, window - 1 + 24
    rng = np.random.default_rng(start)
    parents = [-1, *(int(rng.integers(max(0, i - 3), i)) for i in range(1, columns))]
    lines = [[i] for i in range(columns)]
    for i in range(1, columns):
        lines[i] += lines[parents[i]]
    depths = np.array([len(line) - 1 for line in lines], np.int32)
    own = np.array([[j in line for j in range(columns)] for line in lines])
    ring = SimpleNamespace(name="ring0", window=window, n_rows=size)
    ring.rows = lambda *args: Ring.rows(ring, *args)
    n = -(-(window - 1 + rings.TILE - 1 + columns) // 256) * 256
    rows, mask = np.zeros(columns + n, np.int32), np.zeros((columns, n), np.float16)
    graph = SimpleNamespace(
        inputs={"ring0 rows": SimpleNamespace(array=rows), "ring0 mask": SimpleNamespace(array=mask)}
    )
    Ring.fill_trees(ring, graph, columns, [rings.TreeColumns(2, start, depths, own)])
    assert rows[:columns].tolist() == [2 * size + (start + i) % size for i in range(columns)]
    for i, line in enumerate(lines):
        first = start + int(depths[i]) - window + 1
        seen = [2 * size + p % size for p in range(max(first, 0), start)]
        seen += [2 * size + (start + j) % size for j in line if start + int(depths[j]) >= first]
        assert sorted(rows[columns:][mask[i] == 0]) == sorted(seen)
    rows = np.zeros(columns + n + 2 * columns, np.int32)
    graph.inputs["ring0 rows"].array = rows
    Ring.fill(ring, graph, 0, start, columns)
    for i, (low, high) in enumerate(zip(*rows[-2 * columns :].reshape(2, columns))):
        seen = [p % size for p in range(max(start + i - window + 1, 0), start + i + 1)]
        assert rows[columns:][low:high].tolist() == seen


def test_batched_sequences_have_a_ring_each(pair: tuple[Path, Path], tight: None) -> None:
    with load(pair, parallel=3, n_ctx=3000) as engine:
        alone = [generate(fresh(engine, IDS[at : at + 90]), max_tokens=120) for at in (0, 300, 600)]
        slots = [engine.open() for _ in range(3)]
        for at, slot in zip((0, 300, 600), slots):
            slot.prefill(IDS[at : at + 90])
        running = [
            steps(slot, max_tokens=120, mode=mode) for slot, mode in zip(slots, ("plain", "tree", "chain"))
        ]
        outputs: list[list[int]] = [[], [], []]
        going = True
        while going:
            going = False
            for i, run in enumerate(running):
                if step := next(run, None):
                    going = True
                    outputs[i] += step.tokens
        assert outputs == alone
        left = slots[1].snapshot(with_rows=True)
        slots[2].close()
        slots[0].prefill(IDS[:200])
        again = engine.open()
        again.restore(left)
        again.prefill([3])
        slots[1].prefill([3])
        assert generate(again, max_tokens=40, mode="tree") == generate(slots[1], max_tokens=40)


def test_one_pass_for_several_sequences(pair: tuple[Path, Path], tight: None) -> None:
    """Trees of three sequences in one pass, past many wraps of their rings."""
    with load(pair, parallel=3, n_ctx=3000, n_batch=8) as engine:
        alone = [generate(fresh(engine, IDS[at : at + 90]), max_tokens=150) for at in (0, 300, 600)]
        runs, passes = [], engine.passes
        for at, mode in zip((0, 300, 600), ("tree", "plain", "chain")):
            slot = engine.open()
            slot.prefill(IDS[at : at + 90])
            runs.append(slot.begin(sampler(engine), max_tokens=150, mode=mode, stop=lambda token: False))
            slot.first()
        while going := [run for run in runs if run.finish is None]:
            for step in engine.step(going):
                assert not isinstance(step, Exception)
        assert [run.history[90:] for run in runs] == alone
        assert any(key[0] == "forest" for key, _ in passes.graphs)
        rows = [ring.cache.wholes[0].ne[1] for ring in passes.state.rings]
        assert rows == [3 * (11 + passes.state.max_width)]


def test_the_toy_of_gpus_shows_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding moves its logits by much less than the tolerance of test_gpu_rings.py, a fault by much more."""
    sizes, ids = test_gpu_rings.SIZES, test_gpu_rings.IDS[:500]

    def rows(window: int, cache: str = "f32") -> np.ndarray:
        folder = tmp_path / str(window)
        folder.mkdir(exist_ok=True)
        target = kv_toys.write_target(
            folder, 61, kv_toys.GGMLQuantizationType.F16, **sizes | {"window": window}
        )
        found: list[np.ndarray] = []
        with load((target,), draft=None, n_batch=256, type_k=cache, type_v=cache, reference=False) as engine:
            engine.prefill(ids, take_row=found.append)
        return np.stack(found)

    fill = Ring.fill

    def swapped(ring: Ring, graph: Any, state_index: int, start: int, n: int, *tree: Any) -> None:
        fill(ring, graph, state_index, start, n, *tree)
        near = graph.inputs[f"{ring.name} rows"].array[n : -2 * n]
        near[near == 77] = 78

    right = rows(100)
    off = {"rounding": rows(100, "f16") - right, "window": rows(101) - right}
    monkeypatch.setattr(Ring, "fill", swapped)
    off["row"] = rows(100) - right
    moved = {name: np.abs(x).max() / test_gpu_rings.TOLERANCE["F16"] for name, x in off.items()}
    assert moved["rounding"] < 0.25 and moved["window"] > 8 and moved["row"] > 8, moved
