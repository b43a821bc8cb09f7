"""Conversion of weights while loading: from float to 16 bits or quantised, on all CPUs."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from .bindings import ffi, lib
from .device import BF16, F16, F32
from .weights import Source

# Target types; those that need an importance matrix are excluded.
TYPES = {
    "f16": F16,
    "q8_0": int(lib.GGML_TYPE_Q8_0),
    "q6_k": int(lib.GGML_TYPE_Q6_K),
    "q5_k": int(lib.GGML_TYPE_Q5_K),
    "q5_1": int(lib.GGML_TYPE_Q5_1),
    "q5_0": int(lib.GGML_TYPE_Q5_0),
    "q4_k": int(lib.GGML_TYPE_Q4_K),
    "q4_1": int(lib.GGML_TYPE_Q4_1),
    "q4_0": int(lib.GGML_TYPE_Q4_0),
}
# types with row lookup on every device
_GATHERED = ("f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
_AT_ONCE = 1 << 22  # elements converted at a time


def retyped(s: Source, name: str, is_gathered: bool = False) -> Source:
    """A float matrix converted to type `name` of TYPES; anything else unchanged.

    Rows without a whole number of blocks become Q8_0, or stay; so do tables with row lookup, for types that not every device can
    look up.
    """
    if s.type not in (F32, F16, BF16) or len(s.shape) != 2 or s.shape[1] == 1:
        return s
    wanted = [name] if not is_gathered or name in _GATHERED else []
    fitting = (TYPES[n] for n in (*wanted, "q8_0") if s.shape[0] % lib.ggml_blck_size(TYPES[n]) == 0)
    kind = next(fitting, s.type)
    if kind == s.type or lib.ggml_row_size(kind, s.shape[0]) > lib.ggml_row_size(s.type, s.shape[0]):
        return s
    width, rows = s.shape
    data = np.frombuffer(s.data, np.uint8).reshape(rows, -1)
    out = np.empty((rows, lib.ggml_row_size(kind, width)), np.uint8)
    step = max(1, _AT_ONCE // width)
    lib.ggml_quantize_init(kind)

    def convert(first: int) -> None:
        part = np.ascontiguousarray(floats(data[first : first + step], s.type))
        into = ffi.from_buffer("char[]", out[first : first + step], require_writable=True)
        lib.ggml_quantize_chunk(kind, ffi.from_buffer("float[]", part), into, 0, len(part), width, ffi.NULL)

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(convert, range(0, rows, step)))
    return Source(kind, s.shape, out.reshape(-1))


def floats(data: NDArray[np.uint8], kind: int) -> NDArray[np.float32]:
    """Bytes [..., bytes] of F32, F16 or BF16 numbers as float32 [..., n]."""
    if kind == BF16:
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return data.view(np.float16 if kind == F16 else np.float32).astype(np.float32, copy=False)
