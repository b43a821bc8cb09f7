"""Tests of halves of every layer on two devices, which are CPUs here: equal to one device but for the order of sums."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from dflash_ggml.config import EngineConfig
from dflash_ggml.errors import ConfigError, DeviceError
from dflash_ggml.ggml import mailboxes
from dflash_ggml.models.qwen35 import Qwen35
from dflash_ggml.session.disk_cache import state_identity
from dflash_ggml.state.memory import COPIED_EXPERTS, GRAPHS, SCRATCH
from reference import kv_toys, toys
from reference.engine_kit import EXACT, Solo, fresh, generate, logits_batched

LONG = [i % 50 for i in range(45)]
HALVES: dict[str, Any] = {"device": ("CPU", "CPU"), "split_mode": "tensor"}
# value heads in three groups that read both key heads
SIZES: dict[str, Any] = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 32, "ssm_k_heads": 2, "ssm_v_heads": 6}
WIDEST = 128  # terms of the longest sum that is divided

# type of matrices, sizes of a toy pair, options of its engine
KINDS: dict[str, tuple[Type, dict[str, Any], dict[str, Any]]] = {
    "dflash": (Type.F32, {}, {}),
    "blocks of 32": (Type.Q8_0, {"state": 64}, {}),
    "dflash2, a tied head": (Type.F32, {"draft": "dflash2", "window": 24, "causal": False, "tied": True}, {}),
    "a prediction head": (Type.F32, {"nextn": True}, {"draft": None}),
    "quantised caches": (Type.F32, {}, {"type_k": "q8_0", "type_v": "q4_0"}),
    "a decode window": (Type.F32, {}, {"fa_window": 96}),
}


def config_of(folder: Path, kind: str = "dflash", **more: Any) -> EngineConfig:
    type_, sizes, options = KINDS[kind]
    pair = toys.write_pair(folder, 60, type_, **{**SIZES, **sizes, **more})
    return replace(EngineConfig(*pair, n_ctx=700, parallel=3, n_batch=16, budget=15, **EXACT), **options)


@pytest.fixture(scope="module", params=KINDS)
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Solo, Solo]]:
    """On one device, and in halves on two, which send each other little at once."""
    config = config_of(tmp_path_factory.mktemp("halves"), request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mailboxes, "CELLS", 500)
        with Solo.load(config) as one, Solo.load(replace(config, **HALVES)) as two:
            yield one, two


def close(a: np.ndarray, b: np.ndarray, engine: Solo) -> None:
    """Two sums a layer are divided, each of at most WIDEST terms, whose order moves a sum by at most as many roundings. What
    is rounded to 8 or 4 bits afterwards may go to the next number: one step of a block then."""
    coarse = engine.config.type_k != "f32"
    step = 1 / 15 if coarse else 2.0**-24 * WIDEST
    np.testing.assert_allclose(a, b, rtol=0, atol=2 * engine.params.n_layers * step * float(np.abs(a).max()))


def test_logits_and_outputs_are_those_of_one_device(engines: tuple[Solo, Solo]) -> None:
    for ids in (LONG[:1], LONG[:16], LONG):
        close(*(fresh(engine, ids).logits.copy() for engine in engines), engines[0])
    for mode in ("plain", "chain", "tree"):
        a, b = (generate(fresh(engine, LONG), max_tokens=30, mode=mode) for engine in engines)
        assert a == b
    sampled = [
        generate(fresh(e, LONG), max_tokens=20, mode="tree", sampling={"temperature": 1.0, "seed": 5})
        for e in engines
    ]
    assert sampled[0] == sampled[1]


def test_each_has_its_half_of_the_state(engines: tuple[Solo, Solo]) -> None:
    """After trees whose paths were committed: conv windows and delta-net states by heads, K/V rows by heads."""
    one, two = engines
    for engine in engines:
        generate(fresh(engine, LONG), max_tokens=30, mode="tree")
    assert one.sequence.n_tokens == two.sequence.n_tokens
    (windows, deltas), halves = one.passes.state.live(), two.passes.state.live_parts()
    groups = SIZES["ssm_v_heads"] // SIZES["ssm_k_heads"]
    for whole, parts, axis, pieces in ((windows, halves[0], 1, 2 + groups), (deltas, halves[1], 1, groups)):
        whole = one.device.read(whole).reshape(tuple(whole.ne)[::-1]).squeeze()
        for rank, part in enumerate(parts):
            found = two.device.read(part).reshape(tuple(part.ne)[::-1]).squeeze()
            of_rank = np.arange(whole.shape[axis]).reshape(pieces, 2, -1)[:, rank].ravel()
            close(np.take(whole, of_rank, axis), found, one)
    if one.config.type_k == "f32":
        n, row = one.sequence.n_tokens, SIZES["n_kv_heads"] * SIZES["head_dim"]
        slices, both = one.passes.state.kv.slices, two.passes.state.kv.slices
        assert len(both) == 2 * len(slices)
        for i, whole in enumerate(slices):
            rows = rows_of(one, whole, row, n)
            for rank in (0, 1):
                found = rows_of(two, both[i + rank * len(slices)], row // 2, n)
                close(rows[:, rank * row // 2 :][:, : row // 2], found, one)


def rows_of(engine: Solo, t: Any, row: int, n: int) -> np.ndarray:
    """The first n of the slot's cache rows, which are contiguous."""
    assert t.nb[1] == 4 * row
    return engine.device.read(t, n * row, engine.sequence.first_row * t.nb[1]).reshape(n, row)


def test_several_sequences_in_a_pass(engines: tuple[Solo, Solo]) -> None:
    if not engines[0].passes.takes_several:
        return
    for engine in engines:
        engine.slot.close()
    prompts, modes = [LONG[:9], LONG, LONG[5:25]], ("tree", "plain", "tree")
    a, b = (logits_batched(engine, prompts, modes, 12) for engine in engines)
    for (tokens, rows), (others, other_rows) in zip(a, b, strict=True):
        assert tokens == others
        close(rows, other_rows, engines[0])
    for engine in engines:
        for slot in list(engine.slots):
            slot.close()


def test_snapshots_go_back_but_not_to_one_device(engines: tuple[Solo, Solo]) -> None:
    one, two = engines
    snapshot = fresh(two, LONG).snapshot(True)
    tokens = generate(two, max_tokens=20, mode="tree")
    two.reset()
    two.prefill(LONG[:3])
    two.restore(snapshot)
    assert generate(two, max_tokens=20, mode="tree") == tokens
    one.reset()
    with pytest.raises(ConfigError, match="snapshot: its K/V rows have another shape or type"):
        one.restore(snapshot)
    assert state_identity(one)[-1] != state_identity(two)[-1], "nor does a disk cache"


def test_a_sequence_moves(engines: tuple[Solo, Solo]) -> None:
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
    close(*found, engines[0])


def test_the_memory_plan_is_exact_on_both(engines: tuple[Solo, Solo]) -> None:
    def exact(parts: dict[str, int]) -> dict[str, int]:
        return {n: s for n, s in parts.items() if s and not n.startswith((GRAPHS, COPIED_EXPERTS, SCRATCH))}

    one, two = engines
    assert exact(two.nbytes) == exact(two.memory.all_parts)
    own, other = (plan.parts for plan in two.memory.devices)
    whole = one.memory.parts
    for name in ("target K/V", "recurrent state"):
        assert own[name] == other[name]
        # short rows of quantised caches are padded
        assert abs(2 * own[name] - whole[name]) <= 4096 or one.config.type_k != "f32"
    assert own["mailbox"] == other["mailbox"] and "mailbox" not in whole
    assert "CPU (one half of every layer, the embedding, the output" in str(two.memory)
    assert "CPU#1 (the other half of every layer and the embedding)" in str(two.memory)


def test_both_end_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a prompt's batch, a single token and a tree: else the two would drift apart, token after token."""
    monkeypatch.setattr(
        Qwen35,
        "_trunk",
        lambda self, g, batch, *args, whole=Qwen35._trunk: g.output(
            whole(self, g, batch, *args), f"x{batch.rank}"
        ),
    )
    with Solo.load(replace(config_of(tmp_path), **HALVES)) as two:
        generate(fresh(two, LONG), max_tokens=20, mode="tree")
        generate(fresh(two, LONG), max_tokens=5, mode="plain")
        compared = 0
        for _, graph in two.passes.graphs:
            if "x1" in graph.outputs:
                compared += 1
                for _ in range(2):
                    graph.run()
                    a, b = (two.device.read(graph.outputs[f"x{rank}"]) for rank in (0, 1))
                    np.testing.assert_array_equal(a, b)
        assert compared >= 3


def test_a_device_that_does_not_answer_is_named(tmp_path: Path) -> None:
    with Solo.load(replace(config_of(tmp_path), **HALVES)) as two:
        fresh(two, LONG)
        for box in two.passes.state.mailboxes.tensors:
            two.device.write(box, np.ones(1, np.int64), 8)
        with pytest.raises(
            DeviceError, match="CPU: CPU#1 did not answer within 10 seconds; load the model again"
        ):
            fresh(two, LONG)


@pytest.mark.parametrize(
    ("sizes", "options", "words"),
    [
        (
            {"n_kv_heads": 1},
            {},
            r"4 and 1 heads, 6 and 2 of delta nets, n_ff 128\) cannot be shared by 2 devices",
        ),
        ({"ssm_k_heads": 3}, {}, "6 and 3 of delta nets"),
        ({"arch": "qwen35moe", "n_experts": 6, "n_used": 2, "n_ff": 32}, {}, r"\(experts\) cannot be shared"),
        ({}, {"device": ("CPU",)}, "wants two devices, not CPU; name them"),
        ({}, {"device": ("CPU",) * 3}, "wants two devices, not CPU, CPU, CPU"),
        ({}, {"tensor_split": (2.0, 1.0)}, "both devices take a half"),
        ({}, {"draft_device": "CPU"}, "the draft lies on the first device"),
        ({}, {"n_cpu_moe": 1}, "nothing with the host"),
    ],
)
def test_what_cannot_be_halved(tmp_path: Path, sizes: Any, options: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"split_mode tensor: .*{words}"):
        Solo.load(replace(config_of(tmp_path, **sizes), **{**HALVES, **options}))


def test_no_block_of_weights_is_divided(tmp_path: Path) -> None:
    pair = toys.write_pair(tmp_path, 60, Type.Q8_0, **SIZES)
    with pytest.raises(
        ConfigError, match=r"blk.0.ssm_out.weight, 96 wide, cannot be halved between blocks of q8_0"
    ):
        Solo.load(EngineConfig(*pair, n_ctx=700, **HALVES, **EXACT))


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    pair = kv_toys.write_pair(tmp_path, 60)
    with pytest.raises(ConfigError, match="only dense Qwen3.5 targets .*-sm layer"):
        Solo.load(EngineConfig(*pair, n_ctx=700, **HALVES, **EXACT))
