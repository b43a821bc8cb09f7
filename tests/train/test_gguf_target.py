"""Tests of GGUF files as frozen torch models against transformers' logits of the same toys. Needs torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fixtures
from dflash_ggml.config import EngineConfig
from dflash_ggml.errors import ModelFileError
from reference import kv_toys
from reference.engine_kit import EXACT, Solo, fresh, generate

torch = pytest.importorskip("torch")
from dflash_ggml.train import cli as command  # noqa: E402
from dflash_ggml.train.gguf_target import GGUFTarget, open_target  # noqa: E402

CASES = {case.seed: case for case in fixtures.kv_toy_cases() if case.oracle == "transformers"}
SEEDS = [21, 22, 41, 46]  # qwen3 and llama, with an output matrix and without


def opened(folder: Path, seed: int, **changes: Any) -> GGUFTarget:
    path = kv_toys.write_target(folder, seed, **{**kv_toys.VARIANTS[seed], **changes})
    found = open_target(path, "cpu", torch.float32)
    assert isinstance(found, GGUFTarget)
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_logits_are_those_of_transformers(tmp_path: Path, seed: int) -> None:
    target, case = opened(tmp_path, seed), CASES[seed]
    ids = torch.tensor([case.tokens])
    logits, _ = target.step(ids, None, ids.shape[1])
    np.testing.assert_allclose(logits[0], case.logits, atol=3e-4)
    greedy, cache, next_ids = [], None, ids
    for _ in range(len(case.greedy)):
        logits, cache = target.step(next_ids, cache, ids.shape[1] + len(case.greedy))
        greedy.append(int(logits.argmax()))
        next_ids = torch.tensor([[greedy[-1]]])
    assert greedy == case.greedy


@pytest.mark.parametrize("seed", SEEDS)
def test_features_are_what_the_logits_are_made_of(tmp_path: Path, seed: int) -> None:
    """Without taps the last layer behind the norm; a tapped layer's output is what the rest of the layers go on with."""
    target, case = opened(tmp_path, seed), CASES[seed]
    ids = torch.tensor([case.tokens])
    last = target.features(ids, ())
    np.testing.assert_allclose(last[0, -1] @ target.tables.head.T, case.logits, atol=3e-4)
    taps = (0, target.sizes.n_layers - 1)
    both = target.features(ids, taps)
    assert both.shape == (1, ids.shape[1], 2 * target.sizes.n_embd)
    np.testing.assert_allclose(target._normed(both[..., target.sizes.n_embd :], target.norm), last, atol=1e-5)
    first = opened(tmp_path, seed)
    first.blocks = first.blocks[:1]
    np.testing.assert_allclose(
        target._normed(both[..., : target.sizes.n_embd], target.norm), first.features(ids, ()), atol=1e-5
    )


def test_sizes_and_the_tokens_of_a_file(tmp_path: Path) -> None:
    target = opened(tmp_path, 46)
    toy = kv_toys.KvToy(**kv_toys.VARIANTS[46])
    s = target.sizes
    assert (s.n_layers, s.n_embd, s.n_ff, s.n_vocab) == (toy.n_layers, toy.n_embd, toy.n_ff, toy.n_vocab)
    assert target.tables.head is target.tables.embedding
    assert 0 <= target.mask_id() < s.n_vocab
    assert target.encode(["ab"])[0] != target.encode(["ba"])[0]


@pytest.mark.parametrize(
    "seed, message",
    [
        (24, "qwen3moe"),
        (42, "rope.scaling.type"),
        (43, "scaled rotary"),
        (44, "sliding_window"),
        (61, "gemma3"),
    ],
)
def test_what_it_cannot_compute_is_refused_by_name(tmp_path: Path, seed: int, message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        opened(tmp_path, seed)


def test_a_draft_is_trained_from_the_file_alone(tmp_path: Path, texts: Path) -> None:
    path = kv_toys.write_target(tmp_path, 46, **kv_toys.VARIANTS[46])
    options = f"--data {texts} --own-text 400 --prompt 8 --write-batch 4 --length 32 --anchors 4 --batch 2 --steps 3"
    shape = (
        "--layers 1 --ffn 64 --heads 2 --kv-heads 1 --head-dim 32 --block 4 --mask-id 1 --held 2 --device cpu"
    )
    assert command.main([str(path), "-o", str(tmp_path / "draft"), *options.split(), *shape.split()]) == 0
    with Solo.load(EngineConfig(path, tmp_path / "draft", mode="chain", budget=3, **EXACT)) as engine:
        drafted = generate(fresh(engine, [5, 6, 7, 8]), max_tokens=12)
        assert drafted == generate(fresh(engine, [5, 6, 7, 8]), max_tokens=12, mode="plain")


def test_no_file_of_the_kind(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFileError):
        open_target(tmp_path / "model.gguf", "cpu", torch.float32)
