"""Tests of the engine with our operations composed of ggml's own, against the native ones: every kind of target and draft. 30 s.

Float32 throughout, so that outputs are equal: logits of the two differ by the order of their sums, some 1e-6 of the largest, and
toys have no ties so near.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_batches_of_sequences import KINDS, foretell, some_jobs, write, write_beside

from dflash_ggml.config import EngineConfig
from dflash_ggml.engine import memory_planner
from dflash_ggml.state.memory import GRAPHS, SCRATCH
from reference import kv_toys, toys
from reference.engine_kit import EXACT, AnyPlan, Solo, fresh, generate

IDS = np.random.default_rng(3).integers(0, 60, 150).tolist()  # crosses batches, windows and rings
RECURRENT = {
    "convolutions of trees",
    "commits of convolutions",
    "delta nets of trees",
    "commits of delta nets",
}


@pytest.fixture(scope="module", params=KINDS)
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Solo, Solo]]:
    """Kind, native, composed."""
    sizes, options = KINDS[request.param]
    write_pair = kv_toys.write_pair if "kv_toy" in sizes else toys.write_pair
    sizes = {name: size for name, size in sizes.items() if name != "kv_toy"}
    pair = write_pair(tmp_path_factory.mktemp("pair"), 90 + list(KINDS).index(request.param), **sizes)
    config = replace(EngineConfig(*pair, n_ctx=700, parallel=4, n_batch=64, budget=20, **EXACT), **options)
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(memory_planner, "has_own_memory", lambda device: "n_cpu_moe" in options)
        native, composed = (
            stack.enter_context(Solo.load(replace(config, stock=is_stock))) for is_stock in (False, True)
        )
        yield request.param, native, composed


def test_outputs_of_every_mode(engines: tuple[str, Solo, Solo]) -> None:
    _, native, composed = engines
    fresh(native, IDS)
    fresh(composed, IDS)
    np.testing.assert_allclose(composed.logits, native.logits, atol=2e-5 * np.abs(native.logits).max())
    expected = generate(fresh(native, IDS), max_tokens=50, mode="plain")
    modes = ("plain", "chain", "tree") if composed.sources else ("plain",)
    for mode in modes:
        assert generate(fresh(composed, IDS), max_tokens=50, mode=mode) == expected, mode


def test_several_sequences(engines: tuple[str, Solo, Solo], monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees of any width, whose paths are accepted where a draft can be given the output."""
    _, native, composed = engines
    jobs = some_jobs(composed, 4, seed=11)
    expected = [job.alone(native) for job in jobs]
    if composed.can_join:
        write_beside(composed, again := some_jobs(composed, 4, seed=11))
        assert [job.written for job in again] == expected
    if composed.sources:
        monkeypatch.setattr(composed.stepper, "policy", AnyPlan(composed, seed=5))
    if composed.drafter:
        foretell(composed, jobs, expected, monkeypatch)
    assert write(composed, jobs, seed=4) > 1
    assert [job.written for job in jobs] == expected
    found = composed.device.composed
    assert "attention over ranges" in found and not native.device.composed
    if composed.passes.state.spec.recurrent and composed.sources:
        assert found >= RECURRENT


def test_scratch_memory_stays_within_the_plan(engines: tuple[str, Solo, Solo]) -> None:
    _, _, composed = engines
    assert composed.nbytes[SCRATCH] <= composed.memory.parts[GRAPHS]


@pytest.mark.parametrize("types", [("f16", "f16"), ("q8_0", "q4_0")], ids="/".join)
def test_caches_of_fewer_bits(toy_pair: tuple[Path, Path], types: tuple[str, str]) -> None:
    """ggml's attention on the CPU rounds queries to the keys' type, q8_0 by 1/254 of a block's largest element at most, and
    adds values up in float16: below 1 % of the largest logit for toys, of which softmax and norms leave a part."""
    options = {**EXACT, "type_k": types[0], "type_v": types[1]}
    config = EngineConfig(*toy_pair, n_ctx=300, n_batch=64, **options)
    rows = []
    for is_stock in (False, True):
        with Solo.load(replace(config, stock=is_stock)) as engine:
            rows.append(fresh(engine, IDS).logits.copy())
    assert np.abs(rows[0] - rows[1]).max() < 1e-2 * np.abs(rows[0]).max()


@pytest.mark.parametrize("n_batch, budget", [(512, 31), (1500, 63)])
def test_graphs_take_about_what_is_estimated(
    demo_target: Path, demo_draft: Path, n_batch: int, budget: int
) -> None:
    sizes = {"n_ctx": 2000, "n_batch": n_batch, "budget": budget}
    with Solo.load(
        EngineConfig(
            demo_target, demo_draft, n_threads=1, n_gpu_layers=0, calibrate="never", stock=True, **sizes
        )
    ) as engine:
        engine.prefill([7] * 1900)
        generate(engine, mode="tree", budget=budget, max_tokens=3)
        assert 0.9 < engine.memory.parts[GRAPHS] / engine.nbytes[SCRATCH] < 2.5
