"""Tests of targets with experts, `qwen35moe` and `qwen3next`: against transformers and llama.cpp, and across their own modes. 12
seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fixtures
from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling_params import SamplingParams
from dflash_ggml.session.events import Begin, TextDelta
from dflash_ggml.session.requests import CompletionRequest
from dflash_ggml.session.session import Session, run_completion
from dflash_ggml.state.memory import GRAPHS, SCRATCH
from fixtures import hf_layout
from reference import expert_files, toys
from reference.engine_kit import Solo, fresh, generate

SEEDS = toys.MOE_VARIANTS
LONG = [i * 7 % 50 for i in range(90)]


@pytest.fixture(scope="module", params=SEEDS)
def seed(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def pair(seed: int, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return toys.write_pair(tmp_path_factory.mktemp("experts"), seed, **SEEDS[seed])


def config(target: Path, draft: Path | None = None, **options: Any) -> EngineConfig:
    exact = {"type_k": "f32", "type_v": "f32", "n_threads": 1, "calibrate": "never", "reference": True}
    return EngineConfig(target, draft, **({"n_ctx": 256, "budget": 15} | exact | options))


def logits(path: Path, tokens: list[int], *parts: int, **options: Any) -> np.ndarray:
    """Logits behind the tokens, read in parts of such sizes."""
    with Solo.load(config(path, **options)) as engine:
        for end, size in zip(np.cumsum(parts), parts, strict=True):
            engine.prefill(tokens[end - size : end])
        return engine.logits.copy()


@pytest.mark.parametrize("reference", [True, False], ids=["plain kernels", "best kernels"])
def test_logits_of_others(seed: int, pair: tuple[Path, Path], reference: bool) -> None:
    """Behind 1, 20 and 70 tokens."""
    case = fixtures.moe_case(seed)
    embedding = hf_layout.read(pair[0]).tensors["token_embd.weight"].astype(np.float64)
    assert np.abs(embedding).sum() == pytest.approx(case.checksum), (
        "numpy draws other weights: make the fixture again"
    )
    for at, *expected in zip(case.at, case.transformers.logits, case.llama_cpp.logits, strict=True):
        found = logits(pair[0], case.tokens, at + 1, reference=reference)
        for row in expected:
            np.testing.assert_allclose(found, row, atol=1e-4)


def test_greedy_tokens_of_others(seed: int, pair: tuple[Path, Path]) -> None:
    """100, plainly, with a draft's trees, and with its chains."""
    case = fixtures.moe_case(seed)
    with Solo.load(config(*pair)) as engine:
        for mode in ("plain", "tree", "chain"):
            found = generate(fresh(engine, case.tokens[: case.n_prompt]), max_tokens=100, mode=mode)
            assert found == case.transformers.greedy == case.llama_cpp.greedy


@pytest.mark.parametrize("parts", [(70,), (1, 69), (7, 1, 30, 32), (1,) * 70], ids=str)
def test_batches(seed: int, pair: tuple[Path, Path], parts: tuple[int, ...]) -> None:
    """However the tokens are cut, and however wide a pass is."""
    case = fixtures.moe_case(seed)
    for n_batch in (3, 64):
        found = logits(pair[0], case.tokens, *parts, n_batch=n_batch)
        np.testing.assert_allclose(found, case.transformers.logits[-1], atol=1e-4)


def test_a_second_turn_prefills_what_is_new(pair: tuple[Path, Path]) -> None:
    """From the prefix cache: the same answers, and most of the prompt known."""

    def ask(session: Session, prompt: list[int]) -> tuple[int, str]:
        request = CompletionRequest(prompt=prompt, sampling=SamplingParams(temperature=0.0), max_tokens=12)
        events = list(run_completion(session, request))
        begin = next(event for event in events if isinstance(event, Begin))
        return begin.cached_n, "".join(event.text for event in events if isinstance(event, TextDelta))

    prompts = [LONG, LONG[::-1], LONG + LONG[:20]]
    answers = []
    for nbytes in (0, 1 << 26):
        with Solo.load(config(*pair, n_ctx=512)) as engine:
            session = Session(engine, cache_bytes=nbytes)
            answers.append([ask(session, prompt) for prompt in prompts])
    assert [words for _, words in answers[0]] == [words for _, words in answers[1]]
    assert answers[1][-1][0] > 60


def test_dialects_of_qwen3next(tmp_path: Path) -> None:
    """Files with `ssm_in`, with `attn_qkv`, and those of `qwen35moe`, with value heads in another order, are one model."""
    sizes = SEEDS[23] | {"ssm_v_heads": 6, "state": 32}
    new, old = (
        toys.write_pair(_made(tmp_path / name), 3, **sizes, old=name == "old")[0] for name in ("new", "old")
    )
    tokens = list(range(1, 50))
    expected = logits(new, tokens, 49)
    np.testing.assert_array_equal(logits(old, tokens, 49), expected)
    moe = expert_files.as_qwen35moe(new, tmp_path / "moe.gguf")
    np.testing.assert_allclose(logits(moe, tokens, 49), expected, atol=1e-5)


def test_one_matrix_for_gate_and_up(tmp_path: Path) -> None:
    sizes = SEEDS[21]
    apart = toys.write_pair(_made(tmp_path / "apart"), 3, **sizes)[0]
    tokens = list(range(1, 50))
    joined = expert_files.with_joined_experts(apart, tmp_path / "joined.gguf", blocks=(0, 3))
    np.testing.assert_array_equal(logits(joined, tokens, 49), logits(apart, tokens, 49))


def test_scales_of_experts(tmp_path: Path) -> None:
    """As NVFP4 files have them: one for each expert multiplies its matmuls, and powers of two do so without rounding. Those of
    `ssm_ba` and `ssm_in` are of all that is made of them."""
    for seed in (21, 23, 25):
        plain = toys.write_pair(_made(tmp_path / str(seed)), seed, nextn=True, **SEEDS[seed])[0]
        keys, w = expert_files.contents(plain)
        rng = np.random.default_rng(seed)
        for name in [
            n
            for n in w
            if n.endswith(("_exps.weight", "ssm_ba.weight", "ssm_in.weight", "gate_shexp.weight"))
        ]:
            scale = np.exp2(rng.integers(-3, 4, len(w[name]) if w[name].ndim == 3 else 1)).astype(np.float32)
            w[name] = w[name] / (scale[:, None, None] if w[name].ndim == 3 else scale)
            w[name.replace("weight", "scale")] = scale
            w[name.replace("weight", "input_scale")] = np.full_like(scale, 7)
        scaled = expert_files.write(tmp_path / f"{seed}.gguf", keys, w)
        tokens, output = list(range(1, 50)), []
        for path in (plain, scaled):
            with Solo.load(config(path)) as engine:
                output.append(generate(fresh(engine, tokens), max_tokens=30, mode="tree"))
                assert engine.sequence.statistics.drafted
        np.testing.assert_array_equal(logits(scaled, tokens, 49), logits(plain, tokens, 49))
        assert output[0] == output[1]


@pytest.mark.parametrize("window", [None, 16])
def test_drafts_of_eight_layers(tmp_path: Path, window: int | None) -> None:
    """As the published ones have them, with as many taps; those with windows have them on all layers but the last."""
    taps = (1, 3, 5, 6, 8, 9, 10, 11)
    sizes = SEEDS[21] | {"n_layers": 12, "taps": taps, "draft_layers": 8, "window": window, "full_layers": 1}
    pair = toys.write_pair(tmp_path, 6, **sizes)
    with Solo.load(config(*pair)) as engine:
        plain = generate(fresh(engine, LONG), max_tokens=60, mode="plain")
        assert generate(fresh(engine, LONG), max_tokens=60, mode="tree") == plain
        assert engine.sequence.statistics.acceptance_length > 1.1


def test_as_many_nodes_as_the_largest(tmp_path: Path) -> None:
    """60 layers, 10 experts used, taps, a tree, and a prompt that a draft takes in part by part: all in one graph."""
    sizes = {
        "arch": "qwen35moe",
        "n_layers": 60,
        "n_embd": 8,
        "n_ff": 8,
        "n_ff_shared": 8,
        "n_experts": 12,
        "n_used": 10,
    }
    sizes |= {
        "head_dim": 8,
        "n_rot": 4,
        "state": 4,
        "n_vocab": 16,
        "draft_layers": 8,
        "taps": tuple(range(1, 57, 8)),
    }
    pair = toys.write_pair(tmp_path, 7, **sizes)
    with Solo.load(config(*pair, n_batch=1100, n_ctx=1200)) as engine:
        engine.prefill([i % 10 for i in range(1100)])
        assert len(generate(engine, max_tokens=8, mode="tree")) == 8
        assert max(graph.n_nodes for _, graph in engine.passes.graphs) > 4000


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_quantised_caches(pair: tuple[Path, Path]) -> None:
    """With rotated rows of keys and values too, every mode writes the same."""
    with Solo.load(config(*pair, type_k="q8_0", type_v="q4_0")) as engine:
        plain = generate(fresh(engine, LONG), max_tokens=60, mode="plain")
        for mode in ("tree", "auto"):
            assert generate(fresh(engine, LONG), max_tokens=60, mode=mode) == plain


def test_measured_costs_and_prompt_lookup(pair: tuple[Path, Path]) -> None:
    """What is measured at loading, and text that stood before, change no text."""
    with Solo.load(config(*pair, mode="plain")) as engine:
        plain = generate(fresh(engine, LONG), max_tokens=60)
    with Solo.load(config(*pair, calibrate="always")) as engine:
        assert engine.lookup is not None
        assert generate(fresh(engine, LONG), max_tokens=60) == plain


def test_what_is_taken_is_planned(pair: tuple[Path, Path]) -> None:
    """To the byte, but for the scratch memory, which stays within its estimate."""
    with Solo.load(config(*pair, n_batch=512, n_ctx=1024)) as engine:
        planned, taken = engine.memory.parts, engine.nbytes
    assert taken.pop(SCRATCH) <= planned[GRAPHS]
    assert taken == {name: planned[name] for name in taken}
