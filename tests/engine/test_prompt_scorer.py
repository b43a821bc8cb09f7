"""Tests of the prompt scorer on a device: masses against a float64 reference, chunks, prefixes, memory, and invalid files."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.engine import memory_planner
from dflash_ggml.engine.engine import Engine
from dflash_ggml.engine.kv_types import KvTypes, kv_types
from dflash_ggml.engine.scorer import QUESTION, Scorer, scorer_beside
from dflash_ggml.errors import ConfigError, DeviceError, ModelFileError
from dflash_ggml.state.kv_type import KvType
from reference import toys
from reference.numpy_scorer import Model

# number of the block that scores, and fields of `Toy`
SIZES: dict[int, tuple[int, dict[str, Any]]] = {
    11: (3, {}),
    12: (7, toys.VARIANTS[12]),
    13: (3, toys.VARIANTS[13]),
    17: (15, {"n_layers": 18, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32, "tied": True}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scorers")


@pytest.fixture(scope="module")
def config(folder: Path) -> EngineConfig:
    target, draft = toys.write_pair(folder, 3, n_vocab=64)
    options: dict[str, Any] = {"n_threads": 1, "calibrate": "never", "budget": 8, "n_batch": 64}
    return EngineConfig(target, draft, n_ctx=512, prompt_keep=0.5, **options)


@pytest.fixture(scope="module", params=SIZES)
def scored(request, folder: Path, config: EngineConfig) -> Iterator[tuple[Engine, Scorer, Model, int]]:
    block, sizes = SIZES[request.param]
    path = toys.write_pair(folder, request.param, **sizes)[0]
    with Engine.load(replace(config, scorer=path, reference=True)) as engine:
        assert engine.scorer is not None
        yield engine, engine.scorer, Model(path), block


def masses(engine: Engine, ids: list[int], window: int, most: int | None = None) -> np.ndarray:
    assert engine.scorer is not None
    with engine.held():
        engine.scorer.begin(ids, window)
        while engine.scorer.advance(most):
            pass
        return engine.scorer.masses()


def some(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 60, n).tolist()


@pytest.mark.parametrize("window", [1, 21])
def test_masses_are_those_of_the_reference(scored: tuple[Engine, Scorer, Model, int], window: int) -> None:
    engine, _, model, block = scored
    ids = some(window, 150)
    expected = model.masses(ids, window, block)
    found = masses(engine, ids, window)
    assert found.dtype == np.float32 and abs(found.sum() - 1) < 1e-5
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-7)
    # in chunks of any size, which part the window too
    np.testing.assert_allclose(masses(engine, ids, window, 9), expected, rtol=2e-3, atol=1e-7)


@pytest.mark.parametrize("number", [12, 17])
def test_masses_hardly_depend_on_the_type_of_the_caches(
    folder: Path, config: EngineConfig, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Caches in q8_0, as on a GPU that has no room for more; the keys that are looked at stay as they are."""
    block, sizes = SIZES[number]
    path = toys.write_pair(folder, number, **sizes)[0]

    def smaller(*args: Any) -> list[KvTypes]:
        return [replace(types, scorer=KvType.named("q8_0", "q8_0")) for types in kv_types(*args)]

    monkeypatch.setattr(memory_planner, "kv_types", smaller)
    with Engine.load(replace(config, scorer=path, reference=True)) as engine:
        ids = some(2, 400)
        found, expected = masses(engine, ids, 21), Model(path).masses(ids, 21, block)
        planned = engine.memory.all_parts
        assert {name: size for name, size in engine.nbytes.items() if size != planned.get(name)}.keys() <= {
            "scratch"
        }
    errors = found / expected - 1
    assert 0 < np.sqrt(np.mean(errors**2)) < 0.01 and np.abs(errors).max() < 0.1


def test_a_prompt_that_goes_on_is_not_begun_anew(scored: tuple[Engine, Scorer, Model, int]) -> None:
    engine, scorer, *_ = scored
    ids = some(5, 120)
    masses(engine, ids[:80], 8)
    assert scorer.begin(ids, 30) == 80
    while scorer.advance(16):
        pass
    found = scorer.masses()
    assert scorer.begin(ids, 60) == 0  # its window would begin before what is known
    np.testing.assert_allclose(found, masses(engine, ids, 30), rtol=1e-4, atol=1e-8)
    assert scorer.begin(some(6, 200), 8) == 0


def test_prompts_that_do_not_fit_are_refused(scored: tuple[Engine, Scorer, Model, int]) -> None:
    _, scorer, *_ = scored
    assert scorer.limit >= 2 * 512 + QUESTION
    for n, window in ((scorer.limit + 1, 8), (20, 0), (8, 8), (400, QUESTION + 1)):
        with pytest.raises(ConfigError, match="prompt scorer"):
            scorer.begin(some(1, n), window)


def test_the_plan_is_what_is_allocated(scored: tuple[Engine, Scorer, Model, int]) -> None:
    engine, *_ = scored
    planned, found = engine.memory.all_parts, engine.nbytes
    assert {name for name in found if name.startswith("scorer")} == {
        f"scorer {part}" for part in ("weights", "K/V", "state", "keys")
    }
    assert {name: planned[name] for name in found if name != "scratch"} == {
        name: size for name, size in found.items() if name != "scratch"
    }


def test_the_target_is_as_without_a_scorer(
    scored: tuple[Engine, Scorer, Model, int], config: EngineConfig
) -> None:
    engine, *_ = scored
    ids = some(7, 100)
    with Engine.load(replace(config, reference=True)) as alone:
        rows = []
        for one in (alone, engine):
            slot = one.open()
            slot.prefill(ids[:60])
            if one is engine:
                masses(engine, some(8, 300), 20)
            slot.prefill(ids[60:])
            rows.append(slot.logits.tobytes())
            slot.close()
    assert rows[0] == rows[1]


def test_nonfinite_masses_are_dropped(folder: Path, config: EngineConfig) -> None:
    path = toys.write_pair(folder, 18, tied=True)[0]
    with Engine.load(replace(config, scorer=path)) as engine:
        scorer: Any = engine.scorer
        ids = some(9, 90)
        expected = masses(engine, ids, 10)
        scorer.begin(some(10, 90), 10)
        scorer.advance()
        while scorer.advance():
            pass
        engine.device.write(scorer._memory.keys, np.full(64, np.nan, np.float32))
        assert not np.isfinite(scorer.masses()).all()
        np.testing.assert_array_equal(masses(engine, ids, 10), expected)


@pytest.mark.parametrize("is_found", [True, False])
def test_a_scorer_that_is_none(
    folder: Path, config: EngineConfig, is_found: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """One that was found never stops a start; one that was named does."""
    bad = folder / "bad.gguf"
    bad.write_bytes(b"GGUF and no more")
    moe = toys.write_pair(folder, 21, **toys.MOE_VARIANTS[21])[0]
    for path in (bad, moe, folder / "missing.gguf"):
        named = replace(config, scorer=path, scorer_found=is_found)
        if is_found:
            caplog.clear()
            with caplog.at_level(logging.WARNING), Engine.load(named) as engine:
                assert engine.scorer is None and engine.config.scorer is None
            assert len([r for r in caplog.messages if "scored lexically" in r]) == 1
        else:
            with pytest.raises(ModelFileError, match=path.name):
                Engine.load(named)


def test_a_scorer_that_does_not_fit(
    folder: Path, config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = toys.write_pair(folder, 11)[0]

    def start(*args: Any) -> None:
        raise DeviceError("no room for 7 MiB")

    monkeypatch.setattr("dflash_ggml.engine.scorer.ScorerSource.start", start)
    with pytest.raises(DeviceError):
        Engine.load(replace(config, scorer=path))
    with (
        caplog.at_level(logging.WARNING),
        Engine.load(replace(config, scorer=path, scorer_found=True)) as engine,
    ):
        assert engine.scorer is None and engine.drafter is not None
    assert "no room for 7 MiB" in caplog.text and "scored lexically" in caplog.text


def test_a_scorer_is_found_by_its_name(tmp_path: Path) -> None:
    target = tmp_path / "Qwen3.5-27B-Q4_K_M.gguf"
    assert scorer_beside(target) is None
    for name in (
        "Qwen3.5-0.8B-Q4_K_M.gguf",
        "Qwen3.5-0.8B-BF16.gguf",
        "mmproj-Qwen3.5-0.8B.gguf",
        "Qwen3.5-2B.gguf",
    ):
        (tmp_path / name).touch()
    assert scorer_beside(target) == tmp_path / "Qwen3.5-0.8B-BF16.gguf"
    assert scorer_beside(tmp_path / "Qwen3.5-0.8B-BF16.gguf") == tmp_path / "Qwen3.5-0.8B-Q4_K_M.gguf"
