"""A minimal GGUF v3 writer that streams tensors: benchmark files of 17 GB must not pass through memory at once."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

ALIGNMENT = 32
_SCALARS = {bool: (7, "<?"), int: (4, "<I"), float: (6, "<f")}


def _text(s: str) -> bytes:
    data = s.encode()
    return struct.pack("<Q", len(data)) + data


def _value(v) -> bytes:
    """Type tag and payload of a metadata value: bool, int (u32), float (f32), str, or a list of one of them."""
    if isinstance(v, str):
        return struct.pack("<I", 8) + _text(v)
    if isinstance(v, (list, tuple)):
        if isinstance(v[0], str):
            return struct.pack("<IIQ", 9, 8, len(v)) + b"".join(map(_text, v))
        tag, code = _SCALARS[type(v[0])]
        return struct.pack("<IIQ", 9, tag, len(v)) + b"".join(struct.pack(code, x) for x in v)
    tag, code = _SCALARS[type(v)]
    return struct.pack("<I", tag) + struct.pack(code, v)


def write(
    path: Path,
    metadata: dict,
    tensors: Sequence[tuple[str, int, tuple[int, ...], int]],
    fill: Callable[[str, int, int], np.ndarray],
) -> None:
    """Write metadata and tensors (name, ggml type, shape, bytes); `fill(name, type, bytes)` gives each tensor's data."""
    with open(path, "wb") as f:
        f.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
        for key, value in metadata.items():
            f.write(_text(key) + _value(value))
        offset = 0
        for name, type_, shape, size in tensors:
            f.write(_text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape))
            f.write(struct.pack("<IQ", type_, offset))
            offset += -(-size // ALIGNMENT) * ALIGNMENT
        f.write(b"\0" * (-f.tell() % ALIGNMENT))
        for name, type_, _, size in tensors:
            fill(name, type_, size).tofile(f)
            f.write(b"\0" * (-size % ALIGNMENT))
