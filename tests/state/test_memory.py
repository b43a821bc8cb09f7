"""Tests of the memory plan: the longest context that fits, errors, and equality of planned and allocated memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.engine.memory_planner import DRIVER, memory_free
from dflash_ggml.errors import DeviceError
from dflash_ggml.files.gguf import GGUFFile
from dflash_ggml.ggml.device import F16, DeviceInfo
from dflash_ggml.models.registry import read_target
from dflash_ggml.state.kv_type import KvType
from dflash_ggml.state.memory import GRAPHS, MARGIN, MIB, SCRATCH, MemoryPlan, Part, fit, plan
from dflash_ggml.state.state import state_parts
from reference.engine_kit import Solo
from reference.toys import write_pair


@pytest.fixture(scope="module")
def parts(demo_target) -> list[Part]:
    with GGUFFile(demo_target) as f:
        spec = read_target(f).state_spec()
    return [Part("target weights", lambda rows: 1 << 20), *state_parts(spec, 32, KvType(F16, F16), 0, 0)]


@pytest.mark.parametrize("longest", [100, 1000, 4096])
def test_the_trained_length_is_taken_when_it_fits(parts, longest):
    for share in (1.0, 0.5):
        assert fit(parts, 1, 1 << 40, longest, share).n_ctx == longest


def test_the_longest_context_that_fits(parts):
    free = plan(parts, 1, 5000, 0).total + MARGIN
    found = fit(parts, 1, free, 100_000)
    assert found.fits and not plan(parts, 1, found.n_ctx + 256, free).fits


def test_a_context_takes_a_share_of_what_others_use_too(parts):
    """Half of what weights and the rest leave; but never less than 4,096 tokens, which cost only what is used of them."""
    fixed = plan(parts, 1, 0, 0).total + MARGIN
    of_tokens = plan(parts, 1, 20_000, 0).total + MARGIN - fixed
    found = fit(parts, 1, fixed + 2 * of_tokens, 100_000, share=0.5)
    assert 20_000 - 256 <= found.n_ctx <= 20_000
    for free in (0, fixed // 2, fixed + of_tokens // 10):
        assert fit(parts, 1, free, 100_000, share=0.5).n_ctx == 4096
    assert fit(parts, 1, 0, 1000, share=0.5).n_ctx == 1000


@pytest.mark.parametrize("longest", [4096, 100])
def test_too_little_memory_is_an_error(parts, longest):
    with pytest.raises(DeviceError, match="not enough device memory"):
        fit(parts, 1, MARGIN, longest)


def test_the_error_names_the_largest_part_and_what_to_do(parts):
    with pytest.raises(DeviceError, match="largest part is target K/V: lower the context"):
        plan(parts, 1, 1_000_000, MARGIN).check(parts)


@pytest.mark.parametrize(
    "types", [("f16", "f16"), ("f32", "f32"), ("q8_0", "q4_0"), ("bf16", "q5_1")], ids="/".join
)
@pytest.mark.parametrize("budget", [None, 63])
@pytest.mark.parametrize("which", ["demo", "toy", "windows"])
def test_the_plan_is_what_is_allocated(request, which, budget, types):
    """To the byte and part for part, weights, masks and rings included, before and after use; only the graphs' scratch memory is
    an estimate. budget None: without a draft."""
    pairs = {"demo": ("demo_target", "demo_draft"), "toy": ("toy_pair",), "windows": ("windowed_pair",)}
    found = [request.getfixturevalue(name) for name in pairs[which]]
    target, draft = found if len(found) == 2 else found[0]
    config = EngineConfig(
        target,
        None if budget is None else draft,
        n_ctx=1000,
        budget=budget or 1,
        type_k=types[0],
        type_v=types[1],
        n_threads=1,
        n_gpu_layers=0,
        calibrate="never",
    )
    with Solo.load(config) as e:
        planned = dict(e.memory.parts)
        del planned[GRAPHS]
        assert bool(e.drafter and e.drafter.rings) == (which == "windows" and budget is not None)
        for _ in range(2):
            allocated = e.nbytes
            del allocated[SCRATCH]
            assert allocated == planned
            e.prefill([0] * 300)
        assert "planned 0.0" not in e.memory.against(e.nbytes)
        assert f"{sum(planned.values()) / MIB:.0f} MiB allocated as planned" in e.memory.against(e.nbytes)


@pytest.fixture(scope="module")
def windowed_pair(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("windows"), 9, window=100, full_layers=1, draft_layers=3)


def test_a_difference_from_the_plan_is_reported():
    parts = {"weights": 5 * MIB, "target K/V": MIB, GRAPHS: 3 * MIB, "wide matmuls": MIB, "mask": 0}
    found = MemoryPlan(100, parts, 0)
    text = found.against({"weights": 5 * MIB, "target K/V": 2 * MIB, SCRATCH: MIB})
    assert text == (
        "5 MiB allocated as planned; target K/V 2.0 MiB, planned 1.0; scratch 1.0 MiB, planned 3.0; "
        "wide matmuls 1.0 MiB planned, not counted"
    )


@pytest.mark.parametrize("n_batch, budget", [(512, 31), (1500, 63)])
def test_graphs_take_about_what_is_estimated(demo_target, demo_draft, n_batch, budget):
    config = EngineConfig(
        demo_target,
        demo_draft,
        n_ctx=2000,
        n_batch=n_batch,
        budget=budget,
        n_threads=1,
        n_gpu_layers=0,
        calibrate="never",
    )
    with Solo.load(config) as e:
        e.prefill([7] * 1900)
        sampler = Sampler(SamplingParams(temperature=0), e.n_vocab)
        next(e.generate(sampler, mode="tree", budget=budget))
        assert 0.9 < e.memory.parts[GRAPHS] / e.nbytes[SCRATCH] < 2.5


@pytest.mark.parametrize(
    "limit, expected",
    [
        (None, 20 << 30),
        (8 << 30, (8 << 30) - DRIVER),
        (22 << 30, 20 << 30),
        (0.5, (12 << 30) - DRIVER),
        (1, 0),
        (1.0, 20 << 30),
    ],
)
def test_a_limit_holds_what_the_driver_takes_too(limit, expected):
    """Of a GPU with 24 GiB, 20 of them free. A whole 1 is one byte, 1.0 is everything."""
    info = DeviceInfo("CUDA0", "", True, 20 << 30, 24 << 30, None)
    assert memory_free(SimpleNamespace(info=info, is_gpu=True), limit) == expected
