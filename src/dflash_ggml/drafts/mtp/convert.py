"""Conversion: adds a prediction head from a safetensors checkpoint to a target's GGUF."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from ...config import DraftType
from ...files.gguf import GGUFFile
from ...files.safetensors import SafetensorsFile
from ...files.tensor_info import F32
from ...ggml.retype import floats, retyped
from ...ggml.weights import Source
from ...models.registry import read_target
from ..convert import add_tensor, gguf_writer

_JOINT = "mtp.fc.weight"
_NAMES = {
    "fc": "nextn.eh_proj.weight",
    "pre_fc_norm_embedding": "nextn.enorm.weight",
    "pre_fc_norm_hidden": "nextn.hnorm.weight",
    "norm": "nextn.shared_head_norm.weight",
    "layers.0.input_layernorm": "attn_norm.weight",
    "layers.0.post_attention_layernorm": "post_attention_norm.weight",
    "layers.0.self_attn.q_proj": "attn_q.weight",
    "layers.0.self_attn.k_proj": "attn_k.weight",
    "layers.0.self_attn.v_proj": "attn_v.weight",
    "layers.0.self_attn.o_proj": "attn_output.weight",
    "layers.0.self_attn.q_norm": "attn_q_norm.weight",
    "layers.0.self_attn.k_norm": "attn_k_norm.weight",
    "layers.0.mlp.gate_proj": "ffn_gate.weight",
    "layers.0.mlp.up_proj": "ffn_up.weight",
    "layers.0.mlp.down_proj": "ffn_down.weight",
}


def has_head(folder: Path) -> bool:
    """Whether a safetensors folder holds a prediction head."""
    return folder.is_dir() and (folder / "config.json").exists() and _JOINT in SafetensorsFile(folder).tensors


def head_tensors(file: SafetensorsFile, block: int, type_: DraftType | None) -> dict[str, Source]:
    """The head's tensors by llama.cpp's names, matrices as `type_`. Norms, stored minus 1 in checkpoints, are float32.

    Raises:
        ModelFileError: A tensor is unknown or missing.
    """
    found: dict[str, Source] = {}
    for name, info in file.tensors.items():
        short = re.sub(r"^(model\.)?mtp\.(.+?)(\.weight)?$", r"\2", name)
        if short == name:
            continue  # of the trunk
        if short not in _NAMES:
            raise file.error(
                f"tensor {name!r}: a prediction head with it is not supported, only one with a dense block"
            )
        source = Source(info.type, info.shape, file.data(name))
        if len(info.shape) == 1:
            raw = np.frombuffer(source.data, np.uint8).reshape(1, -1)
            source = Source(F32, info.shape, (floats(raw, info.type) + 1).reshape(-1).view(np.uint8))
        elif type_ is not None:
            source = retyped(source, type_)
        found[f"blk.{block}.{_NAMES[short]}"] = source
    for short, name in _NAMES.items():
        if f"blk.{block}.{name}" not in found:
            raise file.error(f"tensor 'mtp.{short}.weight' of the prediction head is missing")
    return found


def write_with_head(folder: Path, target: GGUFFile, out: Path, type_: DraftType | None = None) -> int:
    """Write a copy of the target's file with the head after its last block; the file appears once it is complete.

    Args:
        folder: Checkpoint that has the head.
        target: The target's open file.
        out: The file to write.
        type_: Type of the head's converted matrices (None: unchanged).

    Returns:
        Number of tensors of the head.

    Raises:
        ModelFileError: The target is in parts, has a head already, or the head does not fit it.
        ConfigError: The package gguf is missing.
        OSError: The file cannot be written.
    """
    parts = target.get("split.count", int) or 1
    if parts > 1:
        raise target.error(
            f"one of {parts} parts, and a head is written into one file alone: join them first, with llama.cpp's "
            "llama-gguf-split --merge FIRST-PART.gguf WHOLE.gguf"
        )
    block = target.require(f"{target.arch}.block_count", int)
    number = f"{target.arch}.nextn_predict_layers"
    if target.get(number, int):
        raise target.error(f"key {number!r}: this file has a prediction head already")
    head = head_tensors(SafetensorsFile(folder), block, type_)
    per_layer = (f"{target.arch}.attention.", f"{target.arch}.feed_forward_length")
    with gguf_writer(out, target.arch, _check) as writer:
        from gguf import GGUFReader, GGUFValueType

        reader = GGUFReader(target.path)
        for key, field in reader.fields.items():
            if key.startswith("GGUF.") or key == "general.architecture":
                continue
            value, kind = field.contents(), field.types
            if key == f"{target.arch}.block_count":
                value = block + 1
            elif key.startswith(per_layer) and isinstance(value, list) and len(value) == block:
                value = [*value, value[-1]]  # the head's block is an attention block, like the last one
            writer.add_key_value(key, value, kind[0], kind[-1] if kind[0] == GGUFValueType.ARRAY else None)
        writer.add_uint32(number, 1)
        for tensor in reader.tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        for name, source in head.items():
            add_tensor(writer, name, source)
    return len(head)


def _check(path: Path) -> None:
    with GGUFFile(path) as file:
        read_target(file)
