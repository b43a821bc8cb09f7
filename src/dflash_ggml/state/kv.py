"""K/V caches: rows of keys and values of all attention layers of a model, grown when needed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import DeviceError
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
        self.device, self.layers, self.type, self.n_rows = device, tuple(layers), type_, 0
        self.wholes: list = []
        self._store: Store | None = None
        self._slices: list = []  # keys and values of layer 0, of layer 1, ...
        self.grow(n_rows)

    def grow(self, n_rows: int) -> None:
        """Make room for `n_rows`, keeping the rows there are. Raises DeviceError, and keeps all, when they do not fit."""
        # through host memory: the device need not hold both
        kept = [self.device.read_bytes(t, np.empty(t.nb[1] * self.n_rows, np.uint8)) for t in self._slices]
        before = self.n_rows
        self.close()
        try:
            self._allocate(n_rows)
        except DeviceError:
            if before:
                self._allocate(before)
            raise
        finally:
            for t, data in zip(self._slices, kept):
                self.device.write(t, data)

    def _allocate(self, n_rows: int) -> None:
        lengths = sorted({layer.row for layer in self.layers})
        store = Store(self.device, len(lengths) + 2 * len(self.layers))
        wholes, slices = [], [None] * (2 * len(self.layers))
        for length in lengths:
            members = [i for i, layer in enumerate(self.layers) if layer.row == length]
            whole = store.tensor(self.type, length, n_rows, 2 * len(members), name="kv")
            wholes.append(whole)
            for at, i in enumerate(members):
                for part in (0, 1):
                    offset = (2 * at + part) * whole.nb[2]
                    slices[2 * i + part] = store.view(whole, offset, length, n_rows)
        try:
            store.allocate()
        except DeviceError:
            store.close()
            raise
        self._store, self.wholes, self._slices, self.n_rows = store, wholes, slices, n_rows

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
        return self._store.nbytes if self._store else 0

    def close(self) -> None:
        if self._store:
            self._store.close()
            self._store, self.wholes, self._slices, self.n_rows = None, [], [], 0
