"""Tests of an embedding that stays in host memory: only where nothing else makes a plan fit, never one that is multiplied too,
and the same tokens. A CPU stands in for the GPU that reads it there. 5 seconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from dflash_ggml.config import EngineConfig
from dflash_ggml.engine import cpu_offload, memory_planner
from dflash_ggml.engine.cpu_offload import embeddings
from dflash_ggml.engine.kv_types import KvTypes
from dflash_ggml.engine.memory_planner import Opened, fitting_needs, memory_needs
from dflash_ggml.errors import DeviceError
from dflash_ggml.files.gguf import GGUFFile
from dflash_ggml.ggml.device import Device
from dflash_ggml.models.registry import read_target
from dflash_ggml.state.kv_type import KvType
from dflash_ggml.state.memory import GRAPHS, MARGIN, SCRATCH
from reference.engine_kit import EXACT, Solo, fresh, generate
from reference.kv_toys import VARIANTS, write_target
from reference.toys import write_pair

EMBEDDING = "token_embd.weight"


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> EngineConfig:
    return EngineConfig(
        *write_pair(tmp_path_factory.mktemp("embedding"), 7),
        n_ctx=256,
        n_batch=16,
        parallel=1,
        draft_type="q8_0",
        **EXACT,
    )


@pytest.fixture
def reads(monkeypatch) -> None:
    """The CPU counts as a device with memory of its own, whose kernels read the host's."""
    monkeypatch.setattr(memory_planner, "has_own_memory", lambda device: True)
    monkeypatch.setattr(cpu_offload, "kernels_read_host", lambda name: True)


@pytest.fixture
def opened(config) -> Iterator[Opened]:
    with closing(Device.cpu(1, reference=True)) as device, GGUFFile(config.model) as file:
        yield Opened(device, replace(config, draft=None), file, read_target(file))


def needed(config: EngineConfig, names: Iterable[str]) -> int:
    """Device memory of a target alone with these tensors in the host's."""
    with closing(Device.cpu(1, reference=True)) as device, GGUFFile(config.model) as file:
        found = memory_needs(Opened(device, config, file, read_target(file)), read_there=names)
        with closing(found.weights):
            return found.usual().total + MARGIN


def limit(monkeypatch, room: int) -> None:
    monkeypatch.setattr(memory_planner, "memory_free", lambda device, limit: room)


@pytest.fixture
def with_draft_short(monkeypatch, config) -> int:
    """The bytes of the embedding, which a plan with the draft lacks."""
    with Solo.load(config) as engine:
        total = engine.memory.total + MARGIN
    with GGUFFile(config.model) as file:
        size = file.tensors[EMBEDDING].nbytes
    limit(monkeypatch, total - size)
    return size


def test_the_same_tokens_in_less_memory(reads, with_draft_short, config, monkeypatch, caplog) -> None:
    """The draft reads the same rows."""
    with Solo.load(config) as engine:
        assert engine.memory.read_there == with_draft_short
        assert engine.passes.weights.read_there == {EMBEDDING: with_draft_short}
        assert f"embedding on the host, {with_draft_short / 2**20:.0f} MiB" in str(engine.memory)
        assert caplog.text.count(f"its embedding ({EMBEDDING}, ") == 1
        parts, allocated = dict(engine.memory.parts), engine.nbytes
        del parts[GRAPHS], allocated[SCRATCH]
        assert allocated == parts
        found = {mode: generate(fresh(engine), max_tokens=60, mode=mode) for mode in ("plain", "tree")}
    limit(monkeypatch, 1 << 40)
    with Solo.load(config) as engine:
        assert engine.memory.read_there == 0 and "on the host" not in str(engine.memory)
        for mode, tokens in found.items():
            assert generate(fresh(engine), max_tokens=60, mode=mode) == tokens


@pytest.mark.parametrize("missing", [0, 1])
def test_only_where_the_plan_does_not_fit(reads, opened, monkeypatch, missing) -> None:
    limit(monkeypatch, needed(opened.config, ()) - missing)
    found = fitting_needs(opened)
    with closing(found.weights):
        assert list(found.weights.read_there) == [EMBEDDING] * missing
        assert len(found.notes) == missing and found.fits


def test_smaller_caches_come_first(reads, opened, monkeypatch) -> None:
    def kinds(*args: object) -> list[KvTypes]:
        return [KvTypes(*[KvType.named(t, t)] * 3) for t in ("f32", "f16")]

    monkeypatch.setattr(memory_planner, "kv_types", kinds)
    limit(monkeypatch, needed(opened.config, ()) - 1)
    found = fitting_needs(opened)
    with closing(found.weights):
        assert not found.usual().fits and found.fits and not found.weights.read_there


def test_what_does_not_fit_without_it_either_is_refused_as_before(reads, opened, monkeypatch) -> None:
    limit(monkeypatch, needed(opened.config, [EMBEDDING]) - 1)
    with pytest.raises(DeviceError, match="not enough device memory") as error:
        Solo.load(opened.config)
    assert "embedding" not in str(error.value)


def test_which_are_read_on_the_host(reads, opened, monkeypatch) -> None:
    device, target = opened.device, opened.target
    names = target.tensors()
    assert embeddings(device, target, names) == [EMBEDDING]
    assert embeddings(device, replace(target, tied_head=True), names) == []
    monkeypatch.setattr(cpu_offload, "kernels_read_host", lambda name: False)
    assert embeddings(device, target, names) == []
    monkeypatch.setattr(cpu_offload, "kernels_read_host", lambda name: True)
    device.join(Device.cpu(1))
    assert embeddings(device, target, names) == [], "several devices share layers where memory is short"


def test_a_tied_embedding_stays(reads, tmp_path, monkeypatch) -> None:
    path: Path = write_target(tmp_path, 46, GGMLQuantizationType.Q8_0, **VARIANTS[46])
    config = EngineConfig(path, n_ctx=256, n_batch=16, n_threads=1, n_gpu_layers=0, calibrate="never")
    limit(monkeypatch, needed(config, ()) - 1)
    with pytest.raises(DeviceError, match="not enough device memory"):
        Solo.load(config)
