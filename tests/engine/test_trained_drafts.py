"""Tests of trained drafts of every kind: output is the target's own, and drafted tokens are accepted. 15 seconds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.drafts.mtp.convert import write_with_head
from dflash_ggml.files.gguf import GGUFFile
from reference.engine_kit import Solo

TRAINED = Path(__file__).resolve().parents[1] / "fixtures" / "trained"
PROMPTS = Path(__file__).resolve().parents[2] / "src" / "dflash_ggml" / "data" / "prompts" / "python.jsonl"
N_PROMPTS, N_TOKENS = 3, 24
KINDS = ("dflash2", "dspark", "mtp")


@pytest.fixture(scope="module")
def with_head(f32_target: Path, model_dir: Path) -> Path:
    """The embedded target in float32 with its trained prediction head."""
    out = model_dir / "target-with-head.gguf"
    with GGUFFile(f32_target) as file:
        write_with_head(TRAINED / "demo-head", file, out)
    return out


def outputs(engine: Solo, mode: str) -> tuple[list[list[int]], int]:
    """Greedy outputs of a few prompts, and the passes that they took."""
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()[:N_PROMPTS]
    found, passes = [], 0
    for line in lines:
        engine.reset()
        engine.prefill(engine.tokenizer.encode(json.loads(line)["prompt"]))
        sampler = Sampler(SamplingParams(temperature=0), engine.n_vocab)
        steps = list(engine.generate(sampler, max_tokens=N_TOKENS, mode=mode, stop=lambda token: False))  # type: ignore[arg-type]
        found.append([token for step in steps for token in step.tokens])
        passes += len(steps)
    return found, passes


@pytest.mark.parametrize("kind", KINDS)
def test_it_drafts_what_the_target_writes(kind: str, f32_target: Path, with_head: Path) -> None:
    """In float32 the outputs are the target's own to the last token, in fewer passes."""
    is_head = kind == "mtp"
    config = EngineConfig(
        with_head if is_head else f32_target,
        None if is_head else TRAINED / f"demo-{kind}-q8_0.gguf",
        n_ctx=512,
        n_threads=1,
        budget=15,
        spec=(kind,),
        type_k="f32",
        type_v="f32",
        calibrate="never",
    )
    check(config)


def test_a_target_with_experts_has_a_draft() -> None:
    """64 experts of which 8 are used, with a router that was trained: trees whose nodes want different experts."""
    target, draft = (TRAINED / f"moe-{name}-q8_0.gguf" for name in ("target", "draft"))
    check(EngineConfig(target, draft, n_ctx=512, n_threads=1, budget=15, reference=True, calibrate="never"))


def check(config: EngineConfig) -> None:
    """Chains and trees write what plain decoding does, in fewer passes, trees in the fewest."""
    with Solo.load(config) as engine:
        assert engine.drafter is not None
        plain, _ = outputs(engine, "plain")
        chain, of_chains = outputs(engine, "chain")
        tree, of_trees = outputs(engine, "tree")
    assert chain == plain and tree == plain
    assert N_PROMPTS * N_TOKENS / of_chains > 1.2, "a chain has a good part of its tokens accepted"
    assert of_trees < 0.95 * of_chains, "and a tree more"
    assert len(np.unique(plain)) > 12, "the texts are no repetition of a few tokens"
