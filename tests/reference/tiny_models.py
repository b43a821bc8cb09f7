"""The smallest complete target and draft, as keys and tensor shapes: for tests of parameters and bad files.

The tables are written out from the published layout, apart from the code under test.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from reference.gguf_bytes import Builder, Tensor, build, f32_tensor

D, FF, HEADS, KV, HEAD_DIM, ROT = 8, 12, 4, 2, 6, 4  # target; every size differs, so that a mix-up shows
S, H_K, H_V, CONV = 4, 2, 6, 4
DRAFT_HEADS, DRAFT_KV, DRAFT_HEAD_DIM, DRAFT_FF, BLOCK, MASK = 4, 1, 10, 14, 5, 7
TAPS = [0, 2]

_BYTES = [chr(b) for b in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100), *range(0x100, 0x144))]
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ã", "©")]
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*_BYTES, *(a + b for a, b in MERGES), *CONTROL, "<think>", "</think>", "[PAD1]", "[PAD2]", "<0x0A>"]
VOCAB = len(TOKENS)
TYPES = [1] * (VOCAB - 8) + [3] * 3 + [4] * 2 + [5] * 2 + [6]


def tokenizer_keys() -> dict[str, Any]:
    """A vocabulary of the byte alphabet, a few merges and one of each special kind."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.tokens": list(TOKENS),
        "tokenizer.ggml.token_type": list(TYPES),
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in MERGES],
        "tokenizer.ggml.eos_token_id": TOKENS.index("<|im_end|>"),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages }}",
    }


def target_keys() -> dict[str, Any]:
    """Four blocks, the second and the fourth with attention."""
    keys: dict[str, Any] = {
        "block_count": 4,
        "context_length": 64,
        "embedding_length": D,
        "feed_forward_length": FF,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": ROT,
        "rope.freq_base": 1e7,
        "rope.dimension_sections": [1, 1, 0, 0],
        "ssm.conv_kernel": CONV,
        "ssm.state_size": S,
        "ssm.group_count": H_K,
        "ssm.time_step_rank": H_V,
        "ssm.inner_size": H_V * S,
        "full_attention_interval": 2,
    }
    return {"general.architecture": "qwen35"} | {f"qwen35.{k}": v for k, v in keys.items()} | tokenizer_keys()


def target_shapes() -> dict[str, tuple[int, ...]]:
    """Tensors of `target_keys`, untied head."""
    channels, values = 2 * H_K * S + H_V * S, H_V * S
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (D, VOCAB),
        "output_norm.weight": (D,),
        "output.weight": (D, VOCAB),
    }
    for i in range(4):
        block = f"blk.{i}."
        shapes |= {block + f"{norm}.weight": (D,) for norm in ("attn_norm", "post_attention_norm")}
        shapes |= {block + "ffn_gate.weight": (D, FF), block + "ffn_up.weight": (D, FF)}
        shapes[block + "ffn_down.weight"] = (FF, D)
        if i % 2:
            shapes[block + "attn_q.weight"] = (D, HEADS * 2 * HEAD_DIM)
            shapes[block + "attn_output.weight"] = (HEADS * HEAD_DIM, D)
            shapes |= {block + f"attn_{x}.weight": (D, KV * HEAD_DIM) for x in "kv"}
            shapes |= {block + f"attn_{x}_norm.weight": (HEAD_DIM,) for x in "qk"}
        else:
            shapes |= {block + "attn_qkv.weight": (D, channels), block + "attn_gate.weight": (D, values)}
            shapes |= {block + "ssm_conv1d.weight": (CONV, channels), block + "ssm_out.weight": (values, D)}
            shapes |= {block + f"ssm_{x}.weight": (D, H_V) for x in ("alpha", "beta")}
            shapes |= {block + "ssm_a": (H_V,), block + "ssm_dt.bias": (H_V,)}
            shapes[block + "ssm_norm.weight"] = (S,)
    return shapes


EXPERTS, USED, EXPERT_FF, SHARED_FF = 5, 2, 9, 7


def moe_keys(arch: str = "qwen35moe") -> dict[str, Any]:
    """The same blocks with experts, under the keys of `qwen35moe` or `qwen3next`."""
    own = ("qwen35.feed_forward_length", "qwen35.rope.dimension_sections")
    dropped = own if arch == "qwen3next" else own[:1]
    keys = {key: value for key, value in target_keys().items() if key not in dropped}
    keys = {key.replace("qwen35.", f"{arch}."): value for key, value in keys.items()}
    sizes = {
        "expert_count": EXPERTS,
        "expert_used_count": USED,
        "expert_feed_forward_length": EXPERT_FF,
        "expert_shared_feed_forward_length": SHARED_FF,
    }
    return keys | {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in sizes.items()}


def moe_shapes(arch: str = "qwen35moe") -> dict[str, tuple[int, ...]]:
    """Tensors of `moe_keys`; the last block has gate and up of an expert as one matrix, the first of `qwen3next` has `ssm_in`."""
    shapes = {name: shape for name, shape in target_shapes().items() if ".ffn_" not in name}
    for i in range(4):
        block = f"blk.{i}."
        shapes[block + "ffn_gate_inp.weight"] = (D, EXPERTS)
        if i == 3:
            shapes[block + "ffn_gate_up_exps.weight"] = (D, 2 * EXPERT_FF, EXPERTS)
        else:
            shapes |= {block + f"ffn_{x}_exps.weight": (D, EXPERT_FF, EXPERTS) for x in ("gate", "up")}
        shapes[block + "ffn_down_exps.weight"] = (EXPERT_FF, D, EXPERTS)
        shapes[block + "ffn_gate_inp_shexp.weight"] = (D,)
        shapes |= {block + f"ffn_{x}_shexp.weight": (D, SHARED_FF) for x in ("gate", "up")}
        shapes[block + "ffn_down_shexp.weight"] = (SHARED_FF, D)
        if arch == "qwen3next" and not i % 2:
            del shapes[block + "ssm_alpha.weight"], shapes[block + "ssm_beta.weight"]
            shapes[block + "ssm_ba.weight"] = (D, 2 * H_V)
    if arch == "qwen3next":
        del shapes["blk.0.attn_qkv.weight"], shapes["blk.0.attn_gate.weight"]
        shapes["blk.0.ssm_in.weight"] = (D, 2 * H_K * S + 2 * H_V * S)
    return shapes


def draft_shapes() -> dict[str, tuple[int, ...]]:
    """Tensors of a draft with two layers, under llama.cpp's names."""
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (len(TAPS) * D, D),
        "enc.output_norm.weight": (D,),
        "output_norm.weight": (D,),
    }
    q, kv = DRAFT_HEADS * DRAFT_HEAD_DIM, DRAFT_KV * DRAFT_HEAD_DIM
    for i in range(2):
        block = f"blk.{i}."
        shapes |= {block + f"{norm}.weight": (D,) for norm in ("attn_norm", "ffn_norm")}
        shapes |= {block + "attn_q.weight": (D, q), block + "attn_output.weight": (q, D)}
        shapes |= {block + f"attn_{x}.weight": (D, kv) for x in "kv"}
        shapes |= {block + f"attn_{x}_norm.weight": (DRAFT_HEAD_DIM,) for x in "qk"}
        shapes |= {block + "ffn_gate.weight": (D, DRAFT_FF), block + "ffn_up.weight": (D, DRAFT_FF)}
        shapes[block + "ffn_down.weight"] = (DRAFT_FF, D)
    return shapes


def _gguf_draft_keys(arch: str) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "block_count": 2,
        "embedding_length": D,
        "feed_forward_length": DRAFT_FF,
        "attention.head_count": DRAFT_HEADS,
        "attention.head_count_kv": DRAFT_KV,
        "attention.key_length": DRAFT_HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e7,
    }
    return {"general.architecture": arch} | {f"{arch}.{k}": v for k, v in keys.items()}


def upstream_draft_keys() -> dict[str, Any]:
    """Keys of a draft GGUF as llama.cpp's converter writes them: taps one up."""
    return (
        _gguf_draft_keys("dflash")
        | {"dflash.block_size": BLOCK, "dflash.target_layers": [i + 1 for i in TAPS]}
        | tokenizer_keys()
        | {"tokenizer.ggml.mask_token_id": MASK}
    )


def lucebox_draft_keys(arch: str = "qwen35-dflash-draft") -> dict[str, Any]:
    """Keys of a draft GGUF as Lucebox's and spiritbuun's converters write them."""
    return _gguf_draft_keys(arch) | {
        f"{arch}.dflash.block_size": BLOCK,
        f"{arch}.dflash.target_layer_ids": list(TAPS),
        f"{arch}.dflash.mask_token_id": MASK,
        f"{arch}.dflash.n_target_features": len(TAPS) * D,
        f"{arch}.vocab_size": VOCAB,
    }


def zlab_config() -> dict[str, Any]:
    """config.json of the same draft as z-lab publishes it."""
    return {
        "architectures": ["DFlashDraftModel"],
        "hidden_size": D,
        "num_hidden_layers": 2,
        "intermediate_size": DRAFT_FF,
        "num_attention_heads": DRAFT_HEADS,
        "num_key_value_heads": DRAFT_KV,
        "head_dim": DRAFT_HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000000.0,
        "vocab_size": VOCAB,
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(TAPS)},
        "layer_types": ["full_attention", "full_attention"],
        "sliding_window": None,
        "use_sliding_window": False,
    }


def gguf_file(keys: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Builder:
    """Keys and float32 tensors of these shapes, all zero, as a file."""
    return build(keys, [f32_tensor(name, shape) for name, shape in shapes.items()])


def gguf_draft(keys: dict[str, Any], rename: Callable[[str], str] = str) -> Builder:
    """The draft with `draft_values` as a GGUF file, its tensors renamed."""
    values = draft_values().items()
    return build(keys, [Tensor(rename(name), 0, x.shape[::-1], x.tobytes()) for name, x in values])


_ZLAB_NAMES = (
    {
        "fc": "fc",
        "enc.output_norm": "hidden_norm",
        "output_norm": "norm",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
    }
    | {f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"}
    | {f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
)


def zlab_name(name: str) -> str:
    """z-lab's name of a draft tensor known by llama.cpp's."""
    parts = name.removesuffix(".weight").split(".", 2)
    if parts[0] == "blk":
        return f"layers.{parts[1]}.{_ZLAB_NAMES[parts[2]]}.weight"
    return _ZLAB_NAMES[name.removesuffix(".weight")] + ".weight"


def safetensors_bytes(tensors: dict[str, tuple[str, np.ndarray]]) -> bytes:
    """A safetensors file of name -> (dtype tag, array of that size per element, row-major)."""
    header, body = {}, b""
    for name, (tag, x) in tensors.items():
        raw = x.tobytes()
        header[name] = {
            "dtype": tag,
            "shape": list(x.shape),
            "data_offsets": [len(body), len(body) + len(raw)],
        }
        body += raw
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def bf16(x: np.ndarray) -> np.ndarray:
    """Float32 cut to bfloat16, as uint16."""
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def draft_values() -> dict[str, np.ndarray]:
    """A value for each tensor of `draft_shapes`, row-major, exact in bfloat16."""
    rng = np.random.default_rng(0)
    return {
        name: rng.integers(-8, 9, shape[::-1]).astype(np.float32) for name, shape in draft_shapes().items()
    }


def write_zlab_draft(folder: Path, config: dict[str, Any] | None = None, prefix: str = "") -> Path:
    """The draft as a folder with config.json and model.safetensors in bfloat16. Returns the folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(zlab_config() if config is None else config))
    tensors = {prefix + zlab_name(name): ("BF16", bf16(x)) for name, x in draft_values().items()}
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    return folder
