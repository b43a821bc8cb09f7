"""Files of targets with experts in other forms: matrices joined, `qwen3next` as `qwen35moe`; the layer of experts in numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dflash_ggml.files.gguf import GGUFFile, StringArray
from reference.gguf_bytes import Tensor, build

Array = np.ndarray


def contents(path: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """Keys and tensors of a file whose tensors are all float32, row-major."""
    with GGUFFile(path) as file:
        keys = {
            key: value.tolist()
            if isinstance(value, np.ndarray)
            else list(value)
            if isinstance(value, StringArray)
            else value
            for key, value in file.metadata.items()
        }
        tensors = {
            name: np.frombuffer(bytes(file.data(name)), np.float32).reshape(info.shape[::-1])
            for name, info in file.tensors.items()
        }
    return keys, tensors


def write(path: Path, keys: dict[str, Any], tensors: dict[str, Array]) -> Path:
    """What `contents` gives, as a file. Returns its path."""
    made = [
        Tensor(name, 0, x.shape[::-1], np.ascontiguousarray(x, np.float32).tobytes())
        for name, x in tensors.items()
    ]
    path.write_bytes(build(keys, made).data)
    return path


def with_joined_experts(source: Path, dest: Path, blocks: tuple[int, ...]) -> Path:
    """With gate and up of an expert as one matrix in some blocks."""
    keys, w = contents(source)
    for i in blocks:
        gate, up = (w.pop(f"blk.{i}.ffn_{part}_exps.weight") for part in ("gate", "up"))
        w[f"blk.{i}.ffn_gate_up_exps.weight"] = np.concatenate([gate, up], axis=1)
    return write(dest, keys, w)


def as_qwen35moe(source: Path, dest: Path) -> Path:
    """A `qwen3next` file with `attn_qkv` as one of `qwen35moe`: value head j of key head i becomes head j * k_heads + i."""
    keys, w = contents(source)
    size, k_heads, v_heads = (
        keys[f"qwen3next.ssm.{x}"] for x in ("state_size", "group_count", "time_step_rank")
    )
    ratio = v_heads // k_heads
    order = [i * ratio + j for j in range(ratio) for i in range(k_heads)]

    def heads(x: Array, of: list[int] = order) -> Array:
        return x.reshape(v_heads, -1, *x.shape[1:])[of].reshape(x.shape)

    out = {}
    for name, x in w.items():
        block, _, rest = name.rpartition(".ssm_" if ".ssm_" in name else ".attn_")
        if rest in ("qkv.weight", "conv1d.weight"):
            x = np.concatenate([x[: 2 * k_heads * size], heads(x[2 * k_heads * size :])])
        elif rest in ("dt.bias", "a") or (rest == "gate.weight" and "ssm" not in name):
            x = heads(x)
        elif rest == "out.weight":
            x = heads(x.T).T
        if rest == "ba.weight":
            both = x.reshape(k_heads, 2, ratio, -1)
            for k, part in enumerate(("beta", "alpha")):
                out[f"{block}.ssm_{part}.weight"] = heads(both[:, k].reshape(v_heads, -1))
        else:
            out[name] = x
    keys = {key.replace("qwen3next.", "qwen35moe."): value for key, value in keys.items()}
    return write(dest, keys | {"general.architecture": "qwen35moe"}, out)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def mixture(
    w: dict[str, Array],
    x: Array,
    n_used: int,
    scoring: str = "softmax",
    normalised: bool = True,
    scale: float = 1.0,
    limit: float = 0.0,
) -> Array:
    """The layer of experts for rows x [n, D], token by token and expert by expert, in float64; w: tensors by their name within
    the block. A shared expert without `ffn_gate_inp_shexp` has the weight 1. limit: of gpt-oss's SwiGLU."""
    w = {name: a.astype(np.float64) for name, a in w.items()}
    out = np.zeros(x.shape)
    for row, y in enumerate(x.astype(np.float64)):
        logits = w["ffn_gate_inp.weight"] @ y + w.get("ffn_gate_inp.bias", 0)
        scores = sigmoid(logits)
        if scoring == "chosen":  # e to the logits: normalised, the softmax over those chosen
            scores = np.exp(logits)
        if scoring == "softmax":
            scores = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        chosen = np.argsort(-(scores + w.get("exp_probs_b.bias", 0)), kind="stable")[:n_used]
        weights = scores[chosen] / (scores[chosen].sum() if normalised else 1) * scale
        for expert, weight in zip(chosen, weights):
            if "ffn_gate_up_exps.weight" in w:
                gate, up = np.split(w["ffn_gate_up_exps.weight"][expert] @ y, 2)
            else:
                gate, up = (w[f"ffn_{part}_exps.weight"][expert] @ y for part in ("gate", "up"))
            gate, up, down = (
                z * w[f"ffn_{part}_exps.scale"][expert] if f"ffn_{part}_exps.scale" in w else z
                for part, z in (("gate", gate), ("up", up), ("down", 1.0))
            )
            gate, up, bias = (
                z + w[f"ffn_{part}_exps.bias"][expert] if f"ffn_{part}_exps.bias" in w else z
                for part, z in (("gate", gate), ("up", up), ("down", np.zeros(len(y))))
            )
            if limit:
                gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit) + 1
            hidden = gate * sigmoid(1.702 * gate if limit else gate) * up
            out[row] += weight * (down * (w["ffn_down_exps.weight"][expert] @ hidden) + bias)
        if "ffn_gate_shexp.weight" in w:
            gate = w["ffn_gate_shexp.weight"] @ y
            hidden = gate * sigmoid(gate) * (w["ffn_up_shexp.weight"] @ y)
            part = sigmoid(w["ffn_gate_inp_shexp.weight"] @ y) if "ffn_gate_inp_shexp.weight" in w else 1
            out[row] += part * (w["ffn_down_shexp.weight"] @ hidden)
    return out
