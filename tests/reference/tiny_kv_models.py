"""The smallest complete K/V-only targets, as keys and tensor shapes; written from the published layouts, independent of the code
under test."""

from __future__ import annotations

from typing import Any

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


def laguna_keys() -> dict[str, Any]:
    """Four blocks: the first sees everything and is dense, the others have a window and experts."""
    keys = {
        "block_count": 4,
        "context_length": 64,
        "embedding_length": D,
        "feed_forward_length": FF,
        "attention.head_count": [4, 6, 6, 6],
        "attention.head_count_kv": KV,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": 16,
        "attention.sliding_window_pattern": [False, True, True, True],
        "rope.freq_base": 5e5,
        "rope.freq_base_swa": 1e4,
        "rope.dimension_count": 2,
        "rope.dimension_count_swa": HEAD_DIM,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 8,
        "rope.scaling.yarn_beta_fast": 64.0,
        "leading_dense_block_count": 1,
        "expert_count": 5,
        "expert_used_count": 3,
        "expert_feed_forward_length": 10,
        "expert_shared_feed_forward_length": 14,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
    }
    return {"general.architecture": "laguna"} | {f"laguna.{k}": v for k, v in keys.items()} | tokenizer_keys()


def laguna_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (D, VOCAB),
        "output_norm.weight": (D,),
        "output.weight": (D, VOCAB),
    }
    for i, heads in enumerate([4, 6, 6, 6]):
        block, q = f"blk.{i}.", heads * HEAD_DIM
        shapes |= {block + f"{norm}.weight": (D,) for norm in ("attn_norm", "ffn_norm")}
        shapes |= {block + "attn_q.weight": (D, q), block + "attn_output.weight": (q, D)}
        shapes |= {block + f"attn_{x}.weight": (D, KV * HEAD_DIM) for x in "kv"}
        shapes |= {block + f"attn_{x}_norm.weight": (HEAD_DIM,) for x in "qk"}
        shapes[block + "attn_gate.weight"] = (D, heads)
        if i == 0:
            shapes |= {block + f"ffn_{x}.weight": (D, FF) for x in ("gate", "up")}
            shapes[block + "ffn_down.weight"] = (FF, D)
            continue
        shapes |= {block + f"ffn_{x}_exps.weight": (D, 10, 5) for x in ("gate", "up")}
        shapes |= {block + f"ffn_{x}_shexp.weight": (D, 14) for x in ("gate", "up")}
        shapes |= {block + "ffn_down_exps.weight": (10, D, 5), block + "ffn_down_shexp.weight": (14, D)}
        shapes |= {block + "ffn_gate_inp.weight": (D, 5), block + "exp_probs_b.bias": (5,)}
    return shapes
