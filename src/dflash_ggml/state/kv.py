"""K/V caches: rows of keys and values of all attention layers of a model.

The rows of the whole context are reserved once, so that no pass ever waits for memory to move and no graph is lost; a graph
reads those in use only (`kv_bucket`). On a CPU rows that nobody has written take no memory yet (`Store.reserve`).
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ggml.device import F16, F32, Device
from ..ggml.store import Store
from .spec import KvLayer

KV_TYPES = {"f16": F16, "f32": F32}


def kv_bucket(rows: int) -> int:
    """Cache rows of a graph when `rows` are in use: steps of 256, from an eighth of the length on, so that graphs stay few.

    On a GPU (27B shape) a new graph costs 25 ms, attention over 512 more rows 0.04 ms a pass.
    """
    step = 256
    while step * 8 <= rows:
        step *= 2
    return -(-rows // step) * step


class KvCache:
    """K and V rows of attention layers: one tensor [row, n_rows, 2 * layers] per row length, so that a commit moves rows of
    all its layers at once."""

    def __init__(self, device: Device, layers: Sequence[KvLayer], type_: int, n_rows: int) -> None:
        """Raises DeviceError when the rows do not fit."""
        self.device, self.layers, self.type, self.n_rows = device, tuple(layers), type_, n_rows
        lengths = sorted({layer.row for layer in self.layers})
        members = {length: [i for i, layer in enumerate(layers) if layer.row == length] for length in lengths}
        self._store = Store(device, len(lengths) + 2 * len(self.layers))
        self.wholes = [
            self._store.tensor(type_, length, n_rows, 2 * len(of), name="kv")
            for length, of in members.items()
        ]
        self._store.reserve()
        self._slices: list = [None] * (2 * len(self.layers))  # keys and values of layer 0, of layer 1, ...
        for whole, of in zip(self.wholes, members.values()):
            for at, i in enumerate(of):
                for part in (0, 1):
                    view = self._store.view(whole, (2 * at + part) * whole.nb[2], whole.ne[0], n_rows)
                    self._slices[2 * i + part] = view

    def keys(self, layer: int):
        """Keys of the cache's layer number `layer` [row, n_rows]."""
        return self._slices[2 * layer]

    def values(self, layer: int):
        """Values of the cache's layer number `layer` [row, n_rows]."""
        return self._slices[2 * layer + 1]

    @property
    def slices(self) -> list:
        """Keys and values of each layer in order, [row, n_rows] each."""
        return list(self._slices)

    @property
    def nbytes(self) -> int:
        return self._store.nbytes

    def close(self) -> None:
        self._store.close()
        self.wholes, self._slices = [], []
