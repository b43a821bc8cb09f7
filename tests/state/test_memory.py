"""The memory plan: which context fits, what is said when none does, and that it is what is allocated."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.engine import loading
from dflash_ggml.engine.engine import Engine
from dflash_ggml.engine.kv_types import KvTypes
from dflash_ggml.errors import DeviceError
from dflash_ggml.files.gguf import GGUFFile
from dflash_ggml.ggml.device import F16
from dflash_ggml.models.registry import read_target
from dflash_ggml.state.kv_type import KvType
from dflash_ggml.state.memory import MARGIN, Part, fit, plan
from dflash_ggml.state.state import state_parts


@pytest.fixture(scope="module")
def parts(demo_target) -> list[Part]:
    with GGUFFile(demo_target) as f:
        spec = read_target(f).state_spec()
    return [Part("target weights", lambda rows: 1 << 20), *state_parts(spec, 32, KvType(F16, F16), 0, 0)]


@pytest.mark.parametrize("longest", [100, 1000, 4096])
def test_the_trained_length_is_taken_when_it_fits(parts, longest):
    assert fit(parts, 1, 0, 1 << 40, longest).n_ctx == longest


def test_the_longest_context_that_fits(parts):
    free = plan(parts, 1, 5000, 0).total + MARGIN
    found = fit(parts, 1, 0, free, 100_000)
    assert found.fits and not plan(parts, 1, found.n_ctx + 256, free).fits


@pytest.mark.parametrize("n_ctx, longest", [(4096, 4096), (0, 4096), (0, 100)])
def test_too_little_memory_is_an_error(parts, n_ctx, longest):
    with pytest.raises(DeviceError, match="not enough device memory"):
        fit(parts, 1, n_ctx, MARGIN, longest)


def test_the_error_names_the_largest_part_and_what_to_do(parts):
    with pytest.raises(DeviceError, match="largest part is target K/V: lower the context"):
        fit(parts, 1, 1_000_000, MARGIN, 4096)


@pytest.mark.parametrize(
    "types", [("f16", "f16"), ("f32", "f32"), ("q8_0", "q4_0"), ("bf16", "q5_1")], ids="/".join
)
@pytest.mark.parametrize("drafted", [True, False])
@pytest.mark.parametrize("which", ["demo", "toy"])
def test_the_plan_is_what_is_allocated(request, monkeypatch, types, drafted, which):
    """To the byte, weights and masks included; only the graphs' scratch memory is an estimate."""
    if which == "demo":
        target, draft = request.getfixturevalue("demo_target"), request.getfixturevalue("demo_draft")
    else:
        target, draft = request.getfixturevalue("toy_pair")
    planned: list[list[Part]] = []
    fill = loading.Weights.fill

    def plan_first(weights, progress=None, stage="weights"):
        if stage == "target":
            file, config = GGUFFile(target), EngineConfig(target)
            source = loading.open_draft(draft) if drafted else None
            if source:
                source.prepare(device)
            width = loading.tree_width(config.budget, source.depth if source else 0)
            planned.append(
                loading.memory_parts(
                    device,
                    read_target(file),
                    weights,
                    source,
                    KvTypes(KvType.named(*types), KvType.named(*types)),
                    width,
                    config.n_batch,
                )
            )
        return fill(weights, progress, stage)

    monkeypatch.setattr(loading.Weights, "fill", plan_first)
    device = loading.choose_device(EngineConfig(target, n_threads=1, n_gpu_layers=0))
    config = EngineConfig(
        target,
        draft if drafted else None,
        n_ctx=6000,
        type_k=types[0],
        type_v=types[1],
        n_threads=1,
        n_gpu_layers=0,
    )
    with Engine.load(config) as e:
        expected = {part.name: part.nbytes(e.passes.n_rows) for part in planned[0]}
        del expected["graphs (estimate)"]
        for _ in range(2):
            allocated = e.nbytes
            del allocated["scratch"]
            assert allocated == expected
            # the CPU is slow over rows of two types
            length = 4500 if types[0] == types[1] else 300
            e.prefill(np.zeros(length - e.n_tokens, int).tolist())
    device.close()
