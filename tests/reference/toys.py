"""A tiny random target of the `qwen35` family and its `dflash` draft, for sampling statistics and stress tests.

Nothing is trained. Every embedding carries the same constant in coordinate 0, which no layer writes to, and
the head maps it to fixed logits per token, shared by target and draft because the draft borrows embedding and
head. So the draft knows how frequent each token is and the target adds what depends on the context; `shared` and
`own` set the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

from reference.model_files import add_tensor, finish

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5


@dataclass(frozen=True, slots=True)
class Toy:
    """Sizes and logit scales of a toy pair. Layers i with (i + 1) % attention_every == 0 are full attention; 0: none is.

    window: of the draft's window layers, None where it has none; full_layers: its last layers that are none.
    `shared`, `own`: standard deviation, over tokens, of the logits that target and draft share and of those
    that depend on the context. `draft_own`: the draft's own context-dependent part relative to the target's
    (noise). `special_logit`: logit of every special token, low enough that they are never sampled.
    `draft`: "dflash", "dflash2" (top_k, rank, conv_*) or "dspark" (rank, gated, confidence, from_anchor, n_draft_vocab); the pair
    scores of neighbours have about the deviation `pair_scale`. `draft_tokens`: the draft's file has the vocabulary
    too, as published ones have. `normed_taps`: as Laguna's drafts, with output gates. `nextn`: the target has a head for the
    next but one token. `arch`: "qwen35", or "qwen35moe" or "qwen3next", with `n_experts` experts `n_ff` wide, of which a
    token uses `n_used`, and one for all `n_ff_shared` wide; `joined`: their gate and up are one matrix. `old`: a qwen3next
    file with `ssm_in`.
    """

    n_vocab: int = 64
    n_layers: int = 4
    n_embd: int = 64
    n_ff: int = 128
    n_heads: int = 2
    n_kv_heads: int = 1
    head_dim: int = 64
    n_rot: int = 16
    state: int = 16
    ssm_k_heads: int = 2
    ssm_v_heads: int = 4
    conv: int = 4
    draft_layers: int = 2
    block_size: int = 8
    taps: tuple[int, ...] = (0, 2)
    n_ctx: int = 4096
    shared: float = 2.5
    own: float = 1.0
    draft_own: float = 0.2
    special_logit: float = -30.0
    tied: bool = False
    attention_every: int = 4
    window: int | None = None
    full_layers: int = 0
    draft: str = "dflash"
    selector_top_k: int = 6
    rank: int = 32
    pair_scale: float = 1.0
    conv_group: int = 16
    conv_kernel: int = 2
    gated: bool = False
    confidence: bool = False
    from_anchor: bool = True
    n_draft_vocab: int | None = None
    causal: bool | None = None
    yarn: float | None = None
    draft_rot: int | None = None
    own_tables: bool = False
    nextn: bool = False
    draft_tokens: bool = False
    normed_taps: bool = False
    arch: str = "qwen35"
    n_experts: int = 0
    n_used: int = 2
    n_ff_shared: int = 64
    joined: bool = False
    old: bool = False


# Corners of the architecture: head sizes and ratios, tied head, several KV heads. Seed -> fields of `Toy`.
VARIANTS: dict[int, dict[str, Any]] = {
    11: {},
    12: {"n_vocab": 300, "n_layers": 8, "tied": True, "state": 32, "ssm_v_heads": 6},
    13: {"state": 64, "ssm_k_heads": 1, "ssm_v_heads": 3, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32},
    14: {"state": 128, "ssm_k_heads": 2, "ssm_v_heads": 2, "n_embd": 96, "n_rot": 64},
}


# The same of targets with experts.
MOE_VARIANTS: dict[int, dict[str, Any]] = {
    21: {"arch": "qwen35moe", "n_experts": 16, "n_used": 4, "n_ff": 32},
    22: {
        "arch": "qwen35moe",
        "n_experts": 6,
        "n_used": 3,
        "n_ff": 64,
        "n_ff_shared": 32,
        "state": 32,
        "ssm_v_heads": 6,
    }
    | {"joined": True, "tied": True, "n_layers": 8, "n_vocab": 300},
    23: {"arch": "qwen3next", "n_experts": 16, "n_used": 5, "n_ff": 32, "ssm_v_heads": 6},
    25: {"arch": "qwen3next", "n_experts": 8, "n_used": 2, "n_ff": 64, "old": True, "state": 32, "n_heads": 4}
    | {"n_kv_heads": 2, "head_dim": 32},
}
MOE_VARIANTS = {seed: {"own": 4.0, "shared": 1.0} | sizes for seed, sizes in MOE_VARIANTS.items()}


def write_pair(
    directory: Path, seed: int, kind: GGMLQuantizationType = GGMLQuantizationType.F32, **sizes: Any
) -> tuple[Path, Path]:
    """Write `toy-SEED-target.gguf` and `toy-SEED-draft.gguf` to `directory`. Returns both paths.

    Matrices are of type `kind`. `sizes` are fields of `Toy`. Row lengths that do not fit the block of `kind`
    fall back as in `model_files`.
    """
    toy = Toy(**sizes)
    rng = np.random.default_rng(seed)
    target, draft = directory / f"toy-{seed}-target.gguf", directory / f"toy-{seed}-draft.gguf"
    for path, arch, metadata, tensors in (
        (target, toy.arch, _target_metadata, _target_tensors(toy, rng)),
        (draft, "dflash", _draft_metadata, _draft_tensors(toy, rng)),
    ):
        writer = GGUFWriter(path, arch)
        metadata(writer, toy)
        for name, x in tensors.items():
            if x.dtype == np.int64:
                writer.add_tensor(name, x)
            elif (x.ndim == 3 and "_exps" not in name) or "aux_norm" in name:
                writer.add_tensor(name, x.astype(np.float32))
            else:
                add_tensor(writer, name, x, lambda _name, _width: kind)
        finish(writer)
    return target, draft


def _target_metadata(writer: GGUFWriter, toy: Toy) -> None:
    writer.add_name("toy target")
    writer.add_block_count(toy.n_layers + toy.nextn)
    if toy.nextn:
        writer.add_uint32(f"{toy.arch}.nextn_predict_layers", 1)
    writer.add_context_length(toy.n_ctx)
    writer.add_embedding_length(toy.n_embd)
    if toy.n_experts:
        writer.add_expert_count(toy.n_experts)
        writer.add_expert_used_count(toy.n_used)
        writer.add_expert_feed_forward_length(toy.n_ff)
        writer.add_expert_shared_feed_forward_length(toy.n_ff_shared)
    else:
        writer.add_feed_forward_length(toy.n_ff)
    writer.add_head_count(toy.n_heads)
    writer.add_head_count_kv(toy.n_kv_heads)
    writer.add_key_length(toy.head_dim)
    writer.add_value_length(toy.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e7)
    writer.add_rope_dimension_count(toy.n_rot)
    pairs = toy.n_rot // 2
    if toy.arch != "qwen3next":
        writer.add_rope_dimension_sections([-(-pairs // 3), (pairs + 1) // 3, pairs // 3, 0])
    writer.add_uint32(f"{toy.arch}.ssm.conv_kernel", toy.conv)
    writer.add_uint32(f"{toy.arch}.ssm.state_size", toy.state)
    writer.add_uint32(f"{toy.arch}.ssm.group_count", toy.ssm_k_heads)
    writer.add_uint32(f"{toy.arch}.ssm.time_step_rank", toy.ssm_v_heads)
    writer.add_uint32(f"{toy.arch}.ssm.inner_size", toy.ssm_v_heads * toy.state)
    writer.add_uint32(f"{toy.arch}.full_attention_interval", toy.attention_every or toy.n_layers + 1)
    recurrent = [_recurrent(toy, i) for i in range(toy.n_layers)]
    writer.add_array(f"{toy.arch}.attention.recurrent_layers", recurrent + [False] * toy.nextn)
    _tokenizer(writer, toy)


def _tokenizer(writer: GGUFWriter, toy: Any, pre: str = "qwen35") -> None:
    tokens, kinds = _vocabulary(toy.n_vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(toy.n_vocab - 2)
    writer.add_pad_token_id(toy.n_vocab - 4)
    writer.add_add_bos_token(False)


def _draft_metadata(writer: GGUFWriter, toy: Toy) -> None:
    writer.add_name("toy draft")
    writer.add_block_count(toy.draft_layers)
    writer.add_context_length(toy.n_ctx)
    writer.add_embedding_length(toy.n_embd)
    writer.add_feed_forward_length(toy.n_ff)
    writer.add_head_count(toy.n_heads)
    writer.add_head_count_kv(toy.n_kv_heads)
    writer.add_key_length(toy.head_dim)
    writer.add_value_length(toy.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e7)
    writer.add_uint32("dflash.block_size", toy.block_size)
    writer.add_array("dflash.target_layers", [tap + 1 for tap in toy.taps])
    if toy.window:
        is_window = [layer < toy.draft_layers - toy.full_layers for layer in range(toy.draft_layers)]
        writer.add_sliding_window(toy.window)
        writer.add_sliding_window_pattern(is_window)
    if toy.normed_taps:
        writer.add_string("dflash.decoder_arch", toy.arch)
    if toy.causal is not None:
        writer.add_causal_attention(toy.causal)
    if toy.draft_rot is not None:
        writer.add_rope_dimension_count(toy.draft_rot)
    if toy.yarn is not None:
        writer.add_string("dflash.rope.scaling.type", "yarn")
        writer.add_float32("dflash.rope.scaling.factor", toy.yarn)
        writer.add_uint32("dflash.rope.scaling.original_context_length", 32)
    if toy.draft == "dflash2":
        for key, value in (("conv_kernel_size", toy.conv_kernel), ("conv_group_size", toy.conv_group)):
            writer.add_uint32(f"dflash.{key}", value)
        writer.add_uint32("dflash.selector_rank", toy.rank)
        writer.add_uint32("dflash.selector_top_k", toy.selector_top_k)
    if toy.draft == "dspark":
        writer.add_bool("dflash.sample_from_anchor", toy.from_anchor)
        writer.add_bool("dflash.has_confidence_head", toy.confidence)
    writer.add_vocab_size(toy.n_vocab)
    if toy.draft_tokens:
        _tokenizer(writer, toy)
    else:
        writer.add_tokenizer_model("none")
    writer.add_mask_token_id(toy.n_vocab - 1)


def _recurrent(toy: Toy, layer: int) -> bool:
    return not toy.attention_every or (layer + 1) % toy.attention_every != 0


def _vocabulary(n_vocab: int) -> tuple[list[str], list[int]]:
    """As many byte tokens as fit (letters first), the merge "th", padding; the special tokens come last."""
    if n_vocab < 16:
        raise ValueError(f"n_vocab is {n_vocab}, a toy needs at least 16")
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    first = b"the quick\nbrownfxjmpsvlazydg0123456789()=:,._'\"+-*/[]#ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    order = list(dict.fromkeys([*first, *range(256)]))
    room = n_vocab - len(_SPECIAL) - 1
    normal = ["th", *(alphabet[byte] for byte in order[:room])]
    unused = [f"[PAD{i}]" for i in range(room + 1 - len(normal))]
    kinds = [_NORMAL] * len(normal) + [_UNUSED] * len(unused) + [_CONTROL] * len(_SPECIAL)
    return [*normal, *unused, *_SPECIAL], kinds


def _matrix(rng: np.random.Generator, rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
    """Keeps the mean square of its input, times `scale` squared."""
    return rng.normal(0, scale / np.sqrt(columns), (rows, columns))


def _residual(rng: np.random.Generator, toy: Toy, columns: int, scale: float) -> np.ndarray:
    """A projection into the residual stream, `scale` times as strong as an embedding; spares coordinate 0."""
    x = _matrix(rng, toy.n_embd, columns, scale / np.sqrt(toy.n_embd))
    x[0] = 0
    return x


def _norm(rng: np.random.Generator, size: int) -> np.ndarray:
    return 1 + rng.normal(0, 0.1, size)


def _ffn(
    rng: np.random.Generator, toy: Toy, prefix: str, scale: float, of_target: bool = True
) -> dict[str, np.ndarray]:
    if toy.n_experts and of_target:
        return _experts(rng, toy, prefix, scale)
    return {
        f"{prefix}ffn_gate.weight": _matrix(rng, toy.n_ff, toy.n_embd),
        f"{prefix}ffn_up.weight": _matrix(rng, toy.n_ff, toy.n_embd),
        f"{prefix}ffn_down.weight": _residual(rng, toy, toy.n_ff, scale),
    }


def _experts(rng: np.random.Generator, toy: Toy, prefix: str, scale: float) -> dict[str, np.ndarray]:
    def several(one: Callable[[], np.ndarray]) -> np.ndarray:
        return np.stack([one() for _ in range(toy.n_experts)])

    d, f, s = toy.n_embd, toy.n_ff, toy.n_ff_shared
    tensors = {f"{prefix}ffn_gate_inp.weight": _matrix(rng, toy.n_experts, d)}
    if toy.joined:
        tensors[f"{prefix}ffn_gate_up_exps.weight"] = several(lambda: _matrix(rng, 2 * f, d))
    else:
        tensors[f"{prefix}ffn_gate_exps.weight"] = several(lambda: _matrix(rng, f, d))
        tensors[f"{prefix}ffn_up_exps.weight"] = several(lambda: _matrix(rng, f, d))
    return tensors | {
        f"{prefix}ffn_down_exps.weight": several(lambda: _residual(rng, toy, f, scale)),
        # upstream's converter writes one row or a vector, by its version
        f"{prefix}ffn_gate_inp_shexp.weight": rng.normal(
            0, d**-0.5, (1, d) if toy.arch == "qwen3next" else d
        ),
        f"{prefix}ffn_gate_shexp.weight": _matrix(rng, s, d),
        f"{prefix}ffn_up_shexp.weight": _matrix(rng, s, d),
        f"{prefix}ffn_down_shexp.weight": _residual(rng, toy, s, scale),
    }


def _attention(
    rng: np.random.Generator, toy: Toy, prefix: str, q_rows: int, scale: float
) -> dict[str, np.ndarray]:
    return {
        f"{prefix}attn_q.weight": _matrix(rng, q_rows, toy.n_embd),
        f"{prefix}attn_k.weight": _matrix(rng, toy.n_kv_heads * toy.head_dim, toy.n_embd),
        f"{prefix}attn_v.weight": _matrix(rng, toy.n_kv_heads * toy.head_dim, toy.n_embd),
        f"{prefix}attn_output.weight": _residual(rng, toy, toy.n_heads * toy.head_dim, scale),
        f"{prefix}attn_q_norm.weight": _norm(rng, toy.head_dim),
        f"{prefix}attn_k_norm.weight": _norm(rng, toy.head_dim),
    }


def _delta_net(rng: np.random.Generator, toy: Toy, prefix: str) -> dict[str, np.ndarray]:
    inner = toy.ssm_v_heads * toy.state
    channels = 2 * toy.ssm_k_heads * toy.state + inner
    tensors = {
        f"{prefix}attn_qkv.weight": _matrix(rng, channels, toy.n_embd),
        f"{prefix}attn_gate.weight": _matrix(rng, inner, toy.n_embd),
        f"{prefix}ssm_conv1d.weight": rng.normal(0, 0.5, (channels, toy.conv)),
        f"{prefix}ssm_dt.bias": rng.uniform(-3, 0, toy.ssm_v_heads),
        f"{prefix}ssm_a": -np.exp(rng.uniform(-2, 1, toy.ssm_v_heads)),
        f"{prefix}ssm_beta.weight": _matrix(rng, toy.ssm_v_heads, toy.n_embd),
        f"{prefix}ssm_alpha.weight": _matrix(rng, toy.ssm_v_heads, toy.n_embd),
        f"{prefix}ssm_norm.weight": _norm(rng, toy.state),
        f"{prefix}ssm_out.weight": _residual(rng, toy, inner, 1.0),
    }
    return _of_next(tensors, toy, prefix) if toy.arch == "qwen3next" else tensors


def _of_next(w: dict[str, np.ndarray], toy: Toy, prefix: str) -> dict[str, np.ndarray]:
    """The matrices of a delta net as `qwen3next` files have them: grouped by key head."""

    def grouped(*parts: np.ndarray) -> np.ndarray:
        joined = np.concatenate([part.reshape(toy.ssm_k_heads, -1, toy.n_embd) for part in parts], 1)
        return joined.reshape(-1, toy.n_embd)

    beta, alpha = (w.pop(f"{prefix}ssm_{name}.weight") for name in ("beta", "alpha"))
    w[f"{prefix}ssm_ba.weight"] = grouped(beta, alpha)
    if toy.old:
        qkv, z = (w.pop(f"{prefix}attn_{name}.weight") for name in ("qkv", "gate"))
        keys = toy.ssm_k_heads * toy.state
        w[f"{prefix}ssm_in.weight"] = grouped(*np.split(qkv, [keys, 2 * keys]), z)
    return w


def _target_tensors(toy: Toy, rng: np.random.Generator) -> dict[str, np.ndarray]:
    embedding = _matrix(rng, toy.n_vocab, toy.n_embd)
    embedding[-1] = 0  # the mask token carries nothing but its position
    embedding[:, 0] = 1
    # about half of the mean square after the last norm is coordinate 0, the other half everything else
    constant = np.sqrt(toy.n_embd / 2)
    head = rng.normal(0, toy.own * np.sqrt(2 / toy.n_embd), (toy.n_vocab, toy.n_embd))
    head[:, 0] = rng.normal(0, toy.shared, toy.n_vocab) / constant
    head[-len(_SPECIAL) :] = 0
    head[-len(_SPECIAL) :, 0] = toy.special_logit / constant
    tensors = {"token_embd.weight": embedding, "output_norm.weight": np.ones(toy.n_embd)}
    if not toy.tied:
        tensors["output.weight"] = head
    for layer in range(toy.n_layers):
        prefix = f"blk.{layer}."
        tensors[f"{prefix}attn_norm.weight"] = _norm(rng, toy.n_embd)
        tensors[f"{prefix}post_attention_norm.weight"] = _norm(rng, toy.n_embd)
        if _recurrent(toy, layer):
            tensors |= _delta_net(rng, toy, prefix)
        else:
            tensors |= _attention(rng, toy, prefix, 2 * toy.n_heads * toy.head_dim, scale=1.0)
        tensors |= _ffn(rng, toy, prefix, scale=1.0)
    if toy.nextn:
        tensors |= _nextn(rng, toy)
    return tensors


def _nextn(rng: np.random.Generator, toy: Toy) -> dict[str, np.ndarray]:
    """A head that knows how frequent each token is, like the draft: coordinate 0 goes through."""
    prefix, d = f"blk.{toy.n_layers}.", toy.n_embd
    join = _matrix(rng, d, 2 * d)
    join[0], join[:, [0, d]] = 0, 0
    join[0, d] = 1
    return {
        f"{prefix}attn_norm.weight": _norm(rng, d),
        f"{prefix}post_attention_norm.weight": _norm(rng, d),
        f"{prefix}nextn.eh_proj.weight": join,
        f"{prefix}nextn.enorm.weight": _norm(rng, d),
        f"{prefix}nextn.hnorm.weight": _norm(rng, d),
        f"{prefix}nextn.shared_head_norm.weight": np.ones(d),
        **_attention(rng, toy, prefix, 2 * toy.n_heads * toy.head_dim, scale=toy.draft_own),
        **_ffn(rng, toy, prefix, scale=toy.draft_own),
    }


def _draft_tensors(toy: Toy, rng: np.random.Generator) -> dict[str, np.ndarray]:
    tensors = {
        "fc.weight": _matrix(rng, toy.n_embd, len(toy.taps) * toy.n_embd),
        "enc.output_norm.weight": _norm(rng, toy.n_embd),
        "output_norm.weight": np.ones(toy.n_embd),
    }
    if toy.normed_taps:
        tensors["enc.aux_norm.weight"] = np.stack([_norm(rng, toy.n_embd) for _ in toy.taps])
        for layer in range(toy.draft_layers):
            tensors[f"blk.{layer}.attn_gate.weight"] = _matrix(rng, toy.n_heads, toy.n_embd, 2)
    for layer in range(toy.draft_layers):
        prefix = f"blk.{layer}."
        tensors[f"{prefix}attn_norm.weight"] = _norm(rng, toy.n_embd)
        tensors[f"{prefix}ffn_norm.weight"] = _norm(rng, toy.n_embd)
        tensors |= _attention(rng, toy, prefix, toy.n_heads * toy.head_dim, scale=toy.draft_own)
        tensors |= _ffn(rng, toy, prefix, scale=toy.draft_own, of_target=False)
    if toy.own_tables:
        tensors["token_embd.weight"] = _matrix(rng, toy.n_vocab, toy.n_embd)
        tensors["output.weight"] = _matrix(rng, toy.n_draft_vocab or toy.n_vocab, toy.n_embd, 2)
    if toy.draft == "dflash2":
        tensors |= _dflash2(rng, toy)
    if toy.draft == "dspark":
        tensors |= _dspark(rng, toy)
    return tensors


def _table(rng: np.random.Generator, rows: int, toy: Toy) -> np.ndarray:
    """One of two tables whose rows' dot products have the deviation `pair_scale`."""
    return rng.normal(0, np.sqrt(toy.pair_scale) * toy.rank**-0.25, (rows, toy.rank))


def _dflash2(rng: np.random.Generator, toy: Toy) -> dict[str, np.ndarray]:
    tensors = {
        "selector_hidden.weight": _matrix(rng, toy.rank, toy.n_embd),
        "selector_predecessor.weight": _table(rng, toy.n_vocab, toy),
        "selector_successor.weight": _table(rng, toy.n_vocab, toy),
    }
    groups = toy.n_embd // toy.conv_group
    for layer in range(toy.draft_layers):
        for part in ("attn", "ffn"):
            base = rng.normal(0, 0.2, (2, toy.conv_kernel, toy.n_embd))
            base[:, 0] += 1
            base[1, :, 0] = 0  # coordinate 0 of the residual stream is unused
            tensors[f"blk.{layer}.{part}_conv_base"] = base
            dynamic = _matrix(rng, 2 * toy.conv_kernel * groups, toy.n_embd, 0.3)
            tensors[f"blk.{layer}.{part}_conv_proj.weight"] = dynamic
    return tensors


def _dspark(rng: np.random.Generator, toy: Toy) -> dict[str, np.ndarray]:
    n = toy.n_draft_vocab or toy.n_vocab
    tensors = {"markov_w1.weight": _table(rng, toy.n_vocab, toy), "markov_w2.weight": _table(rng, n, toy)}
    if toy.gated:
        tensors["markov_gate.weight"] = _matrix(rng, toy.rank, toy.n_embd + toy.rank)
        tensors["markov_gate.bias"] = rng.normal(0, 1, toy.rank)
    if toy.confidence:
        tensors["conf_proj.weight"] = _matrix(rng, 1, toy.n_embd + toy.rank)
        tensors["conf_proj.bias"] = rng.normal(0, 1, 1)
    if toy.n_draft_vocab:
        tensors["d2t"] = np.sort(rng.permutation(toy.n_vocab - len(_SPECIAL))[:n]).astype(np.int64)
        if not toy.own_tables:
            tensors["output.weight"] = _matrix(rng, n, toy.n_embd, 2)
    return tensors
