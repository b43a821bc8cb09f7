"""Parameters of targets without recurrent layers: every size is read, every key or tensor that does not fit is named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_ggml.errors import ModelFileError
from dflash_ggml.files.gguf import GGUFFile
from dflash_ggml.ggml.graph import Yarn
from dflash_ggml.models.qwen3 import Qwen3
from dflash_ggml.models.registry import read_target
from dflash_ggml.models.target import Target
from reference.gguf_bytes import Tensor, build, f32_tensor
from reference.tiny_models import VOCAB, tokenizer_keys

D, FF, HEADS, KV, HEAD_DIM = 8, 12, 4, 2, 6


def qwen3_keys() -> dict[str, Any]:
    keys = {
        "block_count": 2,
        "context_length": 64,
        "embedding_length": D,
        "feed_forward_length": FF,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
    }
    return {"general.architecture": "qwen3"} | {f"qwen3.{k}": v for k, v in keys.items()} | tokenizer_keys()


def qwen3_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (D, VOCAB),
        "output_norm.weight": (D,),
        "output.weight": (D, VOCAB),
    }
    for i in range(2):
        block = f"blk.{i}."
        shapes |= {block + f"{norm}.weight": (D,) for norm in ("attn_norm", "ffn_norm")}
        shapes |= {
            block + "attn_q.weight": (D, HEADS * HEAD_DIM),
            block + "attn_output.weight": (HEADS * HEAD_DIM, D),
        }
        shapes |= {block + f"attn_{x}.weight": (D, KV * HEAD_DIM) for x in "kv"}
        shapes |= {block + f"attn_{x}_norm.weight": (HEAD_DIM,) for x in "qk"}
        shapes |= {block + f"ffn_{x}.weight": (D, FF) for x in ("gate", "up")}
        shapes[block + "ffn_down.weight"] = (FF, D)
    return shapes


def target(
    path: Path, keys: dict[str, Any] | None = None, changes: dict[str, tuple[int, ...] | None] | None = None
) -> Target:
    """The tiny target with `keys` changed (None drops one), and shapes of tensors changed, dropped (None) or added."""
    merged = {key: value for key, value in (qwen3_keys() | (keys or {})).items() if value is not None}
    shapes = qwen3_shapes() | (changes or {})
    tensors: list[Tensor] = [f32_tensor(name, shape) for name, shape in shapes.items() if shape]
    path.write_bytes(build(merged, tensors).data)
    return read_target(GGUFFile(path))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def test_qwen3(file: Path) -> None:
    found = target(file)
    assert found == Qwen3(
        n_layers=2,
        n_embd=D,
        n_ff=FF,
        n_vocab=VOCAB,
        n_heads=HEADS,
        n_kv_heads=KV,
        head_dim=HEAD_DIM,
        rope_theta=1e6,
        yarn=None,
        rms_eps=float(np.float32(1e-6)),
        n_ctx_train=64,
        tied_head=False,
    )
    assert found.tensors() == qwen3_shapes() and not found.state_spec().recurrent
    assert target(file, changes={"output.weight": None}).tied_head
    scale = {"blk.1.ffn_up.scale": (1,), "blk.1.ffn_up.input_scale": (1,)}
    assert target(file, changes=scale).scales == ("blk.1.ffn_up.scale",)


def test_what_a_file_may_leave_out(file: Path) -> None:
    """Heads are as wide as the embedding divides, and as many of keys as of queries."""
    changes = {f"blk.{i}.attn_{x}.weight": (D, D) for i in range(2) for x in ("q", "k", "v", "output")}
    changes |= {f"blk.{i}.attn_{x}_norm.weight": (2,) for i in range(2) for x in "qk"}
    names = ("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base")
    found = target(file, {f"qwen3.{name}": None for name in names}, changes)
    assert (found.n_kv_heads, found.head_dim, found.rope_theta) == (HEADS, 2, 10000.0)


def test_yarn(file: Path) -> None:
    keys = {"type": "yarn", "factor": 4.0, "original_context_length": 32768}
    found = target(file, {f"qwen3.rope.scaling.{key}": value for key, value in keys.items()})
    assert found.yarn == Yarn(4.0, 32768, pytest.approx(1 + 0.1 * np.log(4)))
    with pytest.raises(ModelFileError, match=r"qwen3.rope.scaling.type': 'linear' is not supported"):
        target(file, {"qwen3.rope.scaling.type": "linear"})


def test_published_sizes() -> None:
    """Qwen3-8B: 399 tensors, 8.2 billion weights; Qwen3-4B is tied: 398."""
    common = {"n_vocab": 151936, "n_kv_heads": 8, "head_dim": 128, "rope_theta": 1e6, "yarn": None}
    common |= {"rms_eps": 1e-6, "n_ctx_train": 40960, "n_layers": 36, "n_heads": 32}
    large = Qwen3(n_embd=4096, n_ff=12288, tied_head=False, **common).tensors()
    assert len(large) == 399 and round(sum(np.prod(s) for s in large.values()) / 1e9, 2) == 8.19
    small = Qwen3(n_embd=2560, n_ff=9728, tied_head=True, **common).tensors()
    assert len(small) == 398 and round(sum(np.prod(s) for s in small.values()) / 1e9, 2) == 4.02


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("qwen3.block_count", 0),
        ("qwen3.embedding_length", 2**31),
        ("qwen3.attention.head_count_kv", 3),
        ("qwen3.attention.value_length", 5),
        ("qwen3.attention.key_length", 5),
        ("qwen3.attention.layer_norm_rms_epsilon", 0.0),
        ("qwen3.rope.freq_base", float("nan")),
        ("qwen3.rope.dimension_count", 4),
        ("tokenizer.ggml.tokens", ["a", "b"]),
    ],
)
def test_values_that_cannot_be(file: Path, key: str, value: object) -> None:
    with pytest.raises(ModelFileError, match=re.escape(f"model.gguf: key '{key}'")):
        target(file, {key: value})


@pytest.mark.parametrize("name", [n for n in qwen3_shapes() if n.startswith(("blk.1", "output_norm"))])
def test_tensors_that_are_missing_or_misshapen(file: Path, name: str) -> None:
    shape = qwen3_shapes()[name]
    with pytest.raises(ModelFileError, match=re.escape(f"tensor '{name}' is missing")):
        target(file, changes={name: None})
    with pytest.raises(ModelFileError, match=re.escape(f"tensor '{name}' has shape")):
        target(file, changes={name: (*shape[:-1], shape[-1] + 1)})


def test_unknown_tensors(file: Path) -> None:
    for name in (
        "blk.0.attn_q.bias",
        "blk.2.attn_q.weight",
        "token_embd.scale",
        "blk.0.attn_norm.input_scale2",
    ):
        with pytest.raises(ModelFileError, match=f"{name!r} is unknown"):
            target(file, changes={name: (1,)})
