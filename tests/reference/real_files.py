"""Headers of published model files, condensed: sizes, recipes and keys from which each header is written again.

`write` makes a sparse file of the full size with the header in front: a loader believes in 16 GB at no cost, as long as nobody
reads the weights. Vocabularies are left out; `tokens` puts a small one in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_ggml.files.tensor_info import ggml_types, tensor_nbytes
from reference.gguf_bytes import Builder

VOCAB, HEAD_DIM, STATE, K_HEADS, CONV = 248320, 256, 128, 16, 4
Tensors = dict[
    str, tuple[str, tuple[int, ...]]
]  # name -> ggml's name of the type in capitals, shape in ggml order


@dataclass(frozen=True)
class Size:
    """Sizes of a Qwen3.5 target, or with experts `ff` wide, of which a token uses `used`, and one for all `shared` wide."""

    layers: int
    d: int
    ff: int
    heads: int
    kv: int
    v_heads: int
    tied: bool = False
    experts: int = 0
    used: int = 0
    shared: int = 0
    arch: str = "qwen35"
    vocab: int = VOCAB


SIZES = {
    "0.8B": Size(24, 1024, 3584, 8, 2, 16, tied=True),
    "2B": Size(24, 2048, 6144, 8, 2, 16, tied=True),
    "4B": Size(32, 2560, 9216, 16, 4, 32, tied=True),
    "9B": Size(32, 4096, 12288, 16, 4, 32),
    "27B": Size(64, 5120, 17408, 24, 4, 48),
    "35B-A3B": Size(40, 2048, 512, 16, 2, 32, experts=256, used=8, shared=512, arch="qwen35moe"),
    "80B-A3B": Size(
        48, 2048, 512, 16, 2, 32, experts=512, used=10, shared=512, arch="qwen3next", vocab=151936
    ),
}


@dataclass(frozen=True)
class Recipe:
    """A target's file: which type its matrices have, and which parts are in it besides.

    more: type of ffn_down, attn_qkv and attn_v; decay: of ssm_alpha and ssm_beta; extra: what only some writers add; joined: gate
    and up of an expert are one matrix; old: a qwen3next file with `ssm_in`.
    """

    version: str
    size: str
    matrix: str
    more: str
    decay: str
    embedding: str
    head: str = "Q6_K"
    mtp: bool = False
    scales: tuple[str, ...] = ()
    ollama: bool = False
    joined: bool = False
    old: bool = False

    @property
    def name(self) -> str:
        return f"Qwen{self.version}-{self.size}"


def _q4_k_m(version: str, size: str, **more: Any) -> Recipe:
    return Recipe(version, size, "Q4_K", "Q6_K", "F32", "Q4_K", **more)


_UD4 = Recipe("3.6", "27B", "Q4_K", "Q5_K", "Q8_0", "Q5_K")
_NVFP4 = Recipe("3.6", "27B", "NVFP4", "NVFP4", "F32", "BF16", "BF16")
TARGETS = {
    "Qwen3.5-0.8B-Q4_K_M": _q4_k_m("3.5", "0.8B"),
    "Qwen3.5-2B-Q4_K_M": _q4_k_m("3.5", "2B"),
    "Qwen3.5-4B-Q4_K_M": _q4_k_m("3.5", "4B"),
    "Qwen3.5-9B-Q4_K_M": _q4_k_m("3.5", "9B"),
    "Qwen3.5-27B-Q4_K_M": _q4_k_m("3.5", "27B"),
    "Qwen3.6-27B-MTP-Q4_K_M": _q4_k_m("3.6", "27B", mtp=True),
    "Qwen3.6-27B-BF16": Recipe("3.6", "27B", "BF16", "BF16", "BF16", "BF16", "BF16"),
    "Qwen3.6-27B-Q8_0": Recipe("3.6", "27B", "Q8_0", "Q8_0", "Q8_0", "Q8_0", "Q8_0"),
    "Qwen3.6-27B-Q5_K_M": Recipe("3.6", "27B", "Q5_K", "Q6_K", "Q5_K", "Q5_K"),
    "Qwen3.6-27B-Q4_0": Recipe("3.6", "27B", "Q4_0", "Q4_1", "Q4_0", "Q4_0"),
    "Qwen3.6-27B-IQ4_XS": Recipe("3.6", "27B", "IQ4_XS", "Q5_K", "IQ4_XS", "IQ4_XS"),
    "Qwen3.6-27B-IQ4_NL": Recipe("3.6", "27B", "IQ4_NL", "Q5_K", "IQ4_NL", "IQ4_NL"),
    "Qwen3.6-27B-UD-Q2_K_XL": Recipe("3.6", "27B", "Q2_K", "IQ3_XXS", "Q8_0", "IQ3_S"),
    "Qwen3.6-27B-UD-Q3_K_XL": Recipe("3.6", "27B", "Q3_K", "IQ4_XS", "Q8_0", "Q4_K"),
    "Qwen3.6-27B-UD-Q4_K_XL": _UD4,
    "Qwen3.8-27B-MTP-UD-Q4_K_XL": replace(_UD4, version="3.8", mtp=True),
    "Qwen3.6-27B-NVFP4-modelopt": replace(_NVFP4, scales=("scale", "input_scale")),
    "Qwen3.6-27B-NVFP4-noscale": _NVFP4,
    "Qwen3.6-27B-MXFP4": Recipe("3.6", "27B", "MXFP4", "MXFP4", "Q8_0", "Q8_0", "Q8_0"),
    "ollama-qwen3.5-0.8b": _q4_k_m("3.5", "0.8B", ollama=True),
    "Qwen3.5-35B-A3B-Q4_K_M": _q4_k_m("3.5", "35B-A3B"),
    "Qwen3.6-35B-A3B-MTP-UD-Q4_K_XL": replace(_UD4, size="35B-A3B", mtp=True),
    "Qwen3.6-35B-A3B-fused-Q8_0": Recipe(
        "3.6", "35B-A3B", "Q8_0", "Q8_0", "Q8_0", "Q8_0", "Q8_0", joined=True
    ),
    "Qwen3.6-35B-A3B-NVFP4": replace(_NVFP4, size="35B-A3B", scales=("scale", "input_scale")),
    "Qwen3-Next-80B-A3B-Q4_K_M": _q4_k_m("3-Next", "80B-A3B"),
    "Qwen3-Coder-Next-old-Q4_K_M": _q4_k_m("3-Coder-Next", "80B-A3B", old=True),
}


def target_keys(recipe: Recipe) -> dict[str, Any]:
    """The keys of a target's header, as unsloth's and Ollama's converters write them, without the vocabulary."""
    s = SIZES[recipe.size]
    interval = 4
    keys: dict[str, Any] = {
        "block_count": s.layers + recipe.mtp,
        "context_length": 262144,
        "embedding_length": s.d,
        "attention.head_count": s.heads,
        "attention.head_count_kv": s.kv,
        "rope.dimension_sections": [11, 11, 10, 0],
        "rope.freq_base": 1e7,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "ssm.conv_kernel": CONV,
        "ssm.state_size": STATE,
        "ssm.group_count": K_HEADS,
        "ssm.time_step_rank": s.v_heads,
        "ssm.inner_size": s.v_heads * STATE,
        "full_attention_interval": interval,
        "rope.dimension_count": 64,
    }
    if s.experts:
        keys |= {"expert_count": s.experts, "expert_used_count": s.used}
        keys |= {"expert_feed_forward_length": s.ff, "expert_shared_feed_forward_length": s.shared}
    else:
        keys["feed_forward_length"] = s.ff
    if s.arch == "qwen3next":
        del keys["rope.dimension_sections"]
    if recipe.mtp:
        keys["nextn_predict_layers"] = 1
    if recipe.ollama:
        keys["attention.head_count_kv"] = [0 if (i + 1) % interval else s.kv for i in range(s.layers)]
        keys["rope.dimension_sections"] = keys["mrope_sections"] = [11, 11, 10]
        keys["image_token_id"] = 248056
    return {
        "general.architecture": s.arch,
        "general.sampling.top_k": 20,
        "general.sampling.top_p": 0.95,
        "general.sampling.temp": 1.0,
        "general.name": recipe.name,
        "general.basename": recipe.name,
        "general.size_label": recipe.size,
    } | {f"{s.arch}.{key}": value for key, value in keys.items()}


def target_tensors(recipe: Recipe) -> Tensors:
    """The tensors of a target's header."""
    s = SIZES[recipe.size]
    matrix, more, d = recipe.matrix, recipe.more, s.d
    inner, conv_channels = s.v_heads * STATE, 2 * K_HEADS * STATE + s.v_heads * STATE
    out: Tensors = {
        "token_embd.weight": (recipe.embedding, (d, s.vocab)),
        "output_norm.weight": ("F32", (d,)),
    }
    if not s.tied:
        out["output.weight"] = (recipe.head, (d, s.vocab))

    def attention(plain: str, better: str) -> Tensors:
        return {
            "attn_q.weight": (plain, (d, 2 * s.heads * HEAD_DIM)),
            "attn_k.weight": (plain, (d, s.kv * HEAD_DIM)),
            "attn_v.weight": (better, (d, s.kv * HEAD_DIM)),
            "attn_output.weight": (plain, (s.heads * HEAD_DIM, d)),
            "attn_q_norm.weight": ("F32", (HEAD_DIM,)),
            "attn_k_norm.weight": ("F32", (HEAD_DIM,)),
        }

    def experts(plain: str, better: str) -> Tensors:
        n = s.experts
        parts: Tensors = {f"ffn_{x}_exps.weight": (plain, (d, s.ff, n)) for x in ("gate", "up")}
        if recipe.joined:
            parts = {"ffn_gate_up_exps.weight": (plain, (d, 2 * s.ff, n))}
        return parts | {
            "ffn_gate_inp.weight": ("F32", (d, n)),
            "ffn_down_exps.weight": (better, (s.ff, d, n)),
            "ffn_gate_inp_shexp.weight": ("F32", (d, 1) if recipe.joined else (d,)),
            "ffn_gate_shexp.weight": (plain, (d, s.shared)),
            "ffn_up_shexp.weight": (plain, (d, s.shared)),
            "ffn_down_shexp.weight": (better, (s.shared, d)),
        }

    def block(plain: str, better: str) -> Tensors:
        norms: Tensors = {"attn_norm.weight": ("F32", (d,)), "post_attention_norm.weight": ("F32", (d,))}
        if s.experts:
            return norms | experts(plain, better)
        return norms | {
            "ffn_gate.weight": (plain, (d, s.ff)),
            "ffn_up.weight": (plain, (d, s.ff)),
            "ffn_down.weight": (better, (s.ff, d)),
        }

    delta_net: Tensors = {
        "attn_qkv.weight": (more, (d, conv_channels)),
        "attn_gate.weight": (matrix, (d, inner)),
        "ssm_conv1d.weight": ("F32", (CONV, conv_channels)),
        "ssm_dt.bias": ("F32", (s.v_heads,)),
        "ssm_a": ("F32", (s.v_heads,)),
        "ssm_alpha.weight": (recipe.decay, (d, s.v_heads)),
        "ssm_beta.weight": (recipe.decay, (d, s.v_heads)),
        "ssm_norm.weight": ("F32", (STATE,)),
        "ssm_out.weight": (matrix, (inner, d)),
    }
    if s.arch == "qwen3next":
        del delta_net["ssm_alpha.weight"], delta_net["ssm_beta.weight"]
        delta_net["ssm_ba.weight"] = (recipe.decay, (d, 2 * s.v_heads))
    if recipe.old:
        del delta_net["attn_qkv.weight"], delta_net["attn_gate.weight"]
        delta_net["ssm_in.weight"] = (matrix, (d, conv_channels + inner))
    for i in range(s.layers):
        layer = block(matrix, more) | (delta_net if (i + 1) % 4 else attention(matrix, more))
        out |= {f"blk.{i}.{name}": tensor for name, tensor in layer.items()}
    if recipe.mtp:
        head: Tensors = {"nextn.eh_proj.weight": ("Q8_0", (2 * d, d))}
        head |= {f"nextn.{x}.weight": ("F32", (d,)) for x in ("enorm", "hnorm", "shared_head_norm")}
        mtp = block("Q8_0", "Q8_0") | attention("Q8_0", "Q8_0") | head
        out |= {f"blk.{s.layers}.{name}": tensor for name, tensor in mtp.items()}
    if recipe.ollama:
        out |= {"v.blk.0.attn_q.weight": ("F16", (768, 768)), "mtp.fc.weight": ("F16", (2 * d, d))}
        out = {re.sub(r"ssm_dt\.bias$", "ssm_dt", name): tensor for name, tensor in out.items()}
    scaled = {
        name.removesuffix("weight"): shape[2:] or (1,)
        for name, (kind, shape) in out.items()
        if kind == "NVFP4"
    }
    return out | {name + scale: ("F32", n) for name, n in scaled.items() for scale in recipe.scales}


DRAFT_FF, DRAFT_HEADS, DRAFT_KV, DRAFT_HEAD_DIM = 17408, 32, 8, 128
TAPS = (1, 16, 31, 46, 61)


@dataclass(frozen=True)
class DraftRecipe:
    """A draft of the 27B as GGUF. without: keys that this writer leaves out; renamed: tensors under another name; keys, tensors:
    what it adds."""

    arch: str
    matrix: str
    window: bool = False
    without: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    keys: tuple[tuple[str, Any], ...] = ()
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...] = ()


_BUUN = (("enc.output_norm", "dflash_hidden_norm"), ("fc", "dflash_fc"))
_LUCEBOX = DraftRecipe(
    "qwen35-dflash-draft",
    "Q8_0",
    without=("dflash.target_layer_ids",),
    renamed=(("enc.output_norm", "dflash.hidden_norm"), ("fc", "dflash.fc")),
    keys=(("rope.freq_base", 1e6), ("vocab_size", VOCAB), ("dflash.n_target_layers", 5)),
)
_UPSTREAM = DraftRecipe("dflash", "Q8_0", keys=(("rope.dimension_sections", [64, 0, 0, 0]),))
DRAFTS = {
    "buun-dflash-draft-3.6": DraftRecipe(
        "dflash-draft",
        "Q8_0",
        window=True,
        renamed=(*_BUUN, ("ffn_norm", "post_attention_norm")),
        keys=(("dflash.n_target_features", 25600),),
    ),
    "buun-3.6-noSWAkeys": DraftRecipe(
        "dflash-draft", "Q8_0", renamed=_BUUN, keys=(("dflash.n_target_features", 25600),)
    ),
    "buun-no-value_length": DraftRecipe(
        "dflash-draft", "IQ4_XS", without=("attention.value_length",), renamed=_BUUN
    ),
    "fork22105-april_target_layer_ids_": DraftRecipe(
        "dflash",
        "BF16",
        without=("target_layers", "mask_token_id"),
        keys=(("target_layer_ids", list(TAPS)), ("mask_token_id", 248070)),
    ),
    "lucebox-convert_dflash_to_gguf.py": replace(_LUCEBOX, matrix="F16"),
    "lucebox-quantize_draft_q8.py": _LUCEBOX,
    "up-3.5-q8": _UPSTREAM,
    "up-3.6-q4km": replace(_UPSTREAM, matrix="Q4_K", window=True),
    "up-3.6-q8": replace(_UPSTREAM, window=True),
    "up-dflash2": replace(
        _UPSTREAM,
        keys=(*_UPSTREAM.keys, ("conv_kernel_size", 4)),
        tensors=(("selector_hidden.weight", "Q8_0", (5120, 64)),),
    ),
    "up-ropefactors": replace(_UPSTREAM, tensors=(("token_embd.weight", "Q8_0", (5120, VOCAB)),)),
}


def draft_keys(recipe: DraftRecipe, d: int = 5120, taps: tuple[int, ...] = TAPS) -> dict[str, Any]:
    """The keys of a draft's header."""
    keys: dict[str, Any] = {
        "block_count": 5,
        "context_length": 262144,
        "embedding_length": d,
        "feed_forward_length": DRAFT_FF,
        "attention.head_count": DRAFT_HEADS,
        "attention.head_count_kv": DRAFT_KV,
        "rope.freq_base": 1e7,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.key_length": DRAFT_HEAD_DIM,
        "attention.value_length": DRAFT_HEAD_DIM,
    }
    common = {"general.architecture": recipe.arch, "general.name": "Qwen3.6 27B DFlash"} | {
        "general.size_label": "1.7B"
    }
    if recipe.arch == "dflash":
        keys |= {"block_size": 16, "target_layers": [tap + 1 for tap in taps]}
        if "mask_token_id" not in recipe.without:
            common["tokenizer.ggml.mask_token_id"] = 248070
    else:
        keys |= {
            "dflash.block_size": 16,
            "dflash.mask_token_id": 248070,
            "dflash.target_layer_ids": list(taps),
        }
    if recipe.window:
        keys |= {"attention.sliding_window": 2048, "attention.sliding_window_pattern": [True] * 4 + [False]}
    keys = {key: value for key, value in keys.items() if key not in recipe.without} | dict(recipe.keys)
    return common | {f"{recipe.arch}.{key}": value for key, value in keys.items()}


def draft_tensors(recipe: DraftRecipe, d: int = 5120, n_taps: int = len(TAPS)) -> Tensors:
    """The tensors of a draft's header."""
    kind, q, kv = recipe.matrix, DRAFT_HEADS * DRAFT_HEAD_DIM, DRAFT_KV * DRAFT_HEAD_DIM
    names = dict(recipe.renamed)
    parts: Tensors = {"fc": (kind, (n_taps * d, d)), "enc.output_norm": ("F32", (d,))}
    out: Tensors = {f"{names.get(name, name)}.weight": tensor for name, tensor in parts.items()}
    out["output_norm.weight"] = ("F32", (d,))
    layer: Tensors = {
        "attn_norm": ("F32", (d,)),
        "ffn_norm": ("F32", (d,)),
        "attn_q": (kind, (d, q)),
        "attn_k": (kind, (d, kv)),
        "attn_v": (kind, (d, kv)),
        "attn_output": (kind, (q, d)),
        "attn_q_norm": ("F32", (DRAFT_HEAD_DIM,)),
        "attn_k_norm": ("F32", (DRAFT_HEAD_DIM,)),
        "ffn_gate": (kind, (d, DRAFT_FF)),
        "ffn_up": (kind, (d, DRAFT_FF)),
        "ffn_down": (kind, (DRAFT_FF, d)),
    }
    for i in range(5):
        out |= {f"blk.{i}.{names.get(name, name)}.weight": tensor for name, tensor in layer.items()}
    return out | {name: (kind, shape) for name, kind, shape in recipe.tensors}


def tokens(n: int = 512) -> dict[str, Any]:
    """A small vocabulary under the keys of a real one."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(n)],
    }


def write(path: Path, keys: Mapping[str, Any], tensors: Tensors) -> Path:
    """A sparse GGUF file of the full size. Returns `path`."""
    codes = {kind.name.upper(): code for code, kind in ggml_types().items()}
    out, offset = Builder(), 0
    out.data += b"GGUF"
    for layout, value in (("I", 3), ("Q", len(tensors)), ("Q", len(keys))):
        out.number("count", layout, value)
    for key, value in keys.items():
        out.key(key, value)
    for name, (kind, shape) in tensors.items():
        offset += -offset % 32
        out.text("name", name)
        out.number("dimensions", "I", len(shape))
        for n in shape:
            out.number("shape", "Q", n)
        out.number("type", "I", codes[kind])
        out.number("offset", "Q", offset)
        offset += tensor_nbytes(codes[kind], shape)
    size = len(out.data) + -len(out.data) % 32 + offset
    with open(path, "wb") as file:
        file.write(out.data)
        file.truncate(size)
    return path


def write_target(folder: Path, name: str, **keys: Any) -> Path:
    """The target `name` of `TARGETS` in `folder`, with further keys."""
    recipe = TARGETS[name]
    return write(folder / f"{name}.gguf", target_keys(recipe) | keys, target_tensors(recipe))


def write_draft(folder: Path, name: str, file: str | None = None, **keys: Any) -> Path:
    """The draft `name` of `DRAFTS` in `folder`, as `file`, with further keys."""
    recipe = DRAFTS[name]
    return write(folder / (file or f"{name}.gguf"), draft_keys(recipe) | keys, draft_tensors(recipe))


def write_checkpoint(
    folder: Path,
    d: int,
    ff: int,
    taps: tuple[int, ...],
    layers: int,
    window: int | None,
    kv_heads: int = DRAFT_KV,
    mask: int = 248070,
) -> Path:
    """A draft as z-lab publishes it, with all layers but the last windowed, as a sparse safetensors file in `folder`."""
    folder.mkdir()
    q, kv = DRAFT_HEADS * DRAFT_HEAD_DIM, kv_heads * DRAFT_HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (d, len(taps) * d),
        "hidden_norm.weight": (d,),
        "norm.weight": (d,),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (d,),
        "post_attention_layernorm": (d,),
        "self_attn.q_proj": (q, d),
        "self_attn.k_proj": (kv, d),
        "self_attn.v_proj": (kv, d),
        "self_attn.o_proj": (d, q),
        "self_attn.q_norm": (DRAFT_HEAD_DIM,),
        "self_attn.k_norm": (DRAFT_HEAD_DIM,),
        "mlp.gate_proj": (ff, d),
        "mlp.up_proj": (ff, d),
        "mlp.down_proj": (d, ff),
    }
    for i in range(layers):
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    header, end = {}, 0
    for name, shape in shapes.items():
        start, n = end, 2
        for x in shape:
            n *= x
        end += n
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    config = {
        "architectures": ["DFlashDraftModel"],
        "hidden_size": d,
        "num_hidden_layers": layers,
        "intermediate_size": ff,
        "num_attention_heads": DRAFT_HEADS,
        "num_key_value_heads": kv_heads,
        "head_dim": DRAFT_HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e7,
        "vocab_size": VOCAB,
        "block_size": 16,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": list(taps)},
        "layer_types": ["sliding_attention" if window else "full_attention"] * (layers - 1)
        + ["full_attention"],
        "sliding_window": window,
        "use_sliding_window": window is not None,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
