"""Conversion of drafts to GGUF files in the form of llama.cpp's converter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..config import DraftType
from ..errors import ConfigError, ModelFileError
from ..files.complete import complete
from ..files.gguf import GGUFFile, StringArray
from ..files.tensor_info import BF16, F16, F32, FILE_TYPES
from ..ggml.operations import Yarn
from ..ggml.retype import floats, retyped
from ..ggml.weights import Source
from .dflash.file import DraftFile
from .dflash.params import EMBEDDING, HEAD, MASK
from .dflash.source import GATHERED
from .dspark import CONFIDENCE, TO_TARGET

if TYPE_CHECKING:
    from gguf import GGUFWriter

ARCH = "dflash"


@contextmanager
def gguf_writer(out: Path, arch: str, check: Callable[[Path], object]) -> Iterator[GGUFWriter]:
    """A writer of the file `out`, which appears once it is complete and `check` has read it.

    Raises:
        ConfigError: The package gguf is missing.
        OSError: The file cannot be written.
    """
    try:
        from gguf import GGUFWriter
    except ImportError:
        raise ConfigError("the package gguf is missing: pip install 'dflash-ggml[convert]'") from None
    with complete(out) as beside:
        writer = GGUFWriter(beside, arch)
        yield writer
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        check(beside)


def add_tensor(writer: GGUFWriter, name: str, source: Source) -> None:
    """Add a tensor to a file that is being written."""
    from gguf import GGMLQuantizationType

    rows = np.frombuffer(source.data, np.uint8).reshape(*source.shape[:0:-1], -1)
    writer.add_tensor(name, rows, raw_dtype=GGMLQuantizationType(source.type))


def write_gguf(draft: DraftFile, target: GGUFFile, out: Path, type_: DraftType | None = None) -> list[str]:
    """Write an open draft to `out`, with the vocabulary of its target; the file appears once it is complete.

    Args:
        draft: The draft.
        target: Open file of its target.
        out: The file to write.
        type_: Type of converted float matrices (None: unchanged).

    Returns:
        Notes on features that llama.cpp does not support.

    Raises:
        ModelFileError: The draft does not fit the target.
        ConfigError: The package gguf is missing.
        OSError: The file cannot be written.
    """
    with gguf_writer(out, ARCH, lambda path: DraftFile.open(path).close()) as writer:
        _sizes(writer, draft, target, type_)
        _vocabulary(writer, target, draft)
        for name, source in _tensors(draft, target).items():
            if name == TO_TARGET:
                writer.add_tensor(name, np.frombuffer(source.data, np.int32).astype(np.int64))
                continue
            add_tensor(writer, name, source if type_ is None else retyped(source, type_, name in GATHERED))
    p, notes = draft.params, []
    if p.markov is not None and p.markov.is_gated:
        notes.append(
            "a gated Markov head is of no form that llama.cpp knows: this file is for dflash-ggml alone"
        )
    if p.normed_taps:
        notes.append(
            "norms of its taps are known to Poolside's branch of llama.cpp only: beside that this file is for dflash-ggml alone"
        )
    return notes


def _sizes(writer: GGUFWriter, draft: DraftFile, target: GGUFFile, type_: DraftType | None) -> None:
    p = draft.params
    writer.add_type("model")
    writer.add_name(draft.title or draft.path.resolve().name)
    writer.add_block_count(p.n_layers)
    writer.add_context_length(target.get(f"{target.arch}.context_length", int) or 1)
    writer.add_embedding_length(p.n_embd)
    writer.add_feed_forward_length(p.n_ff)
    writer.add_head_count(p.n_heads)
    writer.add_head_count_kv(p.n_kv_heads)
    writer.add_key_length(p.head_dim)
    writer.add_value_length(p.head_dim)
    writer.add_rope_freq_base(p.rope_theta)
    writer.add_layer_norm_rms_eps(p.rms_eps)
    if p.n_rot is not None:
        writer.add_rope_dimension_count(p.n_rot)
    if f"{target.arch}.rope.dimension_sections" in target.metadata:  # text positions use its first axis
        writer.add_rope_dimension_sections([p.head_dim // 2, 0, 0, 0])
    if p.yarn is not None:
        writer.add_string(f"{ARCH}.rope.scaling.type", "yarn")
        writer.add_float32(f"{ARCH}.rope.scaling.factor", p.yarn.factor)
        writer.add_uint32(f"{ARCH}.rope.scaling.original_context_length", p.yarn.n_ctx)
        usual = Yarn(p.yarn.factor, p.yarn.n_ctx, 1 + 0.1 * math.log(p.yarn.factor))
        for key, field in (("attn_factor", "attention"), ("beta_fast", "fast"), ("beta_slow", "slow")):
            if (value := getattr(p.yarn, field)) != getattr(usual, field):
                writer.add_float32(f"{ARCH}.rope.scaling.yarn_{key}", value)
    if p.normed_taps:
        writer.add_string(f"{ARCH}.decoder_arch", target.arch)
    if p.declared_causal is not None:
        writer.add_causal_attention(p.declared_causal)
    if any(p.window_layers):
        writer.add_sliding_window(p.sliding_window or 0)
        writer.add_sliding_window_pattern(list(p.window_layers))
    writer.add_uint32(f"{ARCH}.block_size", p.block_size)
    writer.add_array(f"{ARCH}.target_layers", [tap + 1 for tap in p.taps])
    if p.n_vocab is not None:
        writer.add_vocab_size(p.n_vocab)
    if (s := p.selector) is not None:
        sizes = {"conv_kernel_size": s.kernel, "conv_group_size": s.group, "selector_rank": s.rank}
        for key, size in (sizes | {"selector_top_k": s.candidates}).items():
            writer.add_uint32(f"{ARCH}.{key}", size)
        if s.scale != 1:
            writer.add_logit_scale(s.scale)
        if s.cap:
            writer.add_float32(f"{ARCH}.final_logit_softcapping", s.cap)
    if p.markov is not None:
        writer.add_bool(f"{ARCH}.sample_from_anchor", p.markov.from_anchor)
        writer.add_bool(f"{ARCH}.has_confidence_head", CONFIDENCE in draft.published)
    kind = draft.kind("fc.weight")[0]
    name = type_ or {F32: "f32", F16: "f16", BF16: "bf16"}.get(kind)
    if name is not None:
        medium = "_M" if name in ("q4_k", "q5_k") else ""
        writer.add_file_type(FILE_TYPES.index(name.upper() + medium))
    writer.add_quantization_version(2)


def _vocabulary(writer: GGUFWriter, target: GGUFFile, draft: DraftFile) -> None:
    """Write the target's vocabulary and the draft's mask token."""
    for key, value in target.metadata.items():
        if not key.startswith("tokenizer.") or key == "tokenizer.ggml.mask_token_id":
            continue
        if isinstance(value, StringArray | np.ndarray | list):
            writer.add_array(
                key, list(value) if isinstance(value, StringArray) else np.asarray(value).tolist()
            )
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_string(key, str(value))
    writer.add_mask_token_id(draft.params.mask_id)


def _tensors(draft: DraftFile, target: GGUFFile) -> dict[str, Source]:
    """All tensors by llama.cpp's names. A mask vector, which has no name there, goes into a copy of the target's embedding."""
    found: dict[str, Source] = {}
    for name in draft.published:
        kind, shape, data = draft.tensor(name)
        found[name] = Source(kind, shape, data)
    if not draft.params.has_mask_vector:
        return found
    for name in (EMBEDDING, HEAD):
        if name not in found:
            found[name] = _of_target(target, name)
    table = found[EMBEDDING]
    if table.type not in (F32, F16, BF16):
        raise ModelFileError(
            f"{target.path}: the mask vector goes into a copy of tensor {EMBEDDING!r}, which is quantised here; "
            "give the target in BF16 or F16"
        )
    rows = floats(np.frombuffer(table.data, np.uint8).reshape(table.shape[1], -1), table.type).copy()
    rows[draft.params.mask_id] = draft.tensor(MASK)[2].view(np.float32)
    found[EMBEDDING] = Source(F32, table.shape, rows.view(np.uint8).reshape(-1))
    return found


def _of_target(target: GGUFFile, name: str) -> Source:
    info = target.tensors.get(name) or target.tensors[EMBEDDING]
    return Source(info.type, info.shape, target.data(info.name))
