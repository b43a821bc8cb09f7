"""Variants of a model file for tests: the same weights as float32, float16, Q8_0, a Q4_K_M mix or any other
type.

Reading and dequantising use the PyPI package `gguf`, quantising uses ggml itself. Vectors and convolution
taps always stay float32, as in every published recipe.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize

Type = GGMLQuantizationType
Rule: TypeAlias = Callable[[str, int], GGMLQuantizationType]  # (tensor name, row length) -> type of a matrix

_FILE_TYPE = "general.file_type"
_AT_ONCE = 1 << 18  # elements that a thread quantises


def rewrite(source: Path, dest: Path, rule: Rule, file_type: int) -> Path:
    """Write `source` to `dest` with every matrix in the type that `rule` names; metadata is kept. Returns
    `dest`.

    A row length that is not a multiple of the type's block falls back to Q8_0, then to float16, as quantisers
    do.
    """
    reader = GGUFReader(source)
    writer = GGUFWriter(dest, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", _FILE_TYPE):
            continue
        is_array = field.types[0] == GGUFValueType.ARRAY
        writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if is_array else None)
    writer.add_uint32(_FILE_TYPE, file_type)
    for tensor in reader.tensors:
        x = np.array(dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(
            tensor.shape[::-1].tolist()
        )
        add_tensor(writer, tensor.name, x, rule)
    finish(writer)
    return dest


def add_tensor(writer: GGUFWriter, name: str, x: np.ndarray, rule: Rule) -> None:
    """Add float32 `x` (row-major) under `name`; matrices take the type that `rule` gives."""
    if x.ndim < 2 or "conv1d" in name or "gate_inp_shexp" in name:
        writer.add_tensor(name, np.ascontiguousarray(x, np.float32))
        return
    width = x.shape[-1]
    kind = next(t for t in (rule(name, width), Type.Q8_0, Type.F16) if width % GGML_QUANT_SIZES[t][0] == 0)
    writer.add_tensor(name, quantize(x, kind), raw_dtype=kind)


def quantize(x: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Rows of `x` quantised by ggml: float32 or float16 elements, else the bytes of each row."""
    if kind in (Type.F32, Type.F16):
        return np.ascontiguousarray(x, np.float32 if kind == Type.F32 else np.float16)
    from dflash_ggml.ggml.bindings import (  # only here: float files can be written where nothing is compiled
        ffi,
        lib,
    )

    if lib.ggml_quantize_requires_imatrix(int(kind)):
        raise ValueError(f"{kind.name} needs an importance matrix")
    width = x.shape[-1]
    block, size = GGML_QUANT_SIZES[kind]
    x = np.ascontiguousarray(x, np.float32)
    out = np.empty((*x.shape[:-1], width // block * size), np.uint8)
    rows = x.size // width
    lib.ggml_quantize_init(int(kind))
    source, found = ffi.from_buffer("float[]", x), ffi.from_buffer(out)
    each = max(_AT_ONCE // width, 1)

    def some(first: int) -> None:
        n = min(each, rows - first)
        lib.ggml_quantize_chunk(int(kind), source, found, first * width, n, width, ffi.NULL)

    with ThreadPoolExecutor() as pool:
        list(pool.map(some, range(0, rows, each)))
    return out


def finish(writer: GGUFWriter) -> None:
    """Write everything that was added and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def uniform(source: Path, dest: Path, kind: GGMLQuantizationType) -> Path:
    """Every matrix as `kind`."""
    return rewrite(source, dest, lambda _name, _width: kind, file_type=_FILE_TYPES.get(kind, 0))


def f32(source: Path, dest: Path) -> Path:
    """Every matrix as float32: the numbers that an independent float32 implementation runs on."""
    return uniform(source, dest, Type.F32)


def f16(source: Path, dest: Path) -> Path:
    """Every matrix as float16."""
    return uniform(source, dest, Type.F16)


def q8_0(source: Path, dest: Path) -> Path:
    """Every matrix as Q8_0."""
    return uniform(source, dest, Type.Q8_0)


def q4_k_m(source: Path, dest: Path) -> Path:
    """The stock mix of Q4_K and Q6_K for `qwen35`.

    Q6_K goes to the head, and to the FFN output and the qkv or v matrix in the first and last eighth of the
    layers and every third layer between them.
    """
    arch = "qwen35"
    n_layers = GGUFReader(source).fields[f"{arch}.block_count"].contents()
    eighth = n_layers // 8

    def rule(name: str, _width: int) -> GGMLQuantizationType:
        if name == "output.weight":
            return Type.Q6_K
        match = re.fullmatch(r"blk\.(\d+)\.(?:ffn_down|attn_qkv|attn_v)\.weight", name)
        if match is None:
            return Type.Q4_K
        layer = int(match[1])
        more = layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2
        return Type.Q6_K if more else Type.Q4_K

    return rewrite(source, dest, rule, file_type=15)


_FILE_TYPES = {Type.F32: 0, Type.F16: 1, Type.Q8_0: 7}
