"""Target and draft files of a given shape with RANDOM WEIGHTS, for timing only: what they write is noise.

    python bench/shapes.py OUT_DIR [--size 27b|9b|4b|0.8b|heads|demo] [--draft-type q8_0|bf16]

The target follows the stock Q4_K_M mix: Q4_K, with Q6_K for the head and, in about half of the layers, for ffn_down and for
attn_qkv or attn_v. Sizes are those of the Qwen3.5 family; the draft has 5 layers of the target's width.
"""

from __future__ import annotations

import argparse
import math
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, GGUFWriter

F32, BF16, Q8_0, Q4_K, Q6_K = (GGMLQuantizationType[name] for name in ("F32", "BF16", "Q8_0", "Q4_K", "Q6_K"))
VALUE_TYPES = {
    bool: GGUFValueType.BOOL,
    int: GGUFValueType.UINT32,
    float: GGUFValueType.FLOAT32,
    str: GGUFValueType.STRING,
}
Row = tuple[str, GGMLQuantizationType, tuple[int, ...]]  # name, type, shape in ggml order


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a target (as in its GGUF keys) and of its draft."""

    layers: int
    embd: int
    ff: int
    heads: int
    kv_heads: int
    head_dim: int
    k_heads: int
    v_heads: int
    state: int = 128
    vocab: int = 248320
    draft_layers: int = 5
    draft_heads: int = 32
    draft_kv_heads: int = 8
    draft_head_dim: int = 128


SHAPES = {
    "27b": Shape(64, 5120, 17408, 24, 4, 256, 16, 48),
    "9b": Shape(32, 4096, 12288, 16, 4, 256, 16, 32),
    "4b": Shape(32, 2560, 9216, 16, 4, 256, 16, 32),
    "0.8b": Shape(24, 1024, 3584, 8, 2, 256, 16, 16),
    # attention as at 27B in a small trunk, for what caches do to it on any machine
    "heads": Shape(8, 1024, 2048, 24, 4, 256, 4, 8, vocab=8192),
    "demo": Shape(
        16, 256, 768, 4, 2, 64, 2, 8, state=64, vocab=8192, draft_heads=4, draft_kv_heads=2, draft_head_dim=64
    ),
}


def write(path: Path, metadata: dict, rows: list[Row]) -> None:
    """Write metadata and random tensors, one at a time: a file of 17 GB must not pass through memory at once."""
    writer = GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if key == "general.architecture":  # the writer's own first key
            continue
        if isinstance(value, list):
            writer.add_key_value(key, value, GGUFValueType.ARRAY, VALUE_TYPES[type(value[0])])
        else:
            writer.add_key_value(key, value, VALUE_TYPES[type(value)])
    sizes = []
    for name, type_, shape in rows:
        block, size = GGML_QUANT_SIZES[type_]
        assert shape[0] % block == 0, (name, type_, shape)
        sizes.append(math.prod(shape) // block * size)
        writer.add_tensor_info(name, shape[::-1], np.dtype(np.float32), sizes[-1], raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for (name, type_, _), size in zip(rows, sizes, strict=True):
        writer.write_tensor_data(random_bytes(name, type_, size))
    writer.close()


def random_bytes(name: str, type_: GGMLQuantizationType, size: int) -> np.ndarray:
    """Finite weights around zero: random quants under fixed small scales, repeated from a pool of blocks."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if type_ == F32:
        values = rng.uniform(-0.02, 0.02, size // 4).astype(np.float32)
        if name.endswith("norm.weight"):
            values += 1
        if name.endswith("ssm_a"):
            values = -rng.uniform(0.5, 4, size // 4).astype(np.float32)
        return values.view(np.uint8)
    if type_ == BF16:
        pool = rng.normal(0, 0.02, min(size // 2, 1 << 22)).astype(np.float32)
        data = (pool.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    else:
        block = GGML_QUANT_SIZES[type_][1]
        data = rng.integers(0, 256, (min(size // block, 1 << 16), block), np.uint8)
        scale = np.frombuffer(np.float16(2e-4 if type_ != Q6_K else 1e-5).tobytes(), np.uint8)
        if type_ == Q6_K:
            data[:, -2:] = scale
        else:
            data[:, :2] = scale
        if type_ == Q4_K:
            data[:, 2:4] = np.frombuffer(np.float16(1.5e-3).tobytes(), np.uint8)
        data = data.reshape(-1)
    return np.tile(data, -(-size // len(data)))[:size]


def vocabulary(n: int) -> dict:
    """Tokenizer keys with `n` tokens: bytes, two merges' worth of text, and padding that a grammar takes for text."""
    letters = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ"]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
    tokens = [*letters, "he", "in", *special]
    tokens += [f"[PAD{i}]" for i in range(len(tokens), n)]
    types = [1] * (len(letters) + 2) + [3] * len(special)
    types += [1] * (n - len(types))
    ids = {name: len(letters) + 2 + i for i, name in enumerate(special)}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["h e", "i n"],
        "tokenizer.ggml.eos_token_id": ids["<|im_end|>"],
    }


def target(path: Path, s: Shape, quantise: bool = True) -> None:
    """Write the target."""
    inner, keys = s.v_heads * s.state, s.k_heads * s.state
    q4, q6 = (Q4_K, Q6_K) if quantise and s.embd % 256 == 0 else (Q8_0, Q8_0)
    rows: list[Row] = [
        ("token_embd.weight", q4, (s.embd, s.vocab)),
        ("output_norm.weight", F32, (s.embd,)),
        ("output.weight", q6, (s.embd, s.vocab)),
    ]
    eighth = s.layers // 8
    for i in range(s.layers):
        better = i < eighth or i >= 7 * eighth or (i - eighth) % 3 == 2
        blk = f"blk.{i}."
        rows += [
            (blk + "attn_norm.weight", F32, (s.embd,)),
            (blk + "post_attention_norm.weight", F32, (s.embd,)),
            (blk + "ffn_gate.weight", q4, (s.embd, s.ff)),
            (blk + "ffn_up.weight", q4, (s.embd, s.ff)),
            (blk + "ffn_down.weight", q6 if better else q4, (s.ff, s.embd)),
        ]
        if (i + 1) % 4 == 0:
            rows += [
                (blk + "attn_q.weight", q4, (s.embd, 2 * s.heads * s.head_dim)),
                (blk + "attn_k.weight", q4, (s.embd, s.kv_heads * s.head_dim)),
                (blk + "attn_v.weight", q6 if better else q4, (s.embd, s.kv_heads * s.head_dim)),
                (blk + "attn_output.weight", q4, (s.heads * s.head_dim, s.embd)),
                (blk + "attn_q_norm.weight", F32, (s.head_dim,)),
                (blk + "attn_k_norm.weight", F32, (s.head_dim,)),
            ]
        else:
            rows += [
                (blk + "attn_qkv.weight", q6 if better else q4, (s.embd, 2 * keys + inner)),
                (blk + "attn_gate.weight", q4, (s.embd, inner)),
                (blk + "ssm_conv1d.weight", F32, (4, 2 * keys + inner)),
                (blk + "ssm_dt.bias", F32, (s.v_heads,)),
                (blk + "ssm_a", F32, (s.v_heads,)),
                (blk + "ssm_beta.weight", q4, (s.embd, s.v_heads)),
                (blk + "ssm_alpha.weight", q4, (s.embd, s.v_heads)),
                (blk + "ssm_norm.weight", F32, (s.state,)),
                (blk + "ssm_out.weight", q4, (inner, s.embd)),
            ]
    a = "qwen35."
    metadata = {
        "general.architecture": "qwen35",
        "general.name": "random weights, for timing only",
        a + "block_count": s.layers,
        a + "context_length": 262144,
        a + "embedding_length": s.embd,
        a + "feed_forward_length": s.ff,
        a + "attention.head_count": s.heads,
        a + "attention.head_count_kv": s.kv_heads,
        a + "attention.key_length": s.head_dim,
        a + "attention.value_length": s.head_dim,
        a + "attention.layer_norm_rms_epsilon": 1e-6,
        a + "rope.dimension_count": s.head_dim // 4,
        a + "rope.freq_base": 1e7,
        a + "rope.dimension_sections": [11, 11, 10, 0],
        a + "ssm.conv_kernel": 4,
        a + "ssm.state_size": s.state,
        a + "ssm.group_count": s.k_heads,
        a + "ssm.time_step_rank": s.v_heads,
        a + "ssm.inner_size": inner,
        a + "full_attention_interval": 4,
        **vocabulary(s.vocab),
    }
    write(path, metadata, rows)


def draft(path: Path, s: Shape, kind: GGMLQuantizationType) -> None:
    """Write the draft, upstream's dialect."""
    q, kv = s.draft_heads * s.draft_head_dim, s.draft_kv_heads * s.draft_head_dim
    taps = [1 + round(i * (s.layers - 4) / 4) for i in range(5)]
    rows: list[Row] = [
        ("fc.weight", kind, (5 * s.embd, s.embd)),
        ("enc.output_norm.weight", F32, (s.embd,)),
        ("output_norm.weight", F32, (s.embd,)),
    ]
    for i in range(s.draft_layers):
        blk = f"blk.{i}."
        rows += [
            (blk + "attn_norm.weight", F32, (s.embd,)),
            (blk + "ffn_norm.weight", F32, (s.embd,)),
            (blk + "attn_q.weight", kind, (s.embd, q)),
            (blk + "attn_k.weight", kind, (s.embd, kv)),
            (blk + "attn_v.weight", kind, (s.embd, kv)),
            (blk + "attn_output.weight", kind, (q, s.embd)),
            (blk + "attn_q_norm.weight", F32, (s.draft_head_dim,)),
            (blk + "attn_k_norm.weight", F32, (s.draft_head_dim,)),
            (blk + "ffn_gate.weight", kind, (s.embd, s.ff)),
            (blk + "ffn_up.weight", kind, (s.embd, s.ff)),
            (blk + "ffn_down.weight", kind, (s.ff, s.embd)),
        ]
    mask = vocabulary(128)["tokenizer.ggml.eos_token_id"] + 1
    a = "dflash."
    metadata = {
        "general.architecture": "dflash",
        "general.name": "random weights, for timing only",
        a + "block_count": s.draft_layers,
        a + "context_length": 4096,
        a + "embedding_length": s.embd,
        a + "feed_forward_length": s.ff,
        a + "attention.head_count": s.draft_heads,
        a + "attention.head_count_kv": s.draft_kv_heads,
        a + "attention.key_length": s.draft_head_dim,
        a + "attention.value_length": s.draft_head_dim,
        a + "attention.layer_norm_rms_epsilon": 1e-6,
        a + "rope.freq_base": 1e7,
        a + "rope.dimension_count": s.draft_head_dim,
        a + "block_size": 16,
        a + "target_layers": [t + 1 for t in taps],
        "tokenizer.ggml.mask_token_id": mask,
    }
    write(path, metadata, rows)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("out", type=Path)
    p.add_argument("--size", choices=SHAPES, default="27b")
    p.add_argument("--draft-type", choices=("q8_0", "bf16"), default="q8_0")
    a = p.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[a.size]
    target(a.out / f"random-{a.size}.gguf", shape)
    draft(
        a.out / f"random-{a.size}-dflash-{a.draft_type}.gguf", shape, Q8_0 if a.draft_type == "q8_0" else BF16
    )
    for file in sorted(a.out.glob(f"random-{a.size}*.gguf")):
        print(f"{file.stat().st_size / 1e9:7.3f} GB  {file}")


if __name__ == "__main__":
    main()
