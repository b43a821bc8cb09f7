"""Tests of the default number of slots: as many as leave a single sequence its full context."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.engine import memory_planner
from dflash_ggml.engine.memory_planner import MemoryNeeds, Opened, default_slots, memory_needs
from dflash_ggml.files.gguf import GGUFFile
from dflash_ggml.files.pairs import EMBEDDED_CONTEXT
from dflash_ggml.ggml.device import Device
from dflash_ggml.models.registry import read_target
from dflash_ggml.state.memory import MARGIN
from reference.engine_kit import Solo
from reference.toys import write_pair

GPU, CPU = (SimpleNamespace(is_gpu=is_gpu, host=None) for is_gpu in (True, False))
GPU.sides, CPU.sides = [GPU], [CPU]


@pytest.fixture(scope="module")
def wanted(demo_target: Path) -> Iterator[MemoryNeeds]:
    file, device = GGUFFile(demo_target), Device.cpu(1)
    found = memory_needs(Opened(device, EngineConfig(demo_target), file, read_target(file)))
    yield found
    found.weights.close()
    device.close()


def n_slots(
    monkeypatch: pytest.MonkeyPatch, device: Any, wanted: MemoryNeeds, free: int, n_ctx: int = 0
) -> int:
    monkeypatch.setattr(memory_planner, "memory_free", lambda device, limit: free)
    return default_slots(device, EngineConfig(Path("model.gguf"), n_ctx=n_ctx, parallel=0), wanted)


def needed(wanted: MemoryNeeds, n_states: int, n_ctx: int) -> int:
    """Bytes with which that many sequences fit."""
    _, _, found = wanted.for_sequences(n_states).plan(n_ctx, 1 << 40, False)
    return found.total + MARGIN


def test_with_memory_enough(monkeypatch: pytest.MonkeyPatch, wanted: MemoryNeeds) -> None:
    assert n_slots(monkeypatch, GPU, wanted, 80 << 30) == 8
    assert n_slots(monkeypatch, CPU, wanted, 80 << 30) == 4
    monkeypatch.setattr(memory_planner, "SMALL", 1 << 20)
    assert n_slots(monkeypatch, CPU, wanted, 80 << 30) == 2


@pytest.mark.parametrize("options", [{"fa_window": 512}, {"reproducible": True}])
def test_one_where_several_would_differ(wanted: MemoryNeeds, options: dict[str, Any]) -> None:
    device: Any = GPU
    assert default_slots(device, EngineConfig(Path("model.gguf"), parallel=0, **options), wanted) == 1


@pytest.mark.parametrize("n_ctx", [0, 2048])
def test_a_context_stays_as_long(monkeypatch: pytest.MonkeyPatch, wanted: MemoryNeeds, n_ctx: int) -> None:
    """That which was asked for, and the whole one of the model."""
    length = n_ctx or wanted.longest
    for n_states, fewer in ((8, 4), (4, 2), (2, 1)):
        enough = needed(wanted, n_states, length)
        assert n_slots(monkeypatch, GPU, wanted, enough, n_ctx) == n_states
        assert n_slots(monkeypatch, GPU, wanted, enough - 1, n_ctx) == fewer
    assert n_slots(monkeypatch, GPU, wanted, needed(wanted, 1, length) - 1, length) == 1


def test_a_context_that_is_cut_short_loses_little(
    monkeypatch: pytest.MonkeyPatch, wanted: MemoryNeeds
) -> None:
    long = replace(wanted, longest=1 << 20)
    free = needed(wanted, 1, 1 << 16)
    chosen = n_slots(monkeypatch, GPU, long, free)
    _, _, alone = long.plan(0, free, True)
    _, _, beside = long.for_sequences(chosen).plan(0, free, True)
    assert chosen > 1 and alone.n_ctx * 15 / 16 <= beside.n_ctx < alone.n_ctx


def test_an_engine_has_as_many(demo_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"n_ctx": 512, "n_gpu_layers": 0, "n_threads": 1, "calibrate": "never"}
    monkeypatch.setattr(memory_planner, "free_memory", lambda: 8 << 30)
    with Solo.load(EngineConfig(demo_target, parallel=0, **options)) as engine:
        assert engine.parallel == 4 and engine.n_ctx == 512
        pairs = [(engine.open(64), i) for i in range(4)]
        assert [slot.state_index for slot, _ in pairs] == [0, 1, 2, 3]


def test_the_embedded_pair_takes_an_agents_prompt(
    monkeypatch: pytest.MonkeyPatch, wanted: MemoryNeeds
) -> None:
    """Where no length is asked for: more than it was trained for, and less where that does not fit."""
    assert wanted.longest == EMBEDDED_CONTEXT > 24_472 + 8_000
    assert (
        wanted.plan(0, 8 << 30, False)[2].n_ctx == wanted.plan(0, 8 << 30, True)[2].n_ctx == EMBEDDED_CONTEXT
    )
    assert 256 <= wanted.plan(0, needed(wanted, 1, 8192), True)[2].n_ctx <= 8192


def test_other_models_take_what_they_were_trained_for(tmp_path: Path) -> None:
    target, _ = write_pair(tmp_path, 5, n_ctx=512)
    file, device = GGUFFile(target), Device.cpu(1)
    found = memory_needs(Opened(device, EngineConfig(target), file, read_target(file)))
    assert found.longest == 512
    found.weights.close()
    device.close()
