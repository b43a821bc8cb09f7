"""Tests of a target whose experts stay in host memory: all paths are bitwise those of the undivided one. Both sides are CPUs. 10
seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_ggml.config import ALL_LAYERS, EngineConfig
from dflash_ggml.engine import cpu_offload, known_costs, loading, memory_planner
from dflash_ggml.engine.batches import SLOWEST, BatchSizes
from dflash_ggml.engine.memory_planner import Opened, fitting_needs, memory_needs
from dflash_ggml.errors import DeviceError
from dflash_ggml.files.gguf import GGUFFile
from dflash_ggml.ggml.device import Device
from dflash_ggml.models import experts
from dflash_ggml.models.registry import read_target
from dflash_ggml.state.memory import COPIED_EXPERTS, GRAPHS, MARGIN, SCRATCH
from reference.engine_kit import EXACT, Solo, fresh, generate, steps
from reference.toys import MOE_VARIANTS, write_pair

SIZES = MOE_VARIANTS[21]
N_LAYERS, LONG = 4, [i % 50 for i in range(45)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("kept"), 21, **SIZES)


@pytest.fixture
def config(pair) -> EngineConfig:
    return EngineConfig(
        *pair,
        n_ctx=256,
        n_batch=16,
        **EXACT,
    )


@pytest.fixture(params=[False, True], ids=["sent", "copied"])
def divided(request, monkeypatch) -> None:
    """A CPU counts as a device with memory of its own; batches of 16 are computed by the host, or have the matrices copied."""
    monkeypatch.setattr(memory_planner, "has_own_memory", lambda device: True)
    for module, name in ((experts, "COPY_COLUMNS"), (cpu_offload, "COPY_COLUMNS"), (loading, "COPY_COLUMNS")):
        monkeypatch.setattr(module, name, 16 if request.param else 1000)


@pytest.fixture
def undivided(config) -> Iterator[Solo]:
    with Solo.load(config) as engine:
        yield engine


@pytest.mark.parametrize("layers", [1, 3, ALL_LAYERS])
def test_every_path_gives_the_same_bits(divided, undivided, config, layers) -> None:
    """Prompts of several sizes, plain, chain, tree with gaps in the path, snapshots."""
    with Solo.load(replace(config, n_cpu_moe=layers)) as engine:
        assert engine.memory.host_experts is not None and engine.memory.host_experts.layers == min(
            layers, N_LAYERS
        )
        for ids in (LONG[:1], LONG[:16], LONG):
            rows = [fresh(e, ids).logits.copy() for e in (undivided, engine)]
            np.testing.assert_array_equal(*rows)
        for mode in ("plain", "chain", "tree"):
            assert generate(fresh(engine, LONG), max_tokens=60, mode=mode) == generate(
                fresh(undivided, LONG), max_tokens=60, mode=mode
            )
        sampling = {"temperature": 1.0, "seed": 5}
        drawn = [
            generate(fresh(e), max_tokens=60, mode="tree", sampling=sampling) for e in (engine, undivided)
        ]
        assert drawn[0] == drawn[1]
        assert any(
            step.path != tuple(range(len(step.path)))
            for step in steps(fresh(engine), max_tokens=60, mode="tree", sampling=sampling)
        )
        snapshot = fresh(engine, LONG).snapshot(True)
        tokens = generate(engine, max_tokens=30, mode="tree")
        engine.reset()
        engine.restore(snapshot)
        assert generate(engine, max_tokens=30, mode="plain") == tokens


def test_only_kept_layers_divide_a_graph(divided, config, monkeypatch) -> None:
    """In a pass the host computes once for each of them; a device alone runs whole graphs."""
    for layers in (0, 2):
        with Solo.load(replace(config, draft=None, n_cpu_moe=layers)) as engine:
            tokens, parts = generate(fresh(engine), max_tokens=3, mode="plain"), []
            assert all((graph._split is not None) == bool(layers) for _, graph in engine.passes.graphs)
            if engine.device.host is not None:
                compute = engine.device.host.compute
                monkeypatch.setattr(
                    engine.device.host, "compute", lambda part, f=compute, p=parts: p.append(1) or f(part)
                )
            engine.prefill(tokens[-1:])
            assert len(parts) == layers


def test_memory_is_counted_apart(divided, undivided, config) -> None:
    with Solo.load(replace(config, n_cpu_moe=3)) as engine:
        found = engine.memory.host_experts
        assert found is not None and found.layers == 3 and not found.is_short
        matrices = 3 * 3 * SIZES["n_experts"] * 64 * SIZES["n_ff"] * 4
        assert found.nbytes == matrices == engine.passes.weights.host_bytes
        parts, whole = dict(engine.memory.parts), undivided.memory.parts
        assert whole["target weights"] - parts["target weights"] == matrices
        copied = 2 * SIZES["n_experts"] * 64 * SIZES["n_ff"] * 4
        assert parts.pop(COPIED_EXPERTS, 0) == (copied if experts.COPY_COLUMNS == 16 else 0)
        allocated = engine.nbytes
        del parts[GRAPHS], allocated[SCRATCH]
        assert allocated == parts
        assert "experts of 3 layers on the host" in str(engine.memory)
        assert "planned, not counted" not in engine.memory.against(engine.nbytes)


def test_without_memory_the_file_is_read(divided, undivided, config, monkeypatch, caplog) -> None:
    monkeypatch.setattr(cpu_offload, "free_memory", lambda: 1 << 20)
    with Solo.load(replace(config, n_cpu_moe=N_LAYERS)) as engine:
        assert engine.memory.host_experts is not None and engine.memory.host_experts.is_short
        assert "read from the file as they are needed" in caplog.text
        assert generate(fresh(engine, LONG), max_tokens=30, mode="tree") == generate(
            fresh(undivided, LONG), max_tokens=30, mode="tree"
        )


def needed(config: EngineConfig, layers: int) -> int:
    """Device memory with the experts of so many layers with the host, as planned."""
    with closing(Device.cpu(1, reference=True)) as device, GGUFFile(config.model) as file:
        found = memory_needs(Opened(device, config, file, read_target(file)), layers)
        with closing(found.weights):
            return found.usual().total + MARGIN


@pytest.mark.parametrize("layers", [1, 3, 4])
def test_as_few_layers_as_it_takes(divided, config, monkeypatch, caplog, layers) -> None:
    config = replace(config, draft=None)
    room = needed(config, layers)
    assert needed(config, layers - 1) > room
    monkeypatch.setattr(memory_planner, "memory_free", lambda device, limit: room)
    with Solo.load(config) as engine:
        assert engine.memory.host_experts is not None and engine.memory.host_experts.layers == layers
        assert caplog.text.count("does not fit the GPU") == 1
        assert len(generate(fresh(engine), max_tokens=5)) == 5
    for few in range(layers):
        with pytest.raises(
            DeviceError, match=rf"it fits with the experts of {layers} layers.*--n-cpu-moe {layers}\)"
        ):
            Solo.load(replace(config, n_cpu_moe=few))


def test_tensors_are_made_once(divided, config, monkeypatch) -> None:
    """Some targets copy tensors to reorder them; how many layers fit is tried with what they made first."""
    made: list[Path] = []
    with GGUFFile(config.model) as file:
        kind = type(read_target(file))
    sources = kind.sources
    monkeypatch.setattr(
        kind, "sources", lambda target, file: made.append(config.model) or sources(target, file)
    )
    room = needed(replace(config, draft=None), 3)
    made.clear()
    monkeypatch.setattr(memory_planner, "memory_free", lambda device, limit: room)
    with Solo.load(replace(config, draft=None)) as engine:
        assert engine.memory.host_experts is not None and engine.memory.host_experts.layers == 3
    assert len(made) == 1


def test_what_cannot_fit_is_refused_as_before(divided, config, monkeypatch) -> None:
    monkeypatch.setattr(memory_planner, "memory_free", lambda device, limit: 1 << 20)
    with pytest.raises(DeviceError, match="not enough device memory") as error:
        Solo.load(replace(config, draft=None))
    assert "n-cpu-moe" not in str(error.value)


def test_a_dense_model_has_none(divided, toy_pair, monkeypatch, caplog) -> None:
    config = EngineConfig(*toy_pair, n_ctx=256, n_threads=1, calibrate="never", n_cpu_moe=2)
    with Solo.load(config) as engine:
        assert engine.memory.host_experts is None and engine.device.host is None
        assert "no experts in its first 2 layers" in caplog.text
    with closing(Device.cpu(1)) as device, GGUFFile(config.model) as file:
        found = fitting_needs(Opened(device, config, file, read_target(file)))
        assert found.layers_to_keep() == 0
        found.weights.close()


def test_on_the_cpu_alone_nothing_is_divided(config) -> None:
    with Solo.load(replace(config, n_cpu_moe=ALL_LAYERS)) as engine:
        assert engine.memory.host_experts is None and engine.device.host is None


def test_an_interrupted_pass_leaves_both_sides_usable(divided, config, monkeypatch) -> None:
    with Solo.load(replace(config, n_cpu_moe=N_LAYERS, draft=None)) as engine:
        tokens = generate(fresh(engine), max_tokens=10, mode="plain")
        host: Any = engine.device.host
        compute = host.compute
        calls: list[int] = []

        def broken(part: Any) -> int:
            calls.append(1)
            return -1 if len(calls) == 6 else compute(part)

        monkeypatch.setattr(host, "compute", broken)
        with pytest.raises(DeviceError, match="status -1"):
            generate(fresh(engine), max_tokens=10, mode="plain")
        monkeypatch.setattr(host, "compute", compute)
        assert generate(fresh(engine), max_tokens=10, mode="plain") == tokens


def test_costs_are_kept_apart(divided, config, monkeypatch, tmp_path) -> None:
    """What passes cost with some experts on the host is measured for itself."""
    monkeypatch.setattr(known_costs, "default_folder", lambda: tmp_path)
    files = []
    for layers in (0, 2, 2):
        chosen = replace(config, n_cpu_moe=layers, calibrate="cached")
        with Solo.load(chosen, calibration_seconds=0.1) as engine:
            assert engine.costs.of("plain", 1, 64) is not None
            files.append(engine.costs_file)
    assert files[0] != files[1] == files[2]


def test_batches_whose_experts_are_copied_keep_their_size() -> None:
    """A pass takes as long for few tokens as for many: none is made smaller, and what is left over goes into one."""
    batches = BatchSizes(2048, paced=True, is_gpu=True, flat=128)
    batches.took(2048, 10 * SLOWEST)
    assert batches.limit == 2048
    assert [batches.next(n) for n in (5000, 2047, 700, 128, 127, 60, 3)] == [2048, 2040, 696, 128, 64, 56, 3]
