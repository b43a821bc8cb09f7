"""GGUF files built byte by byte, so that tests can place any value in any field."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10


class Field(NamedTuple):
    """Where a number of the header lies: `size` bytes at `offset`."""

    label: str
    offset: int
    size: int


class Tensor(NamedTuple):
    """A tensor to write: ggml type code, shape in ggml order, bytes."""

    name: str
    type: int
    shape: tuple[int, ...]
    data: bytes


def f32_tensor(name: str, shape: tuple[int, ...], value: float = 0.0) -> Tensor:
    """A float32 tensor filled with `value`."""
    return Tensor(name, 0, shape, np.full(int(np.prod(shape)), value, "<f4").tobytes())


class Builder:
    """Collects the bytes of a header and remembers where each number went."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.fields: list[Field] = []

    def number(self, label: str, layout: str, value: float) -> None:
        """Append a number in struct layout `layout`."""
        packed = struct.pack("<" + layout, value)
        self.fields.append(Field(label, len(self.data), len(packed)))
        self.data += packed

    def text(self, label: str, text: str | bytes) -> None:
        """Append a string with its length."""
        raw = text.encode() if isinstance(text, str) else text
        self.number(f"{label} length", "Q", len(raw))
        self.data += raw

    def key(self, key: str | bytes, value: Any) -> None:
        """Append a key and its value: str, bool, int (uint32), float (float32) or a list of one of these."""
        self.text("key", key)
        items = value if isinstance(value, list) else [value]
        first = items[0] if items else 0
        whole = I32 if isinstance(value, list) else U32
        code = {str: STRING, bool: BOOL, int: whole, float: F32}[type(first)]
        if isinstance(value, list):
            self.number(f"{key!r} type", "I", ARRAY)
            self.number(f"{key!r} element type", "I", code)
            self.number(f"{key!r} count", "Q", len(items))
        else:
            self.number(f"{key!r} type", "I", code)
        for item in items:
            if code == STRING:
                self.text(f"{key!r}", item)
            else:
                self.number(f"{key!r}", {BOOL: "?", U32: "I", I32: "i", F32: "f"}[code], item)


def build(
    metadata: Mapping[str, Any], tensors: Iterable[Tensor] = (), version: int = 3, alignment: int = 32
) -> Builder:
    """A complete file: header, then the tensors' data in order, each start aligned, no padding at the end."""
    tensors = list(tensors)
    out = Builder()
    out.data += b"GGUF"
    out.number("version", "I", version)
    out.number("tensor count", "Q", len(tensors))
    out.number("key count", "Q", len(metadata))
    for key, value in metadata.items():
        out.key(key, value)
    body = bytearray()
    for tensor in tensors:
        body += bytes(-len(body) % alignment)
        out.text("tensor name", tensor.name)
        out.number(f"{tensor.name} dimensions", "I", len(tensor.shape))
        for n in tensor.shape:
            out.number(f"{tensor.name} shape", "Q", n)
        out.number(f"{tensor.name} type", "I", tensor.type)
        out.number(f"{tensor.name} offset", "Q", len(body))
        body += tensor.data
    if tensors:
        out.data += bytes(-len(out.data) % alignment) + body
    return out
