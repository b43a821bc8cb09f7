"""Reader of safetensors checkpoints (one file, or shards of one) through memory maps, without torch.

The `safetensors` package checks every header; the bytes come from our own map, because the package returns bf16
only as a framework's tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from ..errors import ModelFileError
from .gguf import map_file
from .keys import KeyedFile
from .tensor_info import BF16, F16, F32, TensorInfo, tensor_nbytes

MAX_JSON = 1 << 24  # bytes of a header or of config.json; real ones stay below 1 MB
_TYPES = {
    "F32": F32,
    "F16": F16,
    "BF16": BF16,
    "BOOL": 24,
    "I8": 24,
    "I16": 25,
    "I32": 26,
    "I64": 27,
    "F64": 28,
}


class SafetensorsFile(KeyedFile):
    """An open safetensors checkpoint with its config.json; keys and tensors are read as from a `GGUFFile`.

    Args:
        path: A folder, or one .safetensors file with config.json beside it.

    Attributes:
        metadata: config.json with nested objects flattened, `dflash_config.block_size`; null counts as missing.
        tensors: Name -> `TensorInfo` (shape in ggml order), offsets within the shard that holds the tensor.

    Raises:
        ModelFileError: A file is missing or damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        folder = self.path if self.path.is_dir() else self.path.parent
        self._data: dict[str, np.ndarray] = {}
        tensors: dict[str, TensorInfo] = {}
        for file in _weight_files(folder) if self.path.is_dir() else [self.path]:
            for info, data in read_shard(file):
                if info.name in tensors:
                    raise ModelFileError(f"{file}: tensor {info.name!r} is also in another file of {folder}")
                tensors[info.name], self._data[info.name] = info, data
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(tensors)
        self.metadata = MappingProxyType(dict(_flat(read_json(folder / "config.json"))))

    def close(self) -> None:
        """Close the files. They are unmapped once the last array returned by `data` is gone."""
        self._data = {}

    def replace(
        self, gone: Iterable[str], made: Mapping[str, tuple[int, tuple[int, ...], np.ndarray]]
    ) -> None:
        """Replace tensors by new ones: name -> type, shape in ggml's order, bytes."""
        tensors = {name: info for name, info in self.tensors.items() if name not in set(gone)}
        for name, (kind, shape, data) in made.items():
            if name in tensors:
                raise self.error(f"tensor {name!r} is there twice, whole and in parts")
            tensors[name] = TensorInfo(name, kind, shape, 0, data.nbytes)
            self._data[name] = data
        self.tensors = MappingProxyType(tensors)

    def data(self, name: str) -> np.ndarray:
        """The bytes of a tensor: read-only uint8 [nbytes], a view into the mapped file."""
        if name not in self._data:
            raise self.error(f"tensor {name!r} is missing")
        return self._data[name]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ModelFileError: It is missing, too large, or not an object.
    """
    if not path.exists():
        raise ModelFileError(f"{path}: no such file; it must lie beside the safetensors weights")
    raw = map_file(path)
    if len(raw) > MAX_JSON:
        raise ModelFileError(f"{path}: {len(raw)} bytes are too many for a configuration file")
    try:
        value = json.loads(bytes(raw), parse_int=_int)
    except (ValueError, RecursionError) as reason:
        raise ModelFileError(f"{path}: not valid JSON ({reason})") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: expected a JSON object, found a {type(value).__name__}")
    return value


def _int(digits: str) -> int:
    """Parse a JSON integer. Raises ValueError for more than 64 bits, which would overflow floats."""
    if len(digits) > 20 or not -(1 << 63) <= int(digits) < 1 << 64:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _flat(config: dict[str, Any], prefix: str = "", depth: int = 3) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict) and depth:
            yield from _flat(value, f"{prefix}{key}.", depth - 1)
        elif value is not None:
            yield prefix + key, value


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = read_json(index).get("weight_map")
        listed = list(shards.values()) if isinstance(shards, dict) else []
        names = {name for name in listed if isinstance(name, str) and Path(name).name == name}
        if not names or len(names) < len({str(name) for name in listed}):
            raise ModelFileError(f"{index}: weight_map should map tensor names to files of this folder")
        return [folder / name for name in sorted(names)]
    found = sorted(folder.glob("*.safetensors"))
    if len(found) != 1:
        raise ModelFileError(f"{folder}: {len(found)} .safetensors files in this folder (expected 1)")
    return found


def read_shard(path: Path) -> list[tuple[TensorInfo, np.ndarray]]:
    """The tensors of one .safetensors file, each with its bytes as uint8.

    Raises:
        ModelFileError: It is damaged, or a tensor has an unsupported type.
    """
    whole = map_file(path)
    length = int.from_bytes(bytes(whole[:8]), "little")
    if len(whole) < 8 or length > min(MAX_JSON, len(whole) - 8):
        raise ModelFileError(
            f"{path}: header length {length} does not fit; truncated, or no safetensors file"
        )
    try:
        with safe_open(path, framework="np"):
            pass
        header = json.loads(bytes(whole[8 : 8 + length]))
    except (SafetensorError, ValueError, RecursionError) as reason:
        raise ModelFileError(f"{path}: header: {reason}") from None
    start, shard = 8 + length, []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _TYPES:
            raise ModelFileError(f"{path}: tensor {name!r} has the unsupported type {entry['dtype']}")
        kind, shape = _TYPES[entry["dtype"]], tuple(reversed(entry["shape"]))
        if not shape or 0 in shape or len(shape) > 4:
            raise ModelFileError(f"{path}: tensor {name!r} has the unsupported shape {entry['shape']}")
        info = TensorInfo(name, kind, shape, start + entry["data_offsets"][0], tensor_nbytes(kind, shape))
        shard.append((info, whole[info.offset : info.offset + info.nbytes]))
    return shard
