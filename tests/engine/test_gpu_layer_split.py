"""Tests of layers on two GPUs, and the draft on its own, against one GPU. Skipped where there are fewer than two;
GGML_CUDA_DEVICES=2 shows one card as two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from dflash_ggml.config import EngineConfig
from dflash_ggml.ggml.device import list_devices
from reference.engine_kit import Solo, fresh, generate, logits_batched
from reference.toys import write_pair

GPUS = [d.name for d in list_devices() if d.is_gpu]
pytestmark = pytest.mark.skipif(
    len(GPUS) < 2,
    reason="fewer than two GPUs in this build or machine (GGML_CUDA_DEVICES=2 shows one as two)",
)
PROMPT = np.random.default_rng(0).integers(0, 60, 200).tolist()


@pytest.fixture(scope="module", params=[Type.F32, Type.Q8_0], ids=lambda kind: kind.name)
def config(request, tmp_path_factory) -> EngineConfig:
    pair = write_pair(tmp_path_factory.mktemp("gpus"), 7, request.param, n_embd=256, n_ff=512, n_layers=8)
    return EngineConfig(*pair, n_ctx=2048, parallel=3, calibrate="never")


@pytest.fixture
def one(config) -> Iterator[Solo]:
    """A fresh one each: what prompt lookup has learnt changes trees, and trees decide which near-ties are rounded how."""
    with Solo.load(replace(config, device=(GPUS[0],))) as engine:
        yield engine


WAYS: dict[str, dict[str, Any]] = {
    "layers": {"device": tuple(GPUS[:2]), "tensor_split": (1.0, 1.0)},
    "layers, the draft first": {
        "device": tuple(GPUS[:2]),
        "tensor_split": (1.0, 1.0),
        "draft_device": GPUS[0] if GPUS else None,
    },
    "the draft": {"device": tuple(GPUS[:1]), "draft_device": GPUS[1] if len(GPUS) > 1 else None},
}


@pytest.mark.parametrize("way", WAYS)
def test_two_give_what_one_gives(config, one: Solo, way: str) -> None:
    """The same kernels compute the same columns; where a fused one would reach across the border, two may round differently."""
    with Solo.load(replace(config, **WAYS[way])) as two:
        for ids in (PROMPT[:1], PROMPT[:40], PROMPT):
            rows = [fresh(engine, ids).logits.copy() for engine in (one, two)]
            np.testing.assert_allclose(*rows, rtol=0, atol=1e-3 * rows[0].std())
        for mode in ("plain", "chain", "tree"):
            a, b = (generate(fresh(engine, PROMPT), max_tokens=60, mode=mode) for engine in (one, two))
            assert a == b
        snapshot = fresh(two, PROMPT).snapshot(True)
        tokens = generate(two, max_tokens=20, mode="tree")
        one.reset()
        one.restore(snapshot)
        assert generate(one, max_tokens=20, mode="tree") == tokens


@pytest.mark.parametrize("way", WAYS)
def test_several_sequences(config, one: Solo, way: str) -> None:
    with Solo.load(replace(config, **WAYS[way])) as two:
        for engine in (one, two):
            engine.slot.close()
        prompts = [PROMPT[:9], PROMPT[:50], PROMPT[5:25]]
        try:
            batches = [logits_batched(e, prompts, ("tree", "plain", "tree"), 20) for e in (one, two)]
            assert [tokens for tokens, _ in batches[0]] == [tokens for tokens, _ in batches[1]]
        finally:
            for slot in [*one.slots, *two.slots]:
                slot.close()


@pytest.mark.parametrize("way", WAYS)
def test_the_plan_is_exact(config, way: str) -> None:
    with Solo.load(replace(config, **WAYS[way])) as two:
        found, planned = two.nbytes, two.memory.all_parts
        for name, size in planned.items():
            if size and not name.startswith(("graphs", "lent experts", "wide matmuls")):
                assert found[name] == size, name
        assert len(two.memory.devices) == 2 and all(plan.fits for plan in two.memory.devices)


def test_graphs_are_few_and_no_pass_waits(config) -> None:
    """A part a device in a plain pass, and what crosses is copied from one GPU to the other."""
    with Solo.load(replace(config, draft=None, spec=(), **WAYS["layers"])) as two:
        generate(fresh(two, PROMPT), max_tokens=4, mode="plain")
        waits: list[int] = []
        for side in two.device.sides:
            finish = side.finish
            side.finish = lambda i=side.index, f=finish: waits.append(i) or f()  # type: ignore[method-assign]
        graph = next(g for key, g in two.passes.graphs if key[:2] == ("linear", 1))
        graph.run()
        assert waits == []
        assert sum("run" in str(action) for action in graph._split._actions) == 2
