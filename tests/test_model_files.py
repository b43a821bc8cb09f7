"""Tests that the model variants used by other tests have the content that they declare. About 10 seconds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader

from dflash_ggml.files.gguf import GGUFFile
from fixtures import hf_layout
from reference import model_files, toys


def test_float32_holds_the_dequantised_weights(demo_target: Path, f32_target: Path):
    quantised = hf_layout.read(demo_target)
    with GGUFFile(f32_target) as file:
        assert set(file.tensors) == set(quantised.tensors)
        for name, expected in quantised.tensors.items():
            assert file.tensors[name].type == Type.F32
            assert np.array_equal(file.data(name).view(np.float32), expected.reshape(-1)), name
        for key in ("qwen35.block_count", "qwen35.rope.freq_base", "tokenizer.ggml.eos_token_id"):
            assert file.metadata[key] == quantised.metadata[key]
        assert list(file.metadata["tokenizer.ggml.tokens"]) == quantised.metadata["tokenizer.ggml.tokens"]


def test_q4_k_m_mixes_types_like_the_stock_recipe(q4km_target: Path):
    tensors = GGUFReader(q4km_target).tensors
    by_type = {kind: {t.name for t in tensors if t.tensor_type == kind} for kind in (Type.Q4_K, Type.Q6_K)}
    layers = (0, 1, 4, 7, 10, 13, 14, 15)
    mixers = {f"blk.{i}.attn_v.weight" if i % 4 == 3 else f"blk.{i}.attn_qkv.weight" for i in layers}
    assert by_type[Type.Q6_K] == {"output.weight"} | {f"blk.{i}.ffn_down.weight" for i in layers} | mixers
    assert "token_embd.weight" in by_type[Type.Q4_K] and "blk.2.ffn_down.weight" in by_type[Type.Q4_K]


@pytest.mark.parametrize("kind", [Type.F16, Type.Q8_0, Type.Q5_1, Type.Q4_K, Type.Q6_K, Type.IQ4_NL])
def test_quantising_stays_close(demo_draft: Path, tmp_path: Path, kind: Type):
    path = model_files.uniform(demo_draft, tmp_path / "draft.gguf", kind)
    before, after = hf_layout.read(demo_draft).tensors, hf_layout.read(path).tensors
    for name, x in before.items():
        error = np.sqrt(np.mean((after[name] - x) ** 2) / np.mean(x**2))
        assert error < (0.1 if x.ndim == 2 else 1e-12), name


def test_toy_pair_is_a_valid_pair(toy_pair: tuple[Path, Path]):
    target, draft = (hf_layout.read(path) for path in toy_pair)
    assert hf_layout.target_config(target)["vocab_size"] == 64 == draft.metadata["dflash.vocab_size"]
    assert set(hf_layout.target_state_dict(target)) >= {"model.embed_tokens.weight", "lm_head.weight"}
    assert len(target.metadata["tokenizer.ggml.tokens"]) == 64


def test_toy_pair_is_reproducible_and_takes_sizes(tmp_path: Path):
    (tmp_path / "again").mkdir()
    first = toys.write_pair(tmp_path, seed=3, n_vocab=300, n_layers=8, tied=True)
    again = toys.write_pair(tmp_path / "again", seed=3, n_vocab=300, n_layers=8, tied=True)
    assert [a.read_bytes() for a in first] == [b.read_bytes() for b in again]
    weights = hf_layout.read(first[0])
    assert "output.weight" not in weights.tensors and weights.tensors["token_embd.weight"].shape == (300, 64)
    assert len(set(weights.metadata["tokenizer.ggml.tokens"])) == 300
