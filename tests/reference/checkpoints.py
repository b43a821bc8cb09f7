"""Writer of a toy draft's GGUF as the safetensors folder from which llama.cpp's converter would have made it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

import numpy as np

from reference.numpy_draft import read
from reference.tiny_models import bf16, safetensors_bytes

Schema = Literal["z-lab", "deepspec", "speculators", "poolside"]
_NAMES = {
    "fc": "fc.weight",
    "enc.output_norm": "hidden_norm.weight",
    "output_norm": "norm.weight",
    "token_embd": "embed_tokens.weight",
    "output": "lm_head.weight",
    "selector_predecessor": "candidate_selector.predecessor_codebook",
    "selector_successor": "candidate_selector.successor_codebook",
    "selector_hidden": "candidate_selector.hidden_projection.weight",
    "markov_w1": "markov_head.markov_w1.weight",
    "markov_w2": "markov_head.markov_w2.weight",
    "markov_gate": "markov_head.gate_proj.weight",
    "markov_gate.bias": "markov_head.gate_proj.bias",
    "conf_proj": "confidence_head.proj.weight",
    "conf_proj.bias": "confidence_head.proj.bias",
    "d2t": "d2t",
}
_PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj",
    "attn_gate": "self_attn.g_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_conv_base": "attention_conv.base_kernel",
    "attn_conv_proj": "attention_conv.kernel_projection",
    "ffn_conv_base": "mlp_conv.base_kernel",
    "ffn_conv_proj": "mlp_conv.kernel_projection",
}
_PARTS |= {f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"} | {
    f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")
}


def checkpoint_name(name: str) -> str:
    """The checkpoint's name of a tensor known by llama.cpp's."""
    short = name.removesuffix(".weight")
    if layer := re.fullmatch(r"blk\.(\d+)\.(.+)", short):
        end = "" if short.endswith("_conv_base") else ".weight"
        return f"layers.{layer[1]}.{_PARTS[layer[2]]}{end}"
    return _NAMES[short]


def write_checkpoint(
    folder: Path, gguf: Path, schema: Schema = "z-lab", half: bool = False, **config: Any
) -> Path:
    """Write config.json and model.safetensors (float32, with `half` bfloat16) to a new folder. Returns it."""
    keys, tensors = read(gguf)
    folder.mkdir()
    made: dict[str, tuple[str, np.ndarray]] = {}
    for name, x in tensors.items():
        if name == "d2t":
            made["d2t"] = ("I64", x - np.arange(len(x)))
            made["t2d"] = ("BOOL", np.isin(np.arange(keys["dflash.vocab_size"]), x))
        elif name == "enc.aux_norm.weight":
            for i, row in enumerate(x):
                data = ("BF16", bf16(row)) if half else ("F32", row.astype(np.float32))
                made[f"aux_hidden_norms.{i}.weight"] = data
        else:
            data = ("BF16", bf16(x)) if half else ("F32", x.astype(np.float32))
            made[checkpoint_name(name)] = data
    if schema == "poolside":
        made = _joined(made)
    (folder / "model.safetensors").write_bytes(safetensors_bytes(made))
    (folder / "config.json").write_text(json.dumps(_config(keys, tensors, schema) | config))
    return folder


def _joined(made: dict[str, tuple[str, np.ndarray]]) -> dict[str, tuple[str, np.ndarray]]:
    """Queries, keys and values of a layer as one matrix."""
    found = dict(made)
    for name in made:
        if name.endswith("self_attn.q_proj.weight"):
            parts = [found.pop(name.replace("q_proj", f"{x}_proj")) for x in "qkv"]
            found[name.replace("q_proj", "qkv_proj")] = (parts[0][0], np.concatenate([x for _, x in parts]))
    return found


def _config(keys: dict[str, Any], tensors: dict[str, np.ndarray], schema: Schema) -> dict[str, Any]:
    get = {key.removeprefix("dflash."): value for key, value in keys.items()}.get
    head_dim = get("attention.key_length")
    taps = [i - 1 for i in get("target_layers")]
    pattern = get("attention.sliding_window_pattern")
    sizes: dict[str, Any] = {
        "hidden_size": get("embedding_length"),
        "num_hidden_layers": get("block_count"),
        "intermediate_size": get("feed_forward_length"),
        "num_attention_heads": get("attention.head_count"),
        "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "vocab_size": get("vocab_size"),
        "sliding_window": get("attention.sliding_window"),
        "use_sliding_window": pattern is not None,
        "layer_types": ["sliding_attention" if w else "full_attention" for w in pattern or []],
    }
    rope: dict[str, Any] = {"rope_theta": get("rope.freq_base"), "rope_type": "default"}
    if factor := get("rope.scaling.factor"):
        n_ctx = get("rope.scaling.original_context_length")
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": n_ctx}
    if n_rot := get("rope.dimension_count"):
        rope["partial_rotary_factor"] = n_rot / head_dim
    sizes["rope_parameters"] = rope
    drafting: dict[str, Any] = {
        "mask_token_id": keys["tokenizer.ggml.mask_token_id"],
        "target_layer_ids": taps,
    }
    for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
        if get(key):
            drafting[key] = get(key)
    config: dict[str, Any] = {"block_size": get("block_size")}
    if (causal := get("attention.causal")) is not None:
        config["is_causal"] = causal
    if "d2t" in tensors:
        config["draft_vocab_size"] = len(tensors["d2t"])
    if "markov_gate.weight" in tensors:
        config["markov_head_type"] = "gated"
    if schema == "z-lab":
        arch = "DFlash2DraftModel" if "selector_hidden.weight" in tensors else "DFlashDraftModel"
        return config | sizes | {"architectures": [arch], "dflash_config": drafting}
    if schema == "poolside":
        del sizes["use_sliding_window"]
        near = sizes.pop("rope_parameters")
        sizes["rope_parameters"] = {
            "full_attention": {**near, "rope_theta": 5e5},
            "sliding_attention": near,
        }
        return config | sizes | {"architectures": ["DFlashLagunaForCausalLM"], "dflash_config": drafting}
    if schema == "deepspec":
        return config | sizes | drafting | {"architectures": ["Qwen3DSparkModel"], "markov_rank": 32}
    inputs = {"aux_hidden_state_layer_ids": [i + 1 for i in taps], "mask_token_id": drafting["mask_token_id"]}
    return config | inputs | {"architectures": ["DSparkSpeculator"], "transformer_layer_config": sizes}
