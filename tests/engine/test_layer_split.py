"""Tests of layers on two and three devices, and the draft on its own: bitwise the output and logits of one device. All devices
are CPUs, of which ggml opens as many as are named. 30 seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.engine import memory_planner, placement
from dflash_ggml.engine.placement import Placement
from dflash_ggml.errors import ConfigError, DeviceError
from dflash_ggml.ggml.device import list_devices
from dflash_ggml.session import disk_cache
from dflash_ggml.session.disk_cache import DiskCache, state_identity
from dflash_ggml.state.memory import COPIED_EXPERTS, GRAPHS, MARGIN, SCRATCH
from reference import kv_toys, toys
from reference.engine_kit import EXACT, Solo, fresh, generate, logits_batched, steps

LONG = [i % 50 for i in range(45)]
TWO: dict[str, Any] = {"device": ("CPU", "CPU")}
UNEVEN: dict[str, Any] = {"device": ("CPU", "CPU", "CPU"), "tensor_split": (1.0, 0.0, 2.0)}
THREE: dict[str, Any] = {"device": ("CPU", "CPU", "CPU")}
APART: dict[str, Any] = {"draft_device": "CPU"}
BOTH: dict[str, Any] = {**TWO, **APART}

# sizes of a toy pair, options of its engine, and the devices
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "dflash on two": ({}, {}, TWO),
    "dflash on three": ({}, {}, THREE),
    "an uneven share": ({}, {}, UNEVEN),
    "the draft apart": ({}, {}, APART),
    "dflash2, all apart": ({"draft": "dflash2", "window": 24, "causal": False}, {}, BOTH),
    "dspark": ({"draft": "dspark", "from_anchor": False}, {}, BOTH),
    "a ring of the draft's": (
        {"window": 40, "full_layers": 1, "draft_layers": 2, "n_ctx": 2048},
        {"n_ctx": 1600},
        TWO,
    ),
    "prediction head": ({"nextn": True}, {"draft": None}, BOTH),
    "two drafts": ({"nextn": True}, {"spec": ("dflash", "mtp")}, BOTH),
    "prompt lookup": ({}, {"draft": None, "spec": ("suffix",)}, TWO),
    "a tied head": ({"tied": True}, {}, TWO),
    "quantised caches": ({"head_dim": 32}, {"type_k": "q8_0", "type_v": "q4_0"}, TWO),
    "a decode window": ({}, {"fa_window": 96}, TWO),
    "experts": ({"arch": "qwen3next", "n_experts": 6, "n_used": 2, "n_ff": 32, "ssm_v_heads": 6}, {}, TWO),
    "experts with the host": (
        {"arch": "qwen35moe", "n_experts": 6, "n_used": 2, "n_ff": 32},
        {"n_cpu_moe": 3},
        BOTH,
    ),
    "rows only": ({"kv_toy": True}, {}, THREE),
    "rings": ({"kv_toy": True, **kv_toys.VARIANTS[32]}, {}, TWO),
    "composed": ({}, {"stock": True}, TWO),
}


def config_of(folder: Path, kind: str) -> EngineConfig:
    sizes, options, _ = KINDS[kind]
    write_pair = kv_toys.write_pair if "kv_toy" in sizes else toys.write_pair
    pair = write_pair(folder, 60, **{name: size for name, size in sizes.items() if name != "kv_toy"})
    return replace(EngineConfig(*pair, n_ctx=700, parallel=3, n_batch=16, budget=15, **EXACT), **options)


@pytest.fixture(scope="module", params=KINDS)
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Solo, Solo]]:
    """On one device, and on several."""
    config, devices = config_of(tmp_path_factory.mktemp("split"), request.param), KINDS[request.param][2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_planner, "has_own_memory", lambda device: bool(config.n_cpu_moe))
        with Solo.load(config) as one, Solo.load(replace(config, **devices)) as several:
            assert len(several.device.sides) > len(one.device.sides)
            yield one, several


def modes(engine: Solo) -> tuple[str, ...]:
    return ("plain", "chain", "tree") if engine.sources else ("plain",)


def test_outputs_and_logits_are_bitwise_those_of_one_device(engines: tuple[Solo, Solo]) -> None:
    for ids in (LONG[:1], LONG[:16], LONG):
        np.testing.assert_array_equal(*(fresh(engine, ids).logits.copy() for engine in engines))
    for mode in modes(engines[0]):
        for sampling in ({}, {"temperature": 1.0, "seed": 5}):
            a, b = (
                generate(fresh(engine, LONG), max_tokens=40, mode=mode, sampling=sampling)
                for engine in engines
            )
            assert a == b


def test_trees_move_rows(engines: tuple[Solo, Solo]) -> None:
    """Accepted paths have the same gaps, so that commits move rows and states on every side."""
    if not engines[0].sources:
        return
    sampling = {"temperature": 1.0, "seed": 3}
    found = [
        [(step.tokens, step.path) for step in steps(fresh(e), max_tokens=40, mode="tree", sampling=sampling)]
        for e in engines
    ]
    assert found[0] == found[1]


def test_several_sequences_in_a_pass(engines: tuple[Solo, Solo]) -> None:
    if not engines[0].passes.takes_several:
        return
    prompts, chosen = [LONG[:9], LONG, LONG[5:25]], (modes(engines[0])[-1], "plain", modes(engines[0])[-1])
    for engine in engines:
        engine.slot.close()
    a, b = (logits_batched(engine, prompts, chosen, 20) for engine in engines)
    for (tokens, rows), (others, other_rows) in zip(a, b, strict=True):
        assert tokens == others
        np.testing.assert_array_equal(rows, other_rows)
    for engine in engines:
        for slot in list(engine.slots):
            slot.close()


def test_snapshots_go_back_and_from_one_to_the_other(engines: tuple[Solo, Solo]) -> None:
    one, several = engines
    last = modes(one)[-1]
    snapshots = [fresh(engine, LONG).snapshot(True) for engine in engines]
    for a, b in zip(snapshots[0].live, snapshots[1].live, strict=True):
        np.testing.assert_array_equal(a, b)
    for blocks in zip(*(snapshot.rows or () for snapshot in snapshots), strict=True):
        for a, b in zip(*(block.parts for block in blocks), strict=True):
            np.testing.assert_array_equal(a, b)
    tokens = generate(one, max_tokens=20, mode=last)
    for snapshot in snapshots:
        for engine in engines:
            engine.reset()
            engine.prefill(LONG[:3])
            engine.restore(snapshot)
            assert generate(engine, max_tokens=20, mode=last) == tokens
    assert state_identity(one)[-1] == state_identity(several)[-1], "a disk cache serves both"
    with_rows = fresh(several, LONG).completed(several.snapshot(False))
    assert [block.n_tokens for block in with_rows.rows or ()] == [b.n_tokens for b in snapshots[1].rows or ()]


def test_a_sequence_moves_and_its_rows_are_cleared(engines: tuple[Solo, Solo]) -> None:
    """A slot that grows goes elsewhere, with its rows on all sides; what it leaves is zero there too."""
    if engines[0].config.fa_window:
        return
    found = []
    for engine in engines:
        engine.slot.close()
        first, second = engine.open(40), engine.open(40)
        for slot in (first, second):
            slot.prefill(LONG[:20])
        assert first.grow(400)
        first.prefill(LONG)
        found.append(first.logits.copy())
        for slot in (first, second):
            slot.close()
        hidden: list[np.ndarray] = []
        fresh(engine).hidden_states(LONG, hidden.append)
        found.append(np.concatenate(hidden))
    for a, b in zip(found[:2], found[2:], strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_memory_plan_is_exact_on_every_device(engines: tuple[Solo, Solo]) -> None:
    several = engines[1]

    def exact(parts: dict[str, int]) -> dict[str, int]:
        return {n: s for n, s in parts.items() if s and not n.startswith((GRAPHS, COPIED_EXPERTS, SCRATCH))}

    for engine in engines:
        assert exact(engine.nbytes) == exact(engine.memory.all_parts)
    assert len(several.memory.devices) == sum(
        side is not several.device.host for side in several.device.sides
    )
    plan = str(several.memory)
    assert all(side.label in plan for side in several.device.sides if side is not several.device.host)
    assert "planned, not counted" not in several.memory.against(several.nbytes)


def test_a_disk_cache_goes_from_two_devices_to_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session's prefixes are kept by an engine on two devices, and taken up by one on one device."""
    monkeypatch.setattr(disk_cache, "SHORTEST", 4)
    config = config_of(tmp_path, "dflash on two")
    found: list[Any] = []
    for devices in (BOTH, {}):
        with Solo.load(replace(config, **devices)) as engine:
            cache = DiskCache(tmp_path / "kept", 1 << 30, state_identity(engine))
            if devices:
                assert cache.put(fresh(engine, LONG).snapshot(True))
            else:
                kept = cache.load([*LONG, 1, 2], len(LONG) + 2)
                assert kept is not None and list(kept.tokens) == LONG
                engine.restore(kept)
            cache.close()
            found.append(generate(engine, max_tokens=20, mode="tree"))
    assert found[0] == found[1]


def test_a_side_is_run_once_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many layers and taps are there: each further one would be another graph for a GPU to replay."""
    config = config_of(tmp_path, "dflash on three")
    with Solo.load(replace(config, tensor_split=(1.0, 1.0, 1.0), **THREE)) as engine:
        calls: list[int] = []
        for side in engine.device.sides:
            compute = side.compute
            monkeypatch.setattr(
                side, "compute", lambda part, i=side.index, f=compute: calls.append(i) or f(part)
            )
        fresh(engine, LONG[:1])
        assert calls == [0, 1, 2]
        layers = engine.passes.placement.layers
        assert sorted(layers) == list(layers) and set(layers) == {0, 1, 2}


def test_one_device_has_graphs_that_nothing_divides(tmp_path: Path) -> None:
    with Solo.load(config_of(tmp_path, "dflash on two")) as engine:
        generate(fresh(engine, LONG), max_tokens=9, mode="tree")
        assert all(graph._split is None for _, graph in engine.passes.graphs)
        assert engine.memory.beside == () and engine.passes.placement == Placement()


def test_layers_go_where_memory_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that does not fit on one device is loaded on two; what fits neither is refused with the device's name."""
    config = replace(config_of(tmp_path, "dflash on two"), draft=None, spec=())
    monkeypatch.setattr(memory_planner, "has_own_memory", lambda device: True)
    with Solo.load(config) as engine:
        tokens, needed = generate(fresh(engine, LONG), max_tokens=9, mode="plain"), engine.memory.total
        weights = engine.memory.parts["target weights"]
    room = needed + MARGIN - weights // 4
    monkeypatch.setattr(memory_planner, "memory_free", lambda device, limit: 2 * room)
    with Solo.load(replace(config, **TWO)) as engine:
        assert all(plan.fits for plan in engine.memory.devices)
        assert generate(fresh(engine, LONG), max_tokens=9, mode="plain") == tokens
        shares = [plan.parts["target weights"] for plan in engine.memory.devices]
        assert sum(shares) == weights and max(shares) < 0.8 * weights
    monkeypatch.setattr(memory_planner, "memory_free", lambda device, limit: room)
    with pytest.raises(DeviceError, match="not enough device memory"):
        Solo.load(config)
    monkeypatch.setattr(memory_planner, "memory_free", lambda device, limit: 2 << 20)
    with pytest.raises(DeviceError, match=r"on CPU \(layers 0 to"):
        Solo.load(replace(config, **TWO))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": ("CUDA7",)}, r"device: there is no device 'CUDA7' here, only .*CPU \("),
        ({"device": ("CPU", "gpu")}, "device: there is no device 'gpu' here, only"),
        ({"draft_device": "CUDA9"}, "draft_device: there is no device 'CUDA9' here, only"),
        ({**TWO, "tensor_split": (1.0, 1.0, 1.0)}, "tensor_split: 1,1,1 is for 3 devices, and there are 2"),
        ({**TWO, "tensor_split": (0.0, 0.0)}, "tensor_split: 0,0 is for 2 devices"),
        ({"main_gpu": 1, "device": ("CPU",)}, "main_gpu: 1, but there are 1"),
    ],
)
def test_devices_that_are_not_there(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Solo.load(replace(config_of(tmp_path, "dflash on two"), **options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"split_mode": "row"}, "split_mode: 'row' is none of none, layer, tensor"),
        ({"tensor_split": (-1.0,)}, "tensor_split"),
    ],
)
def test_what_no_configuration_has(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig(Path("model.gguf"), **options)


def gpus(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    cpu = next(d for d in list_devices() if not d.is_gpu)
    seen = [replace(cpu, name=name, is_gpu=True) for name in names]
    monkeypatch.setattr(placement, "list_devices", lambda: [*seen, cpu])


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({}, ["CUDA0"]),
        ({"main_gpu": 1}, ["CUDA1"]),
        ({"split_mode": "layer"}, ["CUDA0", "CUDA1", "CUDA2"]),
        ({"split_mode": "none", "main_gpu": 2}, ["CUDA2"]),
        ({"tensor_split": (1.0, 1.0)}, ["CUDA0", "CUDA1", "CUDA2"]),
        ({"device": ("cuda2", "CUDA0")}, ["CUDA2", "CUDA0"]),
        ({"device": ("CUDA2", "CUDA0"), "split_mode": "none", "main_gpu": 1}, ["CUDA0"]),
        ({"device": ("none",)}, ["CPU"]),
        ({"n_gpu_layers": 0}, ["CPU"]),
    ],
)
def test_which_devices_are_taken(monkeypatch: pytest.MonkeyPatch, options: Any, chosen: list[str]) -> None:
    gpus(monkeypatch, "CUDA0", "CUDA1", "CUDA2")
    assert [d.name for d in placement._chosen(EngineConfig(Path("model.gguf"), **options))] == chosen


def test_incompatible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, "CUDA0", "Vulkan0")
    for names, words in (
        (("CUDA0", "Vulkan0"), "CUDA0, Vulkan0 are of several backends"),
        (("CUDA0", "CPU"), "are of several backends"),
        (("CUDA0", "CUDA0"), "CUDA0, CUDA0 names a GPU twice"),
    ):
        with pytest.raises(ConfigError, match=words):
            placement._chosen(EngineConfig(Path("model.gguf"), device=names))
