"""One vector from a PyTorch archive (.pt), without PyTorch and without unpickling code."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelFileError

MAX_BYTES = 1 << 24  # largest archive in bytes; a vector of a model's width takes about ten KB
_ELEMENTS = {"FloatStorage": "<f4", "HalfStorage": "<f2", "BFloat16Storage": "<u2", "DoubleStorage": "<f8"}


def read_torch_vector(path: Path, key: str) -> tuple[NDArray[np.float32], dict[str, Any]]:
    """The vector float32 [n] under `key` of a saved dictionary, and its other entries.

    Raises:
        ModelFileError: The archive is unreadable or has no such vector.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"{path.stat().st_size} bytes are too many for a vector")
        with zipfile.ZipFile(path) as archive:
            name = next(n for n in archive.namelist() if n.endswith("/data.pkl"))
            if sum(i.file_size for i in archive.infolist()) > MAX_BYTES:
                raise ValueError("its contents are too many for a vector")
            found = _Reader(archive, name.removesuffix("data.pkl")).load()
        if not isinstance(found, dict) or not isinstance(found.get(key), np.ndarray) or found[key].ndim != 1:
            raise ValueError(f"it has no vector {key!r}")
        return found.pop(key), found
    except Exception as reason:  # noqa: BLE001 - a damaged archive or pickle may raise anything
        raise ModelFileError(f"{path}: no archive of PyTorch that can be read ({reason})") from None


class _Reader(pickle.Unpickler):
    """Unpickler that builds one-dimensional tensors and refuses everything else."""

    def __init__(self, archive: zipfile.ZipFile, prefix: str) -> None:
        super().__init__(io.BytesIO(archive.read(f"{prefix}data.pkl")))
        self.archive, self.prefix = archive, prefix

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in _ELEMENTS:
            return _ELEMENTS[name]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> NDArray[Any]:
        kind, elements, key = pid[:3]
        if kind != "storage" or elements not in _ELEMENTS.values() or not isinstance(key, str):
            raise pickle.UnpicklingError(f"it has a storage of the kind {kind!r}")
        raw = np.frombuffer(self.archive.read(f"{self.prefix}data/{key}"), elements)
        return (raw.astype("<u4") << 16).view("<f4") if elements == "<u2" else raw


def _rebuild(storage: NDArray[Any], offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any):
    if len(size) != 1 or stride != (1,) or not 0 <= offset <= len(storage) - size[0]:
        raise pickle.UnpicklingError(f"its tensor has the shape {size}")
    return storage[offset : offset + size[0]].astype(np.float32)
