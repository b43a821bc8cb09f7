"""A text that is stepped alone for a while gets the first lane, whose passes are those of one text; nothing of it is another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dflash_ggml.config import EngineConfig
from reference.engine_kit import Solo
from dflash_ggml.engine.slot import Slot
from dflash_ggml.decode.sequence import Sequence
from dflash_ggml.errors import DeviceError
from dflash_ggml.ggml.device import list_devices
from dflash_ggml.state.snapshot import Snapshot
from reference import kv_toys, toys
from reference.engine_kit import sampler, text

IDS = np.random.default_rng(3).integers(0, 60, 400).tolist()
ALONE, N = 4, 60
KINDS: dict[str, dict[str, Any]] = {
    "a ring": {"window": 40, "full_layers": 1, "draft_layers": 2, "n_ctx": 2048},
    "both": {"nextn": True},
    "head": {"nextn": True},
    "rings": {"n_layers": 3, "period": 3, "window": 12, "n_rot": 16, "yarn": 8.0, "head_dim": 128},
}


GPUS = [d for d in list_devices() if d.is_gpu]


@pytest.fixture(
    scope="module", params=[(kind, False) for kind in KINDS] + [(k, True) for k in KINDS if GPUS], ids=str
)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Solo]:
    """On the CPU with kernels whose results do not depend on a pass's width, or on a GPU."""
    folder, (kind, on_gpu) = tmp_path_factory.mktemp("pair"), request.param
    if kind == "rings":
        target, draft = kv_toys.write_pair(folder, 41, {"window": 20}, arch="laguna", **KINDS[kind])
    else:
        target, draft = toys.write_pair(folder, 120, **KINDS[kind])
    spec = {"head": ("mtp",), "both": ("dflash", "mtp")}.get(kind, ("dflash",))
    base: dict[str, Any] = {"n_ctx": 2048, "parallel": 3, "n_batch": 64, "n_threads": 1, "mode": "tree"}
    base |= {"calibrate": "never", "spec": spec}
    base |= {} if on_gpu else {"type_k": "f32", "type_v": "f32", "reference": True}
    with Solo.load(EngineConfig(target, None if kind == "head" else draft, **base)) as found:
        assert found.drafter is not None and found.device.is_gpu == on_gpu
        yield found


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch, engine: Solo) -> Iterator[None]:
    """After fewer steps."""
    monkeypatch.setattr("dflash_ggml.engine.engine.ALONE", ALONE)
    engine._alone = 0
    yield
    for place in engine.places:
        place.close()


def begun(place: Slot, ids: list[int], n: int = N) -> Sequence:
    place.prefill(ids)
    run = place.begin(sampler(place), max_tokens=n, stop=lambda token: False)
    place.first()
    return run


def steps(engine: Solo, run: Sequence, n: int | None = None) -> None:
    while run.finish is None and n != 0:
        (step,) = engine.step([run])
        assert not isinstance(step, Exception), step
        n = None if n is None else n - 1


def alone(engine: Solo, ids: list[int], n: int = N) -> list[int]:
    engine.reset()
    engine.prefill(ids)
    return text(engine, max_tokens=n)


@pytest.mark.parametrize("runs", [False, True])
def test_lanes_that_cannot_be_exchanged(engine: Solo, monkeypatch: pytest.MonkeyPatch, runs: bool) -> None:
    """Without memory for its graph the text goes on where it is; where the graph breaks, each place keeps its lane."""

    class Broken:
        def run(self) -> None:
            raise DeviceError("broken")

    def exchanging(*_: Any) -> Broken:
        if runs:
            return Broken()
        raise DeviceError("no scratch memory")

    monkeypatch.setattr(engine.passes, "exchanging", exchanging)
    places = [engine.open(300), engine.open(300)]
    places[0].prefill(IDS[:20])
    run = begun(places[1], IDS[30:60])
    steps(engine, run, ALONE - 1)
    if runs:
        with pytest.raises(DeviceError, match="broken"):
            engine.step([run])
    else:
        steps(engine, run, ALONE + 1)
    assert [place.sequence.torn for place in places] == [runs, runs]
    assert engine.places == places and [place.state_index for place in places] == [0, 1]


def arrays(snapshot: Snapshot) -> list[np.ndarray]:
    return [*snapshot.live, *snapshot.rows, *snapshot.rings, snapshot.in_draft]


@pytest.mark.parametrize("held", [True, False])
def test_texts_are_what_they_are_alone(engine: Solo, held: bool) -> None:
    """The one that moves, and the one whose lane it gets."""
    prompts = [IDS[:90], IDS[100:170]]
    expected = [alone(engine, ids) for ids in prompts]
    places = [engine.open(300) for _ in prompts]
    runs = [begun(place, ids) for place, ids in zip(places, prompts)]
    if not held:
        places[0].close()
    steps(engine, runs[1], ALONE - 1)
    assert places[1].state_index == 1
    steps(engine, runs[1], 1)
    assert places[1].state_index == 0 and engine.places[0] is places[1]
    forests = engine.passes.graphs.kinds["forest"]
    steps(engine, runs[1])
    assert engine.passes.graphs.kinds["forest"] == forests
    assert runs[1].history[len(prompts[1]) :] == expected[1]
    if held:
        assert places[0].state_index == 1
        steps(engine, runs[0])
        assert runs[0].history[len(prompts[0]) :] == expected[0]
    again = engine.open(100)
    again.prefill(IDS[:50])
    found = text(again, max_tokens=10)
    for place in engine.places:
        place.close()
    assert found == alone(engine, IDS[:50], 10)


def test_what_is_kept_goes_along(engine: Solo) -> None:
    """Bit for bit: states, rows, rings, what the draft has seen; and snapshots whose rows lie in the caches."""
    places = [engine.open(300) for _ in range(3)]
    for i, place in enumerate(places):
        place.prefill(IDS[30 * i : 30 * i + 80 + i])
        text(place, max_tokens=5, mode="plain")
    kept = [place.snapshot(with_rows=False) for place in places]
    before = [place.snapshot() for place in places]
    logits = []
    for place, snapshot in zip(places, kept):
        place.prefill([7])
        logits.append(place.logits)
        place.restore(snapshot)
    engine._alone = ALONE - 1
    run = Sequence(places[2].sequence, None, 1, lambda token: False)  # type: ignore[arg-type]
    engine._seat_first([run])
    assert [place.state_index for place in places] == [2, 1, 0]
    for place, snapshot, short, row in zip(places, before, kept, logits):
        for a, b in zip(arrays(place.snapshot()), arrays(snapshot), strict=True):
            np.testing.assert_array_equal(a, b)
        place.restore(short)
        place.prefill([7])
        # elsewhere the batch may take other kernels
        np.testing.assert_allclose(place.logits, row, atol=1e-4 if engine.device.is_gpu else 0)
