"""Tiny random targets of the architectures whose state is K/V rows only, and a draft for them; see `toys` for how the two
relate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import ExpertGatingFuncType, GGMLQuantizationType, GGUFWriter

from reference import toys
from reference.model_files import add_tensor, finish
from reference.toys import _SPECIAL, _matrix, _norm

F32 = GGMLQuantizationType.F32


@dataclass(frozen=True, slots=True)
class KvToy:
    """Sizes and logit scales, named as in `toys.Toy`. yarn: stretch of positions beyond `n_ctx_first`. tied: no output matrix.

    mix: how much more a layer says than an embedding. sharp: how much queries single tokens out; a text of nearly even attention
    ends in one token for ever. constant: coordinate 0 of every embedding.
    Of `qwen3moe`, `laguna` and `gpt-oss`: experts; of `gpt-oss` also `window` and `period`, whose last layer sees everything.
    Of `laguna`: period of the layers that see everything (0: all do), from the first
    on; `window`, `window_heads` and `window_theta` of the others. gate: "head" or "element". The first n_dense layers are
    dense, others have experts. beta, attention: of YaRN.
    Of `llama`: biased: matrices have biases. linear: stretch of all positions. factor: of Llama 3.1's scaling of slow pairs
    beyond `n_ctx_first`. sliding: every layer has a window.
    Of `gemma3`: period of the layers that see everything, the last of each (0: all do), whose positions `linear` and `yarn`
    stretch; `window` and `window_theta` of the others. listed: how the file says which: as a list, by the period, or not at all
    (None), which is 6. softcap: of the logits.
    Of `gemma4` the same, and of layers that see everything: full_dim, full_kv: size and number of their K/V heads, k_is_v: values
    are the keys. per_layer: width of a layer's own embedding. sharing: last layers without keys and values, whose feed-forward
    layers are twice as wide. mixture: experts beside every feed-forward layer.
    """

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
    template: str = ""
    n_rot: int | None = None
    period: int = 4
    window: int = 12
    window_heads: int = 6
    window_theta: float = 1e4
    beta: float | None = None
    attention: float | None = None
    gate: str = "head"
    n_dense: int = 1
    n_experts: int = 8
    n_used: int = 3
    n_ff_expert: int = 32
    n_ff_shared: int = 48
    scale: float = 2.5
    biased: bool = False
    linear: float | None = None
    factor: float | None = None
    sliding: bool = False
    listed: bool | None = True
    softcap: float | None = None
    full_dim: int = 64
    full_kv: int = 1
    k_is_v: bool = False
    per_layer: int = 0
    sharing: int = 0
    mixture: bool = False

    def heads(self, layer: int) -> int:
        """Query heads of a layer."""
        return self.window_heads if self.has_window(layer) and self.arch == "laguna" else self.n_heads

    def has_window(self, layer: int) -> bool:
        if self.arch not in ("laguna", "gpt-oss", "gemma3", "gemma4") or not self.period:
            return self.sliding
        return (layer + (self.arch != "laguna")) % self.period != 0

    def width(self, layer: int) -> int:
        """Of a layer's feed-forward layer."""
        return self.n_ff * (1 + (layer >= self.n_layers - self.sharing))


# seed -> fields of `KvToy`
VARIANTS: dict[int, dict[str, Any]] = {
    21: {},
    22: {"tied": True, "mix": 3.0, "n_heads": 6, "n_kv_heads": 1, "head_dim": 16, "n_layers": 3},
    23: {"yarn": 4.0, "n_kv_heads": 4},
    24: {"arch": "qwen3moe", "n_kv_heads": 1, "n_experts": 12, "n_used": 4},
    31: {"arch": "laguna", "n_rot": 16, "yarn": 8.0, "n_layers": 6},
    32: {"arch": "laguna", "period": 3, "window": 30, "gate": "element", "n_dense": 2, "window_heads": 8},
    33: {
        "arch": "laguna",
        "period": 0,
        "gate": "element",
        "n_dense": 3,
        "n_experts": 6,
        "n_used": 2,
        "yarn": 4.0,
    },
    34: {
        "arch": "laguna",
        "n_rot": 16,
        "yarn": 32.0,
        "beta": 64.0,
        "attention": 1.0,
        "window": 7,
        "n_layers": 5,
        "scale": 1.0,
    },
    41: {"arch": "llama"},
    42: {
        "arch": "llama",
        "n_heads": 8,
        "n_kv_heads": 1,
        "head_dim": 16,
        "biased": True,
        "linear": 4.0,
    },
    43: {"arch": "llama", "n_kv_heads": 4, "factor": 8.0},
    44: {"arch": "llama", "window": 30, "window_heads": 4, "sliding": True},
    45: {"arch": "llama", "yarn": 4.0},
    46: {"arch": "llama", "tied": True, "mix": 3.0, "n_layers": 3},
    51: {"arch": "gpt-oss", "period": 2, "yarn": 32.0},
    52: {
        "arch": "gpt-oss",
        "period": 3,
        "window": 30,
        "n_heads": 8,
        "n_kv_heads": 1,
        "n_layers": 6,
        "n_experts": 12,
        "n_used": 4,
    },
    61: {
        "arch": "gemma3",
        "n_layers": 7,
        "period": 6,
        "listed": None,
        "tied": True,
        "theta": 1e6,
        "n_kv_heads": 1,
    },
    62: {"arch": "gemma3", "period": 3, "linear": 8.0, "n_heads": 8, "head_dim": 16, "window": 30},
    63: {"arch": "gemma3", "period": 2, "listed": False, "softcap": 12.0, "window": 7},
    64: {"arch": "gemma3", "n_layers": 62, "period": 6, "n_ff": 48, "mix": 0.15, "sharp": 2.0},
    65: {"arch": "gemma3", "period": 0, "yarn": 4.0},
    71: {
        "arch": "gemma4",
        "n_layers": 6,
        "period": 3,
        "k_is_v": True,
        "softcap": 20.0,
        "sharp": 4.0,
    },
    86: {
        "arch": "gemma4",
        "softcap": 30.0,
        "sharp": 3.0,
        "mix": 0.7,
        "n_layers": 6,
        "period": 3,
        "per_layer": 8,
        "sharing": 3,
        "n_kv_heads": 1,
        "window": 7,
        "full_kv": 1,
    },
    73: {
        "arch": "gemma4",
        "softcap": 40.0,
        "period": 2,
        "mixture": True,
        "k_is_v": True,
        "full_kv": 2,
        "full_dim": 32,
        "head_dim": 16,
    },
}


def write_target(directory: Path, seed: int, kind: GGMLQuantizationType = F32, **sizes: Any) -> Path:
    """Write `SEED-ARCH.gguf`, matrices of type `kind`; `sizes` are fields of `KvToy`."""
    toy = KvToy(**sizes)
    rng = np.random.default_rng(seed)
    path = directory / f"{seed}-{toy.arch}.gguf"
    writer = GGUFWriter(path, toy.arch)
    _metadata(writer, toy)
    for name, x in _tensors(toy, rng).items():
        of = F32 if name.endswith(("ffn_gate_inp.weight", ".bias")) else kind
        add_tensor(writer, name, x, lambda _name, _width, of=of: of)
    finish(writer)
    return path


def write_pair(
    directory: Path,
    seed: int,
    draft: dict[str, Any] | None = None,
    kind: GGMLQuantizationType = F32,
    **sizes: Any,
) -> tuple[Path, Path]:
    """A target, and a draft for it whose own fields of `toys.Toy` are `draft`."""
    toy = KvToy(**sizes)
    shared = {"n_vocab": toy.n_vocab, "n_embd": toy.n_embd, "n_layers": toy.n_layers, "n_ctx": toy.n_ctx}
    _, path = toys.write_pair(directory, seed, kind, **{**shared, **(draft or {})})
    return write_target(directory, seed, kind, **sizes), path


def _metadata(writer: GGUFWriter, toy: KvToy) -> None:
    writer.add_name(f"toy {toy.arch}")
    writer.add_block_count(toy.n_layers)
    writer.add_context_length(toy.n_ctx)
    writer.add_embedding_length(toy.n_embd)
    widths = [toy.width(i) for i in range(toy.n_layers)]
    writer.add_feed_forward_length(widths if toy.sharing else toy.n_ff)
    writer.add_head_count(
        [toy.heads(i) for i in range(toy.n_layers)] if toy.arch == "laguna" else toy.n_heads
    )
    if toy.arch != "gemma4":
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
        if toy.beta is not None:
            writer.add_float32(prefix + "yarn_beta_fast", toy.beta)
        if toy.attention is not None:
            writer.add_float32(prefix + "yarn_attn_factor", toy.attention)
    if toy.linear is not None:
        writer.add_string(f"{toy.arch}.rope.scaling.type", "linear")
        writer.add_float32(f"{toy.arch}.rope.scaling.factor", toy.linear)
    if toy.arch == "laguna":
        _laguna_metadata(writer, toy)
    if toy.arch in ("gemma3", "gemma4"):
        _gemma_metadata(writer, toy)
    if toy.arch == "llama":
        writer.add_rope_dimension_count(toy.head_dim)
        if toy.sliding:
            writer.add_sliding_window(toy.window)
    if toy.arch == "gpt-oss":
        writer.add_sliding_window(toy.window)
        if toy.period != 2:
            writer.add_sliding_window_pattern([toy.has_window(i) for i in range(toy.n_layers)])
    if toy.arch in ("qwen3moe", "gpt-oss"):
        writer.add_expert_count(toy.n_experts)
        writer.add_expert_used_count(toy.n_used)
        writer.add_expert_feed_forward_length(toy.n_ff_expert)
    if toy.template:
        writer.add_chat_template(toy.template)
    if toy.arch == "laguna":
        _laguna_tokenizer(writer, toy)
    else:
        toys._tokenizer(writer, toy, {"llama": "smollm", "gpt-oss": "gpt-4o"}.get(toy.arch, "qwen2"))


def _laguna_metadata(writer: GGUFWriter, toy: KvToy) -> None:
    if toy.period:
        writer.add_sliding_window(toy.window)
        writer.add_sliding_window_pattern([toy.has_window(i) for i in range(toy.n_layers)])
        writer.add_rope_freq_base_swa(toy.window_theta)
        writer.add_rope_dimension_count_swa(toy.head_dim)
    writer.add_rope_dimension_count(toy.n_rot or toy.head_dim)
    writer.add_leading_dense_block_count(toy.n_dense)
    writer.add_expert_count(toy.n_experts)
    writer.add_expert_used_count(toy.n_used)
    writer.add_expert_feed_forward_length(toy.n_ff_expert)
    writer.add_expert_shared_feed_forward_length(toy.n_ff_shared)
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(toy.scale)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)


def _gemma_metadata(writer: GGUFWriter, toy: KvToy) -> None:
    if toy.period:
        writer.add_sliding_window(toy.window)
        if toy.listed:
            writer.add_sliding_window_pattern([toy.has_window(i) for i in range(toy.n_layers)])
        elif toy.listed is not None:
            writer.add_sliding_window_pattern(toy.period)
        if toy.window_theta != 1e4:
            writer.add_rope_freq_base_swa(toy.window_theta)
    if toy.softcap is not None:
        writer.add_final_logit_softcapping(toy.softcap)
    if toy.arch == "gemma4":
        layers = range(toy.n_layers)
        writer.add_head_count_kv([toy.n_kv_heads if toy.has_window(i) else toy.full_kv for i in layers])
        writer.add_key_length(toy.full_dim)
        writer.add_value_length(toy.full_dim)
        writer.add_key_length_swa(toy.head_dim)
        writer.add_value_length_swa(toy.head_dim)
        writer.add_rope_dimension_count(toy.full_dim)
        writer.add_rope_dimension_count_swa(toy.head_dim)
        writer.add_shared_kv_layers(toy.sharing)
        writer.add_embedding_length_per_layer_input(toy.per_layer)
        if toy.mixture:
            writer.add_expert_count(toy.n_experts)
            writer.add_expert_used_count(toy.n_used)
            writer.add_expert_feed_forward_length(toy.n_ff_expert)


def _laguna_tokenizer(writer: GGUFWriter, toy: KvToy) -> None:
    """As older files have it: nothing says that </assistant> ends an answer."""
    tokens, kinds = toys._vocabulary(toy.n_vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("laguna")
    writer.add_token_list([*tokens[:-4], "〈|EOS|〉", "<pad>", "</assistant>", "<|mask|>"])
    writer.add_token_types([*kinds[:-4], 3, 3, 4, 3])
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(toy.n_vocab - 4)
    writer.add_eos_token_id(toy.n_vocab - 4)
    writer.add_add_bos_token(False)


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
    if toy.factor is not None:
        tensors["rope_freqs.weight"] = slow_pairs(toy, toy.factor)
    if toy.arch == "gemma4":
        turning = toy.full_dim // 8  # a quarter of the pairs
        tensors["rope_freqs.weight"] = np.where(np.arange(toy.full_dim // 2) < turning, 1.0, 1e30)
    if toy.per_layer:
        p = toy.per_layer * toy.n_layers
        tensors["per_layer_token_embd.weight"] = _matrix(rng, toy.n_vocab, p, toy.n_layers**0.5)
        tensors["per_layer_model_proj.weight"] = _matrix(rng, p, d, d**0.5)
        tensors["per_layer_proj_norm.weight"] = _norm(rng, toy.per_layer)
    for layer in range(toy.n_layers):
        found = (_gemma4_layer if toy.arch == "gemma4" else _layer)(toy, rng, layer)
        tensors |= {f"blk.{layer}.{name}": x for name, x in found.items()}
    return tensors


def _layer(toy: KvToy, rng: np.random.Generator, layer: int) -> dict[str, np.ndarray]:
    d, q, kv = toy.n_embd, toy.heads(layer) * toy.head_dim, toy.n_kv_heads * toy.head_dim
    tensors = {
        "attn_norm.weight": _norm(rng, d),
        "ffn_norm.weight": _norm(rng, d),
        "attn_q.weight": _matrix(rng, q, d),
        "attn_k.weight": _matrix(rng, kv, d),
        "attn_v.weight": _matrix(rng, kv, d),
        "attn_output.weight": _residual(rng, toy, q),
        "attn_q_norm.weight": toy.sharp * _norm(rng, toy.head_dim),
        "attn_k_norm.weight": _norm(rng, toy.head_dim),
    }
    if toy.arch == "gemma3":
        tensors |= {f"post_{x}_norm.weight": toy.mix * _norm(rng, d) for x in ("attention", "ffw")}
    if toy.arch in ("llama", "gpt-oss"):
        for x in "qk":
            del tensors[f"attn_{x}_norm.weight"]
        tensors["attn_q.weight"] *= toy.sharp
    if toy.arch == "llama":
        tensors |= _swiglu(toy, rng, toy.n_ff, "")
        return tensors | _biases(tensors, rng) if toy.biased else tensors
    if toy.arch == "gpt-oss":
        tensors["post_attention_norm.weight"] = tensors.pop("ffn_norm.weight")
        tensors |= {n: x for n, x in _experts(toy, rng).items() if "_shexp" not in n and "probs_b" not in n}
        for x in ("gate", "up"):  # so that some are clamped
            tensors[f"ffn_{x}_exps.weight"] *= 4
        return tensors | _biases(tensors, rng) | {"attn_sinks.weight": rng.normal(1, 1, toy.n_heads)}
    if toy.arch == "laguna":
        tensors["attn_gate.weight"] = _matrix(rng, toy.heads(layer) if toy.gate == "head" else q, d, 2.0)
        if layer >= toy.n_dense:
            return tensors | _experts(toy, rng)
    if toy.arch == "qwen3moe":
        found = _experts(toy, rng)
        return tensors | {
            name: x for name, x in found.items() if "_shexp" not in name and "probs_b" not in name
        }
    return tensors | _swiglu(toy, rng, toy.n_ff, "")


def _biases(tensors: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Beside each matrix, or each of several."""
    biases = {
        n.replace("weight", "bias"): rng.normal(0, 0.05, x.shape[:-1])
        for n, x in tensors.items()
        if x.ndim > 1
    }
    for n, x in biases.items():
        if n.startswith(("attn_output", "ffn_down")):
            x[..., 0] = 0
    return biases


def _gemma4_layer(toy: KvToy, rng: np.random.Generator, layer: int) -> dict[str, np.ndarray]:
    d, near = toy.n_embd, toy.has_window(layer)
    size = toy.head_dim if near else toy.full_dim
    q, kv = toy.n_heads * size, (toy.n_kv_heads if near else toy.full_kv) * size
    tensors = {
        "attn_norm.weight": _norm(rng, d),
        "attn_q.weight": _matrix(rng, q, d),
        "attn_q_norm.weight": toy.sharp * size**-0.5 * _norm(rng, size),  # scores are not scaled
        "attn_output.weight": _residual(rng, toy, q),
        "post_attention_norm.weight": toy.mix * _norm(rng, d),
        "ffn_norm.weight": _norm(rng, d),
        "post_ffw_norm.weight": toy.mix * _norm(rng, d),
        "layer_output_scale.weight": rng.uniform(0.7, 1.0, 1),
        **_swiglu(toy, rng, toy.width(layer), ""),
    }
    if layer < toy.n_layers - toy.sharing:
        tensors |= {"attn_k.weight": _matrix(rng, kv, d), "attn_k_norm.weight": _norm(rng, size)}
        if near or not toy.k_is_v:
            tensors["attn_v.weight"] = _matrix(rng, kv, d)
    if toy.per_layer:
        tensors["inp_gate.weight"] = _matrix(rng, toy.per_layer, d)
        tensors["proj.weight"] = _residual(rng, toy, toy.per_layer)
        tensors["post_norm.weight"] = toy.mix * _norm(rng, d)
    if toy.mixture:
        found = {name: x for name, x in _experts(toy, rng).items() if "_shexp" not in name}
        del found["exp_probs_b.bias"]
        tensors |= found | {
            "ffn_gate_inp.scale": d**0.5 * _norm(rng, d),
            "ffn_down_exps.scale": _norm(rng, toy.n_experts),
            "pre_ffw_norm_2.weight": _norm(rng, d),
            **{f"post_ffw_norm_{i}.weight": _norm(rng, d) for i in (1, 2)},
        }
    return tensors


def _swiglu(toy: KvToy, rng: np.random.Generator, width: int, end: str) -> dict[str, np.ndarray]:
    return {
        f"ffn_gate{end}.weight": _matrix(rng, width, toy.n_embd),
        f"ffn_up{end}.weight": _matrix(rng, width, toy.n_embd),
        f"ffn_down{end}.weight": _residual(rng, toy, width),
    }


def _experts(toy: KvToy, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Experts, a router, a bias that changes whom it picks, and a shared expert."""
    parts = [_swiglu(toy, rng, toy.n_ff_expert, "_exps") for _ in range(toy.n_experts)]
    return {
        "ffn_gate_inp.weight": _matrix(rng, toy.n_experts, toy.n_embd, 2.0),
        "exp_probs_b.bias": rng.normal(0, 0.3, toy.n_experts),
        **{name: np.stack([part[name] for part in parts]) for name in parts[0]},
        **_swiglu(toy, rng, toy.n_ff_shared, "_shexp"),
    }


def slow_pairs(toy: KvToy, factor: float, low: float = 1.0, high: float = 4.0) -> np.ndarray:
    """Llama 3.1's divisors of the angles: 1 for pairs that turn `high` times within `n_ctx_first`, `factor` for those that turn
    less than `low` times, and between the two so that the frequency is interpolated."""
    turns = toy.n_ctx_first * toy.theta ** (-np.arange(0, toy.head_dim, 2) / toy.head_dim) / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def llama_cpp_agrees(toy: KvToy) -> bool:
    """Whether the vendored revision of llama.cpp reads all keys of such a file: not how fast YaRN's pairs must turn to be
    kept, nor what it multiplies by, nor windows of `llama`."""
    return toy.beta is None and toy.attention is None and not toy.sliding
