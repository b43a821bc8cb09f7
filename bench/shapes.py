"""Target and draft files of a given shape with RANDOM WEIGHTS, for timing only: their output is noise.

    python bench/shapes.py OUT_DIR [--layers N] [--no-target] [--draft-type q8_0|bf16] [--block N]
        [--size 27b|9b|4b|0.8b|35b-a3b|80b-a3b|laguna-xs2|gpt-oss-20b|gemma4-26b-a4b|gemma4-31b|heads|demo]
        [--draft dflash|dflash2|dspark|mtp ...]

The target follows the stock Q4_K_M mix: Q4_K, with Q6_K for the head and, in about half of the layers, for ffn_down (experts
and shared expert too) and for attn_qkv or attn_v; routers are F32. gpt-oss is as it is published: experts in MXFP4, the other
matrices in Q8_0. Gemma 4 has a tied embedding in Q6_K; matrices whose rows have no whole blocks of 256 take Q5_0 and Q8_0, as
llama.cpp quantises them. Sizes are those of the Qwen3.5 family, of Qwen3-Next, of Laguna, of gpt-oss and of Gemma 4 (not read
from a file); a draft has the target's width, and the newer kinds have what those of Qwen3.8-27B have. With `mtp` the target gets
a prediction head in Q8_0, as its files have. --layers writes fewer layers of the target: times then are those of a part.
"""

from __future__ import annotations

import argparse
import math
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, GGUFWriter

from dflash_ggml.drafts.dflash.params import DraftParams
from dflash_ggml.drafts.dflash2 import Selector
from dflash_ggml.drafts.dspark import Markov
from dflash_ggml.models.feed_forward import Dense
from dflash_ggml.models.prediction import NORM, Head

F32, BF16, Q8_0, Q5_0, Q4_K, Q6_K, MXFP4 = (
    GGMLQuantizationType[name] for name in ("F32", "BF16", "Q8_0", "Q5_0", "Q4_K", "Q6_K", "MXFP4")
)
VALUE_TYPES = {
    bool: GGUFValueType.BOOL,
    int: GGUFValueType.UINT32,
    float: GGUFValueType.FLOAT32,
    str: GGUFValueType.STRING,
}
RMS_EPS = 1e-6
GEMMA4_PERIOD = 6  # the last layer of each sees everything
Row = tuple[str, GGMLQuantizationType, tuple[int, ...]]  # name, type, shape in ggml order


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts of a layer: how many, how many a token uses, widths of one and of the one that all tokens share."""

    n: int
    used: int
    ff: int
    shared: int


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
    taps: int = 5
    arch: str = "qwen35"
    experts: Experts | None = None  # ff is then the draft's alone, but for Gemma 4
    full_kv: int = 0  # K/V heads of Gemma 4's layers without a window
    draft_ff: int | None = None  # ff where there is none


QWEN_27B = Shape(64, 5120, 17408, 24, 4, 256, 16, 48)
QWEN_9B = Shape(32, 4096, 12288, 16, 4, 256, 16, 32)
QWEN_35B_A3B = Shape(
    *(40, 2048, 6144, 16, 2, 256, 16, 32),
    draft_layers=8,
    draft_kv_heads=4,
    taps=8,
    arch="qwen35moe",
    experts=Experts(256, 8, 512, 512),
)
SHAPES = {
    "27b": QWEN_27B,
    "9b": QWEN_9B,
    "4b": replace(QWEN_9B, embd=2560, ff=9216),
    "0.8b": Shape(24, 1024, 3584, 8, 2, 256, 16, 16),
    "35b-a3b": QWEN_35B_A3B,
    "80b-a3b": replace(
        QWEN_35B_A3B, layers=48, taps=5, arch="qwen3next", vocab=151936, experts=Experts(512, 10, 512, 512)
    ),
    # window layers have 64 heads, the others 48; the first layer is dense
    "laguna-xs2": Shape(
        *(40, 2048, 8192, 48, 8, 128, 0, 0),
        vocab=100352,
        draft_heads=64,
        arch="laguna",
        experts=Experts(256, 8, 512, 512),
    ),
    "gpt-oss-20b": Shape(
        *(24, 2880, 2880, 64, 8, 64, 0, 0),
        vocab=201088,
        draft_layers=8,
        draft_heads=64,
        draft_head_dim=64,
        arch="gpt-oss",
        experts=Experts(32, 4, 2880, 0),
    ),
    # layers with a window have heads of 256, the others of 512 whose values are their keys
    "gemma4-26b-a4b": Shape(
        *(30, 2816, 2112, 16, 8, 256, 0, 0),
        vocab=262144,
        draft_ff=5632,
        arch="gemma4",
        experts=Experts(128, 8, 704, 0),
        full_kv=2,
    ),
    "gemma4-31b": Shape(
        *(60, 5376, 21504, 32, 16, 256, 0, 0),
        vocab=262144,
        draft_heads=64,
        draft_ff=10752,
        arch="gemma4",
        full_kv=4,
    ),
    # attention as at 27B in a small trunk, for what caches do to it on any machine
    "heads": replace(QWEN_27B, layers=8, embd=1024, ff=2048, k_heads=4, v_heads=8, vocab=8192),
    "demo": Shape(
        *(16, 256, 768, 4, 2, 64, 2, 8),
        state=64,
        vocab=8192,
        draft_heads=4,
        draft_kv_heads=2,
        draft_head_dim=64,
    ),
}
DRAFTS = ("dflash", "dflash2", "dspark", "mtp")
BLOCKS = {"dflash": 16, "dflash2": 8, "dspark": 8}


def write(path: Path, metadata: dict, rows: list[Row]) -> None:
    """Write metadata and random tensors, one at a time: a file of 17 GB must not pass through memory at once."""
    writer = GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if key == "general.architecture":  # the writer's own first key
            continue
        if isinstance(value, list):
            kind = VALUE_TYPES[type(value[0])]
            if kind == GGUFValueType.UINT32:  # llama.cpp takes types of tokens with a sign only
                kind = GGUFValueType.INT32
            writer.add_key_value(key, value, GGUFValueType.ARRAY, kind)
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
        if "norm" in name or name.endswith(("scale", "scale.weight")):
            values += 1
        if name == "rope_freqs.weight":  # a quarter of a head rotates
            values[:] = np.where(np.arange(len(values)) < len(values) // 4, 1, 1e30)
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
        elif type_ == MXFP4:
            data[:, 0] = 118  # of E8M0: 2^-9, times up to 12 halves
        else:
            data[:, :2] = scale
        if type_ == Q4_K:
            data[:, 2:4] = np.frombuffer(np.float16(1.5e-3).tobytes(), np.uint8)
        data = data.reshape(-1)
    return np.tile(data, -(-size // len(data)))[:size]


def vocabulary(n: int, pre: str = "qwen35") -> dict:
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
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["h e", "i n"],
        "tokenizer.ggml.eos_token_id": ids["<|im_end|>"],
    }


def feed_forward(
    blk: str, s: Shape, better: bool, q4: GGMLQuantizationType, q6: GGMLQuantizationType
) -> list[Row]:
    """Tensors of a layer's feed-forward, dense or of experts; better: the layer is one of those with more bits."""
    down = q6 if better else q4
    if s.experts is None:
        return [
            (blk + "ffn_gate.weight", q4, (s.embd, s.ff)),
            (blk + "ffn_up.weight", q4, (s.embd, s.ff)),
            (blk + "ffn_down.weight", down, (s.ff, s.embd)),
        ]
    e = s.experts
    rows: list[Row] = [
        (blk + "ffn_gate_inp.weight", F32, (s.embd, e.n)),
        (blk + "ffn_gate_exps.weight", q4, (s.embd, e.ff, e.n)),
        (blk + "ffn_up_exps.weight", q4, (s.embd, e.ff, e.n)),
        (blk + "ffn_down_exps.weight", down, (e.ff, s.embd, e.n)),
        (blk + "ffn_gate_shexp.weight", q4, (s.embd, e.shared)),
        (blk + "ffn_up_shexp.weight", q4, (s.embd, e.shared)),
        (blk + "ffn_down_shexp.weight", down, (e.shared, s.embd)),
    ]
    if s.arch == "laguna":
        return [*rows, (blk + "exp_probs_b.bias", F32, (e.n,))]
    return [*rows, (blk + "ffn_gate_inp_shexp.weight", F32, (s.embd,))]


def gets_more_bits(i: int, layers: int) -> bool:
    """Whether layer i is one of those where Q4_K_M has Q6_K."""
    eighth = layers // 8
    return i < eighth or i >= 7 * eighth or (i - eighth) % 3 == 2


def target(path: Path, s: Shape, quantise: bool = True, has_head: bool = False) -> None:
    """Write the target, maybe with a prediction head behind its layers."""
    q4, q6 = (Q4_K, Q6_K) if quantise and s.embd % 256 == 0 else (Q8_0, Q8_0)
    rows: list[Row] = [
        ("token_embd.weight", q4, (s.embd, s.vocab)),
        ("output_norm.weight", F32, (s.embd,)),
        ("output.weight", q6, (s.embd, s.vocab)),
    ]
    if s.arch == "laguna":
        write(path, laguna_metadata(s), rows + laguna_blocks(s, q4, q6))
        return
    if s.arch == "gpt-oss":
        write(path, gpt_oss_metadata(s), rows + gpt_oss_blocks(s))
        return
    if s.arch == "gemma4":
        write(path, gemma4_metadata(s), gemma4_rows(s))
        return
    inner, keys = s.v_heads * s.state, s.k_heads * s.state
    for i in range(s.layers):
        better = gets_more_bits(i, s.layers)
        blk = f"blk.{i}."
        rows += [
            (blk + "attn_norm.weight", F32, (s.embd,)),
            (blk + "post_attention_norm.weight", F32, (s.embd,)),
            *feed_forward(blk, s, better, q4, q6),
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
            continue
        rows += [
            (blk + "attn_qkv.weight", q6 if better else q4, (s.embd, 2 * keys + inner)),
            (blk + "attn_gate.weight", q4, (s.embd, inner)),
            (blk + "ssm_conv1d.weight", F32, (4, 2 * keys + inner)),
            (blk + "ssm_dt.bias", F32, (s.v_heads,)),
            (blk + "ssm_a", F32, (s.v_heads,)),
            (blk + "ssm_norm.weight", F32, (s.state,)),
            (blk + "ssm_out.weight", q4, (inner, s.embd)),
        ]
        if s.arch == "qwen3next":
            rows += [(blk + "ssm_ba.weight", q4, (s.embd, 2 * s.v_heads))]
        else:
            rows += [(blk + f"ssm_{part}.weight", q4, (s.embd, s.v_heads)) for part in ("beta", "alpha")]
    a = f"{s.arch}."
    metadata = {
        "general.architecture": s.arch,
        "general.name": "random weights, for timing only",
        **sizes(a, s.layers, 262144, s.embd, s.heads, s.kv_heads, s.head_dim),
        a + "rope.dimension_count": s.head_dim // 4,
        a + "rope.freq_base": 1e7,
        a + "ssm.conv_kernel": 4,
        a + "ssm.state_size": s.state,
        a + "ssm.group_count": s.k_heads,
        a + "ssm.time_step_rank": s.v_heads,
        a + "ssm.inner_size": inner,
        a + "full_attention_interval": 4,
        **experts_metadata(a, s),
        **vocabulary(s.vocab),
    }
    if s.arch != "qwen3next":
        metadata[a + "rope.dimension_sections"] = [11, 11, 10, 0]
    if has_head:
        metadata |= {a + "block_count": s.layers + 1, a + "nextn_predict_layers": 1}
        rows += typed(prediction_head(s).tensors(), Q8_0)
    write(path, metadata, rows)


def prediction_head(s: Shape) -> Head:
    """A head with a dense block of the target's sizes."""
    return Head(
        block=s.layers,
        n_embd=s.embd,
        ffn=Dense(s.embd, s.ff),
        n_vocab=s.vocab,
        n_heads=s.heads,
        n_kv_heads=s.kv_heads,
        head_dim=s.head_dim,
        n_rot=s.head_dim // 4,
        rope_theta=1e7,
        rms_eps=RMS_EPS,
        optional=(NORM,),
    )


def typed(shapes: dict[str, tuple[int, ...]], kind: GGMLQuantizationType) -> list[Row]:
    """Tensors of the shapes that the engine expects: matrices of a kind, all others F32."""
    return [(name, kind if len(shape) == 2 else F32, shape) for name, shape in shapes.items()]


def sizes(
    a: str, layers: int, context: int, embd: int, heads: int | list[int], kv_heads: int, head_dim: int
) -> dict:
    """Keys of layers that all models have, with the prefix a."""
    return {
        a + "block_count": layers,
        a + "context_length": context,
        a + "embedding_length": embd,
        a + "attention.head_count": heads,
        a + "attention.head_count_kv": kv_heads,
        a + "attention.key_length": head_dim,
        a + "attention.value_length": head_dim,
        a + "attention.layer_norm_rms_epsilon": RMS_EPS,
    }


def experts_metadata(a: str, s: Shape) -> dict:
    """Widths of the feed-forward, keys with the prefix a."""
    if s.experts is None:
        return {a + "feed_forward_length": s.ff}
    return {
        a + "expert_count": s.experts.n,
        a + "expert_used_count": s.experts.used,
        a + "expert_feed_forward_length": s.experts.ff,
        a + "expert_shared_feed_forward_length": s.experts.shared,
    }


def laguna_heads(s: Shape) -> list[int]:
    """Query heads of each layer: every fourth sees everything, the others a window and have a third more heads."""
    return [s.heads if i % 4 == 0 else s.heads * 4 // 3 for i in range(s.layers)]


def laguna_blocks(s: Shape, q4: GGMLQuantizationType, q6: GGMLQuantizationType) -> list[Row]:
    """Tensors of Laguna's layers, of which the first is dense."""
    rows: list[Row] = []
    for i, heads in enumerate(laguna_heads(s)):
        better = gets_more_bits(i, s.layers)
        blk = f"blk.{i}."
        rows += [
            (blk + "attn_norm.weight", F32, (s.embd,)),
            (blk + "ffn_norm.weight", F32, (s.embd,)),
            (blk + "attn_q.weight", q4, (s.embd, heads * s.head_dim)),
            (blk + "attn_k.weight", q4, (s.embd, s.kv_heads * s.head_dim)),
            (blk + "attn_v.weight", q6 if better else q4, (s.embd, s.kv_heads * s.head_dim)),
            (blk + "attn_output.weight", q4, (heads * s.head_dim, s.embd)),
            (blk + "attn_q_norm.weight", F32, (s.head_dim,)),
            (blk + "attn_k_norm.weight", F32, (s.head_dim,)),
            (blk + "attn_gate.weight", F32, (s.embd, heads)),
            *feed_forward(blk, s if i else replace(s, experts=None), better, q4, q6),
        ]
    return rows


def laguna_metadata(s: Shape) -> dict:
    """Keys of Laguna-XS.2."""
    assert s.experts is not None
    a = "laguna."
    return {
        "general.architecture": "laguna",
        "general.name": "random weights, for timing only",
        **sizes(a, s.layers, 131072, s.embd, laguna_heads(s), s.kv_heads, s.head_dim),
        a + "feed_forward_length": s.ff,
        a + "leading_dense_block_count": 1,
        a + "attention.sliding_window": 512,
        a + "attention.sliding_window_pattern": [i % 4 != 0 for i in range(s.layers)],
        a + "rope.dimension_count": s.head_dim // 2,
        a + "rope.dimension_count_swa": s.head_dim,
        a + "rope.freq_base": 5e5,
        a + "rope.freq_base_swa": 1e4,
        a + "rope.scaling.type": "yarn",
        a + "rope.scaling.factor": 32.0,
        a + "rope.scaling.original_context_length": 4096,
        a + "rope.scaling.yarn_beta_fast": 64.0,
        a + "rope.scaling.yarn_beta_slow": 1.0,
        a + "expert_gating_func": 2,
        a + "expert_weights_norm": True,
        a + "expert_weights_scale": 2.5,
        **experts_metadata(a, s),
        **vocabulary(s.vocab, "laguna"),
    }


def gpt_oss_blocks(s: Shape) -> list[Row]:
    """Tensors of gpt-oss's layers: a bias beside every matrix, and a sink for each head."""
    assert s.experts is not None
    e, q, kv = s.experts, s.heads * s.head_dim, s.kv_heads * s.head_dim
    matrices: dict[str, tuple[GGMLQuantizationType, tuple[int, ...]]] = {
        "attn_q": (Q8_0, (s.embd, q)),
        "attn_k": (Q8_0, (s.embd, kv)),
        "attn_v": (Q8_0, (s.embd, kv)),
        "attn_output": (Q8_0, (q, s.embd)),
        "ffn_gate_inp": (F32, (s.embd, e.n)),
        "ffn_gate_exps": (MXFP4, (s.embd, e.ff, e.n)),
        "ffn_up_exps": (MXFP4, (s.embd, e.ff, e.n)),
        "ffn_down_exps": (MXFP4, (e.ff, s.embd, e.n)),
    }
    rows: list[Row] = []
    for i in range(s.layers):
        blk = f"blk.{i}."
        rows += [(f"{blk}{name}_norm.weight", F32, (s.embd,)) for name in ("attn", "post_attention")]
        rows += [(f"{blk}attn_sinks.weight", F32, (s.heads,))]
        for name, (kind, shape) in matrices.items():
            rows += [(f"{blk}{name}.weight", kind, shape), (f"{blk}{name}.bias", F32, shape[1:])]
    return rows


def gpt_oss_metadata(s: Shape) -> dict:
    """Keys of gpt-oss-20b."""
    assert s.experts is not None
    a = "gpt-oss."
    return {
        "general.architecture": "gpt-oss",
        "general.name": "random weights, for timing only",
        **sizes(a, s.layers, 131072, s.embd, s.heads, s.kv_heads, s.head_dim),
        a + "feed_forward_length": s.ff,
        a + "attention.sliding_window": 128,
        a + "rope.freq_base": 1.5e5,
        a + "rope.scaling.type": "yarn",
        a + "rope.scaling.factor": 32.0,
        a + "rope.scaling.original_context_length": 4096,
        a + "expert_count": s.experts.n,
        a + "expert_used_count": s.experts.used,
        a + "expert_feed_forward_length": s.experts.ff,
        **vocabulary(s.vocab, "gpt-4o"),
    }


def gemma4_rows(s: Shape) -> list[Row]:
    """All tensors of Gemma 4, of which every sixth layer sees everything; without `output.weight`."""

    def down(name: str, better: bool, *shape: int) -> Row:
        kinds = (Q4_K, Q6_K) if shape[0] % 256 == 0 else (Q5_0, Q8_0)
        return name, kinds[better], shape

    rows: list[Row] = [
        ("token_embd.weight", Q6_K, (s.embd, s.vocab)),
        ("output_norm.weight", F32, (s.embd,)),
    ]
    if s.layers >= GEMMA4_PERIOD:
        rows += [("rope_freqs.weight", F32, (s.head_dim,))]  # half a head of twice the size
    norms = ["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"]
    if s.experts is not None:
        norms += ["post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2"]
    for i in range(s.layers):
        better, blk, is_full = gets_more_bits(i, s.layers), f"blk.{i}.", (i + 1) % GEMMA4_PERIOD == 0
        size = s.head_dim * (1 + is_full)
        q, kv = s.heads * size, (s.full_kv if is_full else s.kv_heads) * size
        rows += [(f"{blk}{name}.weight", F32, (s.embd,)) for name in norms]
        rows += [
            (blk + "layer_output_scale.weight", F32, (1,)),
            (blk + "attn_q_norm.weight", F32, (size,)),
            (blk + "attn_k_norm.weight", F32, (size,)),
            (blk + "attn_q.weight", Q4_K, (s.embd, q)),
            (blk + "attn_k.weight", Q4_K, (s.embd, kv)),
            (blk + "attn_output.weight", Q4_K, (q, s.embd)),
            (blk + "ffn_gate.weight", Q4_K, (s.embd, s.ff)),
            (blk + "ffn_up.weight", Q4_K, (s.embd, s.ff)),
            down(blk + "ffn_down.weight", better, s.ff, s.embd),
        ]
        if not is_full:
            rows += [(blk + "attn_v.weight", Q6_K if better else Q4_K, (s.embd, kv))]
        if (e := s.experts) is not None:
            rows += [
                (blk + "ffn_gate_inp.weight", F32, (s.embd, e.n)),
                (blk + "ffn_gate_inp.scale", F32, (s.embd,)),
                (blk + "ffn_gate_up_exps.weight", Q4_K, (s.embd, 2 * e.ff, e.n)),
                down(blk + "ffn_down_exps.weight", better, e.ff, s.embd, e.n),
                (blk + "ffn_down_exps.scale", F32, (e.n,)),
            ]
    return rows


def gemma4_metadata(s: Shape) -> dict:
    """Keys of Gemma 4."""
    a = "gemma4."
    is_full = [(i + 1) % GEMMA4_PERIOD == 0 for i in range(s.layers)]
    metadata = {
        "general.architecture": "gemma4",
        "general.name": "random weights, for timing only",
        **sizes(a, s.layers, 262144, s.embd, s.heads, s.kv_heads, 2 * s.head_dim),
        a + "attention.head_count_kv": [s.full_kv if full else s.kv_heads for full in is_full],
        a + "attention.key_length_swa": s.head_dim,
        a + "attention.value_length_swa": s.head_dim,
        a + "attention.sliding_window": 1024,
        a + "attention.sliding_window_pattern": [not full for full in is_full],
        a + "attention.shared_kv_layers": 0,
        a + "embedding_length_per_layer_input": 0,
        a + "feed_forward_length": s.ff,
        a + "final_logit_softcapping": 30.0,
        a + "rope.dimension_count": 2 * s.head_dim,
        a + "rope.dimension_count_swa": s.head_dim,
        a + "rope.freq_base": 1e6,
        a + "rope.freq_base_swa": 1e4,
        **vocabulary(s.vocab),
    }
    if (e := s.experts) is not None:
        metadata |= {
            a + "expert_count": e.n,
            a + "expert_used_count": e.used,
            a + "expert_feed_forward_length": e.ff,
        }
    return metadata


def draft_params(s: Shape, draft: str, block: int) -> DraftParams:
    """The sizes of a block draft. DFlash2 and DSpark are what Qwen3.8-27B has: DFlash2 with windows on all layers."""
    is_new = draft == "dflash2"
    return DraftParams(
        n_layers=s.draft_layers,
        n_embd=s.embd,
        n_ff=s.draft_ff or s.ff,
        n_heads=s.draft_heads,
        n_kv_heads=s.draft_kv_heads,
        head_dim=s.draft_head_dim,
        rope_theta=5e5 if s.arch == "laguna" else 1e7,
        rms_eps=RMS_EPS,
        block_size=block,
        mask_id=vocabulary(128)["tokenizer.ggml.eos_token_id"] + 1,
        taps=tuple(1 + round(i * (s.layers - 4) / (s.taps - 1)) for i in range(s.taps)),
        n_vocab=s.vocab,
        sliding_window=2048 if is_new else None,
        window_layers=(is_new,) * s.draft_layers,
        declared_causal=False if is_new else None,
        selector=Selector(kernel=2, group=16, rank=256, candidates=16) if is_new else None,
        markov=Markov(rank=256) if draft == "dspark" else None,
    )


def draft(path: Path, p: DraftParams, kind: GGMLQuantizationType) -> None:
    """Write a block draft, upstream's dialect."""
    a = "dflash."
    metadata = {
        "general.architecture": "dflash",
        "general.name": "random weights, for timing only",
        **sizes(a, p.n_layers, 4096, p.n_embd, p.n_heads, p.n_kv_heads, p.head_dim),
        a + "feed_forward_length": p.n_ff,
        a + "rope.freq_base": p.rope_theta,
        a + "rope.dimension_count": p.head_dim,
        a + "block_size": p.block_size,
        a + "target_layers": [t + 1 for t in p.taps],
        "tokenizer.ggml.mask_token_id": p.mask_id,
    }
    if p.sliding_window:
        metadata |= {
            a + "attention.causal": bool(p.declared_causal),
            a + "attention.sliding_window": p.sliding_window,
            a + "attention.sliding_window_pattern": list(p.window_layers),
        }
    if p.selector is not None or p.markov is not None:
        metadata[a + "vocab_size"] = p.n_vocab
    if (selector := p.selector) is not None:
        metadata |= {
            a + "conv_kernel_size": selector.kernel,
            a + "conv_group_size": selector.group,
            a + "selector_rank": selector.rank,
            a + "selector_top_k": selector.candidates,
        }
    write(path, metadata, typed(p.tensor_shapes(), kind))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("out", type=Path)
    p.add_argument("--size", choices=SHAPES, default="27b")
    p.add_argument(
        "--draft", choices=DRAFTS, nargs="+", default=["dflash"], help="mtp: a head in the target's file"
    )
    p.add_argument("--draft-type", choices=("q8_0", "bf16"), default="q8_0")
    p.add_argument("--block", type=int, help="rows of a block, by default 16, of dflash2 and dspark 8")
    p.add_argument("--layers", type=int, help="of the target, for what a part of it does")
    p.add_argument("--no-target", action="store_true", help="write drafts alone")
    a = p.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    shape = replace(SHAPES[a.size], layers=a.layers or SHAPES[a.size].layers)
    has_head = "mtp" in a.draft
    if has_head and shape.arch != "qwen35":
        p.error(f"argument --draft: no prediction head is written for {shape.arch}, only for qwen35")
    if has_head and a.no_target:
        p.error("argument --draft: mtp is a part of the target, and --no-target leaves that out")
    if not a.no_target:
        target(a.out / f"random-{a.size}.gguf", shape, has_head=has_head)
    for kind in (kind for kind in a.draft if kind != "mtp"):
        params = draft_params(shape, kind, a.block or BLOCKS[kind])
        path = a.out / f"random-{a.size}-{kind}-{a.draft_type}.gguf"
        draft(path, params, GGMLQuantizationType[a.draft_type.upper()])
    for file in sorted(a.out.glob(f"random-{a.size}*.gguf")):
        print(f"{file.stat().st_size / 1e9:7.3f} GB  {file}")


if __name__ == "__main__":
    main()
