"""Tiny random targets of the architectures whose state is K/V rows only, and a draft for them; see `toys` for how the two
relate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

from reference import toys
from reference.model_files import add_tensor, finish
from reference.toys import _SPECIAL, _matrix, _norm

F32 = GGMLQuantizationType.F32


@dataclass(frozen=True, slots=True)
class KvToy:
    """Sizes and logit scales, named as in `toys.Toy`. yarn: stretch of positions beyond `n_ctx_first`. tied: no output matrix."""

    arch: str = "qwen3"
    n_vocab: int = 64
    n_layers: int = 4
    n_embd: int = 64
    n_ff: int = 96
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 32
    theta: float = 1e4
    n_ctx: int = 4096
    yarn: float | None = None
    n_ctx_first: int = 32
    tied: bool = False
    shared: float = 0.5
    own: float = 4.0
    mix: float = 1.0
    sharp: float = 8.0
    constant: float = 0.1
    special_logit: float = -30.0


# seed -> fields of `KvToy`
VARIANTS: dict[int, dict[str, Any]] = {
    21: {},
    22: {"tied": True, "mix": 3.0, "n_heads": 6, "n_kv_heads": 1, "head_dim": 16, "n_layers": 3},
    23: {"yarn": 4.0, "n_kv_heads": 4},
}


def write_target(directory: Path, seed: int, kind: GGMLQuantizationType = F32, **sizes: Any) -> Path:
    """Write `SEED-ARCH.gguf`, matrices of type `kind`; `sizes` are fields of `KvToy`."""
    toy = KvToy(**sizes)
    rng = np.random.default_rng(seed)
    path = directory / f"{seed}-{toy.arch}.gguf"
    writer = GGUFWriter(path, toy.arch)
    _metadata(writer, toy)
    for name, x in _tensors(toy, rng).items():
        if x.ndim == 3:
            writer.add_tensor(name, x.astype(np.float32))
        else:
            add_tensor(writer, name, x, lambda _name, _width: kind)
    finish(writer)
    return path


def write_pair(
    directory: Path, seed: int, draft: dict[str, Any] | None = None, **sizes: Any
) -> tuple[Path, Path]:
    """A target, and a draft for it whose own fields of `toys.Toy` are `draft`."""
    toy = KvToy(**sizes)
    shared = {"n_vocab": toy.n_vocab, "n_embd": toy.n_embd, "n_layers": toy.n_layers, "n_ctx": toy.n_ctx}
    _, path = toys.write_pair(directory, seed, **{**shared, **(draft or {})})
    return write_target(directory, seed, **sizes), path


def _metadata(writer: GGUFWriter, toy: KvToy) -> None:
    writer.add_name(f"toy {toy.arch}")
    writer.add_block_count(toy.n_layers)
    writer.add_context_length(toy.n_ctx)
    writer.add_embedding_length(toy.n_embd)
    writer.add_feed_forward_length(toy.n_ff)
    writer.add_head_count(toy.n_heads)
    writer.add_head_count_kv(toy.n_kv_heads)
    writer.add_key_length(toy.head_dim)
    writer.add_value_length(toy.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(toy.theta)
    if toy.yarn is not None:
        prefix = f"{toy.arch}.rope.scaling."
        writer.add_string(prefix + "type", "yarn")
        writer.add_float32(prefix + "factor", toy.yarn)
        writer.add_uint32(prefix + "original_context_length", toy.n_ctx_first)
    toys._tokenizer(writer, toy, "qwen2")


def _residual(rng: np.random.Generator, toy: KvToy, columns: int) -> np.ndarray:
    """A projection into the residual stream, `mix` times as strong as an embedding; spares coordinate 0."""
    x = _matrix(rng, toy.n_embd, columns, toy.mix / np.sqrt(toy.n_embd))
    x[0] = 0
    return x


def _tensors(toy: KvToy, rng: np.random.Generator) -> dict[str, np.ndarray]:
    d = toy.n_embd
    embedding = _matrix(rng, toy.n_vocab, d)
    embedding[-1] = 0
    embedding[:, 0] = toy.constant
    # about what coordinate 0 is after the last norm
    constant = toy.constant * np.sqrt(d / (1 + 2 * toy.n_layers * toy.mix**2))
    head = rng.normal(0, toy.own * np.sqrt(2 / d), (toy.n_vocab, d))
    head[:, 0] = rng.normal(0, toy.shared, toy.n_vocab) / constant
    head[-len(_SPECIAL) :] = 0
    head[-len(_SPECIAL) :, 0] = toy.special_logit / constant
    tensors = {"token_embd.weight": embedding, "output_norm.weight": np.ones(d)}
    if not toy.tied:
        tensors["output.weight"] = head
    for layer in range(toy.n_layers):
        tensors |= {f"blk.{layer}.{name}": x for name, x in _layer(toy, rng).items()}
    return tensors


def _layer(toy: KvToy, rng: np.random.Generator) -> dict[str, np.ndarray]:
    d, kv = toy.n_embd, toy.n_kv_heads * toy.head_dim
    return {
        "attn_norm.weight": _norm(rng, d),
        "ffn_norm.weight": _norm(rng, d),
        "attn_q.weight": _matrix(rng, toy.n_heads * toy.head_dim, d),
        "attn_k.weight": _matrix(rng, kv, d),
        "attn_v.weight": _matrix(rng, kv, d),
        "attn_output.weight": _residual(rng, toy, toy.n_heads * toy.head_dim),
        "attn_q_norm.weight": toy.sharp * _norm(rng, toy.head_dim),
        "attn_k_norm.weight": _norm(rng, toy.head_dim),
        "ffn_gate.weight": _matrix(rng, toy.n_ff, d),
        "ffn_up.weight": _matrix(rng, toy.n_ff, d),
        "ffn_down.weight": _residual(rng, toy, toy.n_ff),
    }


def llama_cpp_agrees(toy: KvToy) -> bool:
    """Whether the vendored revision of llama.cpp reads all keys of such a file."""
    return True
