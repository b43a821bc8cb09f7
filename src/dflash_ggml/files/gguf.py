"""Reader of GGUF files (versions 2 and 3, little-endian) through a memory map.

Opening a file reads its header only. Weights stay on disk until they are touched, numeric arrays are views
into the file, and arrays of strings (a vocabulary) are scanned once and decoded on first use. A split model
(`-00001-of-00003.gguf`) may be named by any of its parts: all are mapped, and read as one file. Every defect
of a file is reported as a `ModelFileError` that names the file and the field.
"""

from __future__ import annotations

import mmap
import re
import stat
import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, overload

import numpy as np

from ..errors import ModelFileError
from .keys import KeyedFile, short
from .tensor_info import TensorInfo, ggml_types, tensor_nbytes

# Limits far above any real model, which bound the time and memory of reading a damaged count.
MAX_ENTRIES = 1 << 20  # metadata keys; tensors
MAX_ARRAY = 1 << 24  # elements of one array
MAX_TEXT = 1 << 26  # bytes of one string
MAX_NAME = 63  # bytes of a tensor name; ggml keeps 64 with the terminator

PART_NAME = re.compile(
    r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$", re.IGNORECASE | re.DOTALL
)


def part_names(name: str) -> list[str]:
    """The names of all parts of a split model, given one of them; the name alone for a single file."""
    match = PART_NAME.match(name)
    if match is None or int(match["count"]) < 2:
        return [name]
    tail = match["count"] + name[match.end("count") :]
    return [f"{match['stem']}-{i:05}-of-{tail}" for i in range(1, int(match["count"]) + 1)]


_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, np.dtype] = {
    code: np.dtype(name)
    for code, name in enumerate(
        ("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", "", "", "<u8", "<i8", "<f8")
    )
    if name
}


class StringArray(Sequence[str]):
    """An array of strings, decoded on first use; `ModelFileError` if one is not UTF-8."""

    __slots__ = ("_blob", "_count", "_field", "_items")

    def __init__(self, field: str, blob: np.ndarray, count: int) -> None:
        """`blob` (uint8): `count` strings, each after its 64-bit length, already checked."""
        self._field, self._blob, self._count = field, blob, count
        self._items: list[str] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self._decoded()[index]

    def _decoded(self) -> list[str]:
        if self._items is None:
            blob, items, pos, unpack = self._blob.tobytes(), [], 0, _U64.unpack_from
            try:
                for _ in range(self._count):
                    start = pos + 8
                    pos = start + unpack(blob, pos)[0]
                    items.append(blob[start:pos].decode())
            except UnicodeDecodeError:
                what = f"string {len(items)} is not UTF-8; the file is damaged"
                raise ModelFileError(f"{self._field}: {what}") from None
            self._items = items
        return self._items


class GGUFFile(KeyedFile):
    """An open GGUF file, all its parts if it has several; a context manager.

    Attributes:
        metadata: Key -> int, float, bool, str, `StringArray`, or a read-only numpy array (a view into the file), of the
            first part.
        tensors: Name -> `TensorInfo`, in file order; offsets within the part that holds the tensor.
    """

    def __init__(self, path: str | Path) -> None:
        """Map `path` and read its header.

        Raises:
            ModelFileError: The file is missing or has any defect.
        """
        self._open(Path(path))
        self._holders: dict[str, GGUFFile] = {}  # by name, for tensors in other parts
        if (count := self.get("split.count", int)) is not None and count > 1:
            self._join(count)

    def _open(self, path: Path) -> None:
        """Map and read one file by itself."""
        self.path = path
        self._bytes = map_file(self.path)
        self._pos = 0
        self.version, n_tensors, n_keys = self._read_prelude()
        metadata: dict[str, Any] = {}
        for i in range(n_keys):
            key = self._text(f"key {i}")
            if not key or key in metadata:
                raise self.error(f"key {i} ({short(key)}) is {'repeated' if key else 'empty'}")
            metadata[key] = self._value(f"key {short(key)}")
        self.metadata = MappingProxyType(metadata)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(self._read_tensors(n_tensors))

    def _join(self, count: int) -> None:
        """Open the other parts of the model. Raises `ModelFileError` for a missing or foreign part."""
        names = part_names(self.path.name)
        if len(names) != count:
            raise self.error(
                f"one of {count} parts of a model, but its name does not end in -0000N-of-{count:05}.gguf, by which "
                "the others are found: give it its published name"
            )
        parts: list[GGUFFile] = []
        for i, name in enumerate(names):
            part = self
            if name != self.path.name:
                path = self.path.with_name(name)
                if not path.exists():
                    raise self.error(
                        f"part {i + 1} of {count} is missing: download {name} into the same folder"
                    )
                part = GGUFFile.__new__(GGUFFile)
                part._open(path)
            if part.get("split.count", int) != count or part.get("split.no", int) != i:
                raise part.error(
                    f"its keys 'split.no' and 'split.count' do not make it part {i + 1} of {count}; download it again"
                )
            parts.append(part)
        tensors: dict[str, TensorInfo] = {}
        for part in parts:
            if again := next((name for name in part.tensors if name in tensors), None):
                raise part.error(f"tensor {short(again)} is also in another part; download all parts again")
            tensors |= part.tensors
            if part is not self:
                self._holders |= dict.fromkeys(part.tensors, part)
        total = parts[0].get("split.tensors.count", int)
        if total is not None and total != len(tensors):
            raise self.error(
                f"its {count} parts hold {len(tensors)} tensors, not {total}; download them again"
            )
        self.metadata, self.tensors = parts[0].metadata, MappingProxyType(tensors)

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. It is unmapped once the last array returned by `data` is gone."""
        self._bytes = np.empty(0, np.uint8)
        self._holders = {}

    @property
    def arch(self) -> str:
        """`general.architecture`."""
        return self.require("general.architecture", str)

    def data(self, name: str) -> np.ndarray:
        """The bytes of a tensor: read-only uint8 [nbytes], a view into the mapped file."""
        if name not in self.tensors:
            raise self.error(f"tensor {name!r} is missing")
        info, holder = self.tensors[name], self._holders.get(name, self)
        return holder._bytes[info.offset : info.offset + info.nbytes]

    def rename(self, names: Mapping[str, str]) -> None:
        """Rename tensors: old name -> new, unused name."""
        if names:
            tensors = {names.get(name, name): info for name, info in self.tensors.items()}
            self._holders = {names.get(name, name): part for name, part in self._holders.items()}
            self.tensors = MappingProxyType(tensors)

    def replace(self, name: str, parts: Iterable[TensorInfo]) -> None:
        """Replace a tensor by others within its bytes, with unused names."""
        found = {part.name: part for part in parts}
        tensors: dict[str, TensorInfo] = {}
        for old, info in self.tensors.items():
            tensors |= found if old == name else {old: info}
        if name in self._holders:
            self._holders |= dict.fromkeys(found, self._holders[name])
        self.tensors = MappingProxyType(tensors)

    # --- header ---

    def _read_prelude(self) -> tuple[int, int, int]:
        magic = bytes(self._bytes[:4])
        if magic != b"GGUF":
            raise self.error(f"not a GGUF file: it starts with {magic!r} instead of b'GGUF'")
        self._pos = 4
        version = self._number(_U32, "version")
        if version & 0xFFFF == 0 and version:
            raise self.error("version: the file is big-endian; convert it to little-endian")
        if version not in (2, 3):
            raise self.error(
                f"version: GGUF {version} is not supported (2 and 3 are); convert the model again"
            )
        n_tensors, n_keys = self._number(_U64, "tensor count"), self._number(_U64, "key count")
        for field, n in (("tensor count", n_tensors), ("key count", n_keys)):
            if n > MAX_ENTRIES:
                raise self.error(f"{field}: {n} is absurd; the file is damaged")
        return version, n_tensors, n_keys

    def _read_tensors(self, count: int) -> dict[str, TensorInfo]:
        alignment = self.get("general.alignment", int, 32)
        if not alignment or alignment <= 0 or alignment & (alignment - 1):
            raise self.error(f"key 'general.alignment': {alignment} is not a power of two")
        relative: dict[str, TensorInfo] = {}
        for i in range(count):
            info = self._tensor_info(f"tensor {i}", alignment)
            if info.name in relative:
                raise self.error(f"tensor {short(info.name)} is repeated")
            relative[info.name] = info
        start = -(-self._pos // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for info in relative.values():
            offset = start + info.offset
            if offset + info.nbytes > len(self._bytes):
                raise self.error(
                    f"tensor {short(info.name)} ends at byte {offset + info.nbytes}, the file at "
                    f"{len(self._bytes)}; it is truncated or damaged, download it again"
                )
            tensors[info.name] = TensorInfo(info.name, info.type, info.shape, offset, info.nbytes)
        in_place = sorted(tensors.values(), key=lambda info: info.offset)
        for a, b in pairwise(in_place):
            if a.offset + a.nbytes > b.offset:
                raise self.error(f"tensors {short(a.name)} and {short(b.name)} overlap; the file is damaged")
        return tensors

    def _tensor_info(self, field: str, alignment: int) -> TensorInfo:
        name = self._text(f"{field}, name", MAX_NAME)
        field = f"tensor {short(name)}"
        n_dims = self._number(_U32, f"{field}, number of dimensions")
        if not 1 <= n_dims <= 4:
            raise self.error(f"{field} has {n_dims} dimensions (expected 1 to 4)")
        shape = tuple(self._number(_U64, f"{field}, shape") for _ in range(n_dims))
        code = self._number(_U32, f"{field}, type")
        offset = self._number(_U64, f"{field}, offset")
        kind = ggml_types().get(code)
        if kind is None:
            raise self.error(
                f"{field} has the unknown type {code}; the file needs a newer ggml or is damaged"
            )
        if 0 in shape:
            raise self.error(f"{field} has the empty shape {list(shape)}")
        if shape[0] % kind.block:
            raise self.error(
                f"{field}: rows of {shape[0]} are not a multiple of {kind.name}'s block of {kind.block}"
            )
        if offset % alignment:
            raise self.error(f"{field}: offset {offset} is not a multiple of the alignment {alignment}")
        return TensorInfo(name, code, shape, offset, tensor_nbytes(code, shape))

    def _value(self, field: str) -> Any:
        code = self._number(_U32, f"{field}, type")
        if code == _STRING:
            return self._text(field)
        if code == _ARRAY:
            return self._array(field)
        if code not in _SCALARS:
            raise self.error(f"{field} has the unknown value type {code}")
        return self._take(1, _SCALARS[code], field)[0].item()

    def _array(self, field: str) -> StringArray | np.ndarray:
        code, count = self._number(_U32, f"{field}, element type"), self._number(_U64, f"{field}, length")
        if code == _ARRAY:
            raise self.error(f"{field} is an array of arrays, which no supported model uses")
        if code != _STRING and code not in _SCALARS:
            raise self.error(f"{field} has the unknown element type {code}")
        if count > MAX_ARRAY:
            raise self.error(f"{field}: a length of {count} is absurd; the file is damaged")
        return self._strings(count, field) if code == _STRING else self._take(count, _SCALARS[code], field)

    def _strings(self, count: int, field: str) -> StringArray:
        start = pos = self._pos
        buffer, unpack = self._bytes.data, _U64.unpack_from
        try:
            for _ in range(count):
                pos += 8 + unpack(buffer, pos)[0]
        except (struct.error, OverflowError):  # `pos` is outside the file, or even of the offset's range
            pos = len(buffer) + 1
        if pos > len(buffer):
            raise self._truncated(field)
        self._pos = pos
        return StringArray(f"{self.path}: {field}", self._bytes[start:pos], count)

    def _take(self, count: int, dtype: np.dtype, field: str) -> np.ndarray:
        end = self._pos + count * dtype.itemsize
        if end > len(self._bytes):
            raise self._truncated(field)
        raw, self._pos = self._bytes[self._pos : end], end
        # A byte other than 0 and 1 must not reach numpy as a bool.
        return raw != 0 if dtype.kind == "b" else raw.view(dtype)

    def _number(self, layout: struct.Struct, field: str) -> int:
        if self._pos + layout.size > len(self._bytes):
            raise self._truncated(field)
        (value,) = layout.unpack_from(self._bytes.data, self._pos)
        self._pos += layout.size
        return value

    def _text(self, field: str, limit: int = MAX_TEXT) -> str:
        length = self._number(_U64, f"{field}, length")
        if length > limit:
            raise self.error(
                f"{field}: a string of {length} bytes is too long (at most {limit}); the file is damaged"
            )
        if self._pos + length > len(self._bytes):
            raise self._truncated(field)
        raw, self._pos = bytes(self._bytes[self._pos : self._pos + length]), self._pos + length
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.error(f"{field} is not UTF-8; the file is damaged") from None

    def _truncated(self, field: str) -> ModelFileError:
        return self.error(f"the file ends inside {field}; it is truncated or damaged, download it again")


def map_file(path: Path) -> np.ndarray:
    """The bytes of a file as a read-only uint8 array over a memory map.

    Raises:
        ModelFileError: It is missing, empty, no regular file, or cannot be mapped.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for a writer
            what = "not a regular file"
            if stat.S_ISDIR(status.st_mode):
                what += " but a folder; name the file in it"
        elif not status.st_size:
            what = "the file is empty"
        else:
            with open(path, "rb") as file:
                return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except FileNotFoundError:
        what = "no such file"
    except (OSError, ValueError) as reason:
        what = f"cannot be read ({reason})"
    raise ModelFileError(f"{path}: {what}")
