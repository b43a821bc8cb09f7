"""Tests of quantised K/V caches: the same output in every mode, exact row copies, drafts that are still accepted."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_block_drafts import KINDS

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import SamplingParams
from dflash_ggml.engine.kv_types import kv_types
from dflash_ggml.engine.memory_planner import Opened, memory_needs
from dflash_ggml.errors import ConfigError
from dflash_ggml.files.gguf import GGUFFile
from dflash_ggml.ggml.device import Device
from dflash_ggml.models.registry import read_target
from dflash_ggml.session.events import Begin, TextDelta
from dflash_ggml.session.requests import ChatRequest
from dflash_ggml.session.session import Session, run_chat
from dflash_ggml.state.kv_type import KV_TYPES, KvType
from dflash_ggml.state.memory import MARGIN, plan
from reference import toys
from reference.engine_kit import Solo, fresh, generate, steps

PYTHON = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
LONG = [i * 7 % 50 for i in range(90)]


@pytest.fixture
def base(toy_pair: tuple[Path, Path]) -> EngineConfig:
    return EngineConfig(
        *toy_pair,
        n_ctx=512,
        n_batch=16,
        n_threads=1,
        n_gpu_layers=0,
        calibrate="never",
        spec=("dflash",),
        budget=15,
    )


def rows(engine: Solo) -> list[bytes]:
    """Every committed row of target and draft."""
    snapshot = engine.snapshot()
    assert snapshot.rows is not None
    parts = zip(*(block.parts for block in snapshot.rows))
    return [b"".join(part.tobytes() for part in of_cache) for of_cache in parts]


@pytest.mark.parametrize(
    "types",
    [
        ("q8_0", "q4_0", "auto", "auto"),
        ("q4_0", "q4_0", "q5_0", "f16"),
        ("q4_1", "q5_1", "f32", "q8_0"),
        ("f16", "q8_0", "q4_0", "bf16"),
        ("bf16", "bf16", "auto", "auto"),
    ],
    ids="-".join,
)
def test_every_mode_writes_what_plain_does_with_the_same_types(
    base: EngineConfig, types: Sequence[str]
) -> None:
    names = ("type_k", "type_v", "draft_type_k", "draft_type_v")
    with Solo.load(replace(base, reference=True, **dict(zip(names, types)))) as engine:
        plain = generate(fresh(engine, LONG), max_tokens=150, mode="plain")
        for mode in ("chain", "tree"):
            found = list(steps(fresh(engine, LONG), max_tokens=150, mode=mode))
            assert [token for step in found for token in step.tokens] == plain, mode
        assert len(found) < 120, "nothing was accepted"
        assert engine.drafter is not None
        expected = KvType.named(*(own if own != "auto" else of for own, of in zip(types[2:], types[:2])))
        assert engine.passes.state.kv.type == KvType.named(*types[:2])
        kinds: list[Any] = list(engine.drafter.rows)
        assert [t.type for t in kinds] == [expected.k, expected.v] * (len(kinds) // 2)


def test_float32_weights_and_real_text(f32_target: Path, f32_draft: Path) -> None:
    config = EngineConfig(
        f32_target,
        f32_draft,
        n_ctx=256,
        n_threads=1,
        n_gpu_layers=0,
        spec=("dflash",),
        type_k="q8_0",
        type_v="q4_0",
        reference=True,
    )
    with Solo.load(replace(config, calibrate="never")) as engine:
        ids = engine.tokenizer.encode(PYTHON)
        plain = generate(fresh(engine, ids), max_tokens=48, mode="plain")
        tree = list(steps(fresh(engine, ids), max_tokens=48, mode="tree", budget=15))
        assert [token for step in tree for token in step.tokens] == plain
        assert len(tree) < 30


@pytest.mark.parametrize("pair", [("q8_0", "q4_0"), ("q5_1", "bf16")], ids="/".join)
def test_snapshots_keep_every_bit(base: EngineConfig, pair: tuple[str, str]) -> None:
    with Solo.load(replace(base, type_k=pair[0], type_v=pair[1])) as engine:
        tokens = generate(fresh(engine, LONG), max_tokens=40, mode="tree")
        snapshot = engine.snapshot()
        before = rows(engine)
        pending = tokens[-1:]
        engine.prefill(pending)
        onwards = generate(engine, max_tokens=40, mode="tree")
        fresh(engine, LONG[::-1] * 3)
        engine.restore(snapshot)
        assert rows(engine) == before
        engine.prefill(pending)
        assert generate(engine, max_tokens=40, mode="tree") == onwards


def test_windowed_draft_layers(model_dir: Path, base: EngineConfig) -> None:
    """Rings of quantised rows: the same output whether they are new, continued or restored, and after many wraps."""
    target, draft = toys.write_pair(model_dir, 71, window=32, full_layers=1, draft_layers=3)
    config = replace(base, model=target, draft=draft, type_k="q8_0", type_v="q4_0")
    with Solo.load(config) as engine:
        tokens = generate(fresh(engine, LONG), max_tokens=120, mode="tree")
        snapshot = engine.snapshot()
        engine.prefill(tokens[-1:])
        onwards = [step.tokens for step in steps(engine, max_tokens=60, mode="tree")]
        fresh(engine, LONG[::-1] * 3)
        engine.restore(snapshot)
        engine.prefill(tokens[-1:])
        assert [step.tokens for step in steps(engine, max_tokens=60, mode="tree")] == onwards
        assert len(onwards) < 60, "nothing was accepted"


def test_a_batched_sequence_leaves_every_bit(base: EngineConfig) -> None:
    """Hidden states are computed in rows behind those held, and at the context's end in theirs, which are copied away."""
    with Solo.load(replace(base, type_k="q5_0", type_v="q4_1", draft=None)) as engine:
        fresh(engine, LONG * 3)
        before = rows(engine)
        engine.hidden_states(LONG * 4, lambda _: None)
        assert rows(engine) == before


def test_rows_of_another_type_are_refused(base: EngineConfig) -> None:
    """Of one size, f16 and bf16 rows can be distinguished by their types alone."""
    with Solo.load(replace(base, type_k="f16", type_v="f16")) as engine:
        fresh(engine, LONG)
        snapshot = engine.snapshot()
    shape = pytest.raises(ConfigError, match="snapshot: its K/V rows have another shape or type")
    with Solo.load(replace(base, type_k="bf16", type_v="f16")) as engine, shape:
        engine.restore(snapshot)


def test_a_conversation_goes_on_from_cached_rows(demo_target: Path, demo_draft: Path) -> None:
    """With the prefix cache a second conversation between two turns of the first changes no answer."""
    config = EngineConfig(
        demo_target, demo_draft, n_ctx=512, n_threads=1, n_gpu_layers=0, type_k="q8_0", type_v="q4_0",
        calibrate="never", reference=True,
    )  # fmt: skip
    questions = [[{"role": "user", "content": f"{n} apples. " * 20}] for n in ("Three", "Four")]
    answer = [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And pears?"}]
    plan = [questions[0], questions[1], questions[0] + answer]
    answers: list[list[str]] = []
    cached = []
    for nbytes in (0, 1 << 28):
        with Solo.load(config) as engine:
            session = Session(engine, cache_bytes=nbytes)
            answers.append([])
            for messages in plan:
                request = ChatRequest(
                    messages=messages, max_tokens=12, sampling=SamplingParams(temperature=0)
                )
                events = list(run_chat(session, request))
                answers[-1].append("".join(e.text for e in events if isinstance(e, TextDelta)))
                cached.append(next(e for e in events if isinstance(e, Begin)).cached_n)
    assert answers[0] == answers[1]
    assert cached[-1] > cached[2]


def test_the_draft_is_followed_as_far(demo_target: Path, demo_draft: Path) -> None:
    """A convention that writing and reading do not share ends in one token a pass."""
    lengths = []
    for pair in (("f32", "f32"), ("q8_0", "q4_0"), ("q4_0", "q4_0")):
        config = EngineConfig(
            demo_target, demo_draft, n_ctx=256, n_threads=1, n_gpu_layers=0,
        spec=("dflash",), type_k=pair[0], type_v=pair[1],
            calibrate="never",
        )  # fmt: skip
        with Solo.load(config) as engine:
            ids = engine.tokenizer.encode(PYTHON)
            lengths.append(len(list(steps(fresh(engine, ids), max_tokens=96, mode="tree", budget=15))))
    assert max(lengths) < 1.3 * lengths[0] < 60


def test_heads_that_blocks_do_not_divide_are_refused_at_loading(model_dir: Path) -> None:
    target, draft = toys.write_pair(model_dir, 48, head_dim=48)
    base = EngineConfig(target, draft, n_ctx=64, n_threads=1, n_gpu_layers=0, calibrate="never")
    with pytest.raises(ConfigError, match="type_k: q8_0 has blocks of 32 .* the target's head dimension 48"):
        Solo.load(replace(base, type_k="q8_0"))
    with pytest.raises(ConfigError, match="type_v: q4_0 has blocks of 32 .* the draft's head dimension 48"):
        Solo.load(replace(base, draft_type_v="q4_0"))
    with Solo.load(replace(base, type_k="bf16", type_v="f16")) as engine:
        assert len(generate(fresh(engine), max_tokens=5, mode="tree")) == 5


def test_what_is_planned_with_when_nothing_is_asked_for() -> None:
    """Smaller types only for an explicit context on a GPU, and only where heads allow them."""
    base = EngineConfig(Path("x"), n_ctx=4096)
    half, small = KvType.named("f16", "f16"), KvType.named("q8_0", "q4_0")
    usual, smaller = kv_types(base, True, [256], [128])
    assert (usual.target, usual.draft, usual.note) == (half, half, "")
    assert (smaller.target, smaller.draft) == (small, small)
    assert smaller.note == (
        "4096 tokens of context do not fit with K/V caches of f16: they are K q8_0, V q4_0 (-ctk, -ctv)"
    )
    for config, dims in (
        (replace(base, n_ctx=0), [256]),
        (replace(base, type_v="f16"), [256]),
        (replace(base, draft_type_k="q8_0"), [256]),
        (base, [48]),
    ):
        assert len(kv_types(config, True, dims)) == 1
    assert [t.target for t in kv_types(base, False, [256])] == [KvType.named("f32", "f32")]
    # a scorer's shrink before the others, and whatever types these were given
    scorers = [KvType.named(kind, kind) for kind in ("f16", "q8_0", "q8_0")]
    found = kv_types(base, True, [256], [128], [256])
    assert [(types.target, types.scorer) for types in found] == [*zip((half, half, small), scorers)]
    assert "the prompt scorer's K/V caches in f16: they are q8_0" in found[1].note
    found = kv_types(replace(base, type_k="f16"), True, [256], [128], [256])
    assert [types.scorer for types in found] == scorers[:2]
    assert [types.scorer for types in kv_types(base, True, [256], [], [48])] == [scorers[0]] * 2
    assert len(kv_types(replace(base, n_ctx=0), True, [256], [], [256])) == 1


def test_the_first_types_that_fit_are_taken(base: EngineConfig) -> None:
    """As on a GPU whose free memory lies between the plan for f16 and the one for smaller types, above both, below both."""
    with closing(Device.cpu(1)) as device, GGUFFile(base.model) as file:
        target = read_target(file)
        wanted = replace(memory_needs(Opened(device, base, file, target)), kv=kv_types(base, True, [64]))
        n_ctx = 1 << 20
        large, small = (
            plan(wanted.parts(types), wanted.over, n_ctx, 0).total + MARGIN for types in wanted.kv
        )
        assert small < large
        for free, chosen in ((large, 0), ((large + small) // 2, 1), (small, 1), (small - 1, 0)):
            assert wanted.choose(n_ctx, free)[0] == wanted.kv[chosen]
        wanted.weights.close()


@pytest.mark.parametrize("name", ["type_k", "draft_type_v"])
def test_unknown_types_are_named(name: str) -> None:
    assert "q4_0" in KV_TYPES
    with pytest.raises(ConfigError, match=f"{name}: 'q3_0' is none of auto, f32, f16"):
        EngineConfig(Path("x"), **{name: "q3_0"})  # type: ignore[arg-type]


def test_a_tree_leaves_the_rows_that_plain_decoding_writes(base: EngineConfig) -> None:
    """Committed rows are moved as they are: what a tree wrote is what plain decoding does, code by code."""
    with Solo.load(replace(base, reference=True, type_k="q8_0", type_v="q4_0")) as engine:
        kv = len(engine.passes.state.kv.slices)
        found = []
        for mode in ("plain", "tree"):
            tokens = generate(fresh(engine, LONG), max_tokens=100, mode=mode)
            found.append((tokens, [np.frombuffer(part, np.uint8) for part in rows(engine)[:kv]]))
        (plain, ours), (tree, theirs) = found
        assert plain == tree
        # a tree's delta net sums in another order: now and then a value is rounded the other way
        for a, b in zip(ours, theirs, strict=True):
            assert (a != b).mean() < 0.005


@pytest.mark.parametrize("kind", [*KINDS, "prediction head"])
def test_every_kind_of_draft_proposes_what_it_does_with_float32(model_dir: Path, kind: str) -> None:
    """The best token of each depth is as likely, behind a prompt that was read in several batches."""
    options = KINDS.get(kind, {"nextn": True})
    target, draft = toys.write_pair(model_dir, 80 + [*KINDS, kind].index(kind), **options)
    config = EngineConfig(
        target,
        draft if kind in KINDS else None,
        n_ctx=256,
        n_batch=40,
        n_threads=1,
        n_gpu_layers=0,
        calibrate="never",
    )
    found = []
    for pair in (("f32", "f32"), ("q8_0", "q8_0")):
        with Solo.load(replace(config, type_k=pair[0], type_v=pair[1])) as engine:
            fresh(engine, LONG)
            engine.sequence.pending = 7
            assert engine.drafter is not None
            rows: Any = engine.drafter.propose([engine.sequence], 15)[0]
            found.append(rows.log_probs[:, 0])
    assert np.abs(found[1] - found[0]).max() < 0.005
