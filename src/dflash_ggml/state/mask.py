"""Attention masks that stay on the device: a step rewrites only the cache rows whose visibility changed.

Attention wants [n_kv, width], cache row fastest. Here the mask is transposed, [width, n_rows], so that a cache row is
rewritten with one `set_rows`; the graph transposes the part it needs. Uploading whole masks would cost n_kv * width * 2
bytes a step: 6 MB for 24 columns over 128k cache rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..ggml.bindings import Tensor
from ..ggml.device import F16, I32, Device
from ..ggml.graph import Graph
from ..ggml.store import Store, Stored

HIDDEN = np.float16(-np.inf)
# the mask values of 8 columns, from their bits: 1 = visible, lowest bit first
_OF_BITS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.float16(0), HIDDEN
)


class ResidentMask(Stored):
    """Mask of one kind of pass. Cache rows below a pass's start hold the committed prefix, the next ones its own columns.

    Args:
        width: Most columns of a pass.
        max_advance: Most rows committed between two passes.
        n_rows: Rows of the caches.
        ranks: Devices with a copy each (empty: `device` alone).
    """

    def __init__(
        self, device: Device, width: int, max_advance: int, n_rows: int, ranks: Sequence[Device] = ()
    ) -> None:
        self.device, self.width = device, width
        self.n_changes = min(max_advance + width, n_rows)
        self.n_rows = n_rows
        self._stores = [Store(by, 1) for by in ranks or (device,)]
        self._rows = [store.tensor(F16, width, n_rows, name="mask rows") for store in self._stores]
        for store in self._stores:
            store.allocate(clear=False)
        # rows under `_below` are as a pass starting there left them; from `_defined` on nothing has been written yet
        self._below = self._defined = 0
        self._origin = 0
        self._unwritten = True
        self._steps = np.arange(self.n_changes, dtype=np.int32)

    def build(self, g: Graph, name: str, n_kv: int, columns: int, rank: int = 0) -> Tensor:
        """The mask float16 [n_kv, columns] as part of graph `g`; `fill` provides its inputs `name`_rows and `name`_values."""
        rows = g.input(f"{name}_rows", I32, self.n_changes)
        values = g.input(f"{name}_values", F16, self.width, self.n_changes)
        mask = g.set_rows(self._rows[rank], values, rows)
        return g.cont(g.transpose(g.view(mask, (columns, n_kv), (mask.nb[1],))))

    def fill(
        self, graph: Graph, name: str, n_kv: int, start: int, seen_by: np.ndarray, origin: int = 0
    ) -> None:
        """Set the inputs of `build` for a pass. Call `ran` once it has run.

        Args:
            n_kv: Rows that the graph reads.
            start: Row of the first column; the prefix is in rows `origin` to `start`.
            seen_by: uint8 [w, w / 8], bits: the columns that see column j.
        """
        own = _OF_BITS.take(seen_by, 0).reshape(len(seen_by), -1)[:, : self.width]
        first, jump = min(self._below, start), abs(start - self._below)
        everything = self._unwritten or origin != self._origin
        self._origin = origin
        if everything or jump > self.n_changes - self.width:
            self._put(0 if everything else first, n_kv, start, own)
            first, self._defined = start, n_kv
        elif n_kv > self._defined:
            self._put(self._defined, n_kv, start, own)
            self._defined = n_kv
        first = max(0, min(first, self.n_rows - self.n_changes))
        np.add(self._steps, first, graph.inputs[f"{name}_rows"].array)
        self._write(graph.inputs[f"{name}_values"].array, first, start, own)
        self._below, self._unwritten = start, True

    def _put(self, first: int, end: int, start: int, own: np.ndarray) -> None:
        """Write the rows from `first` to `end` now."""
        values = np.empty((end - first, self.width), np.float16)
        self._write(values, first, start, own)
        for mask in self._rows:
            self.device.write(mask, values, first * mask.nb[1])

    def ran(self) -> None:
        """The pass that `fill` prepared has run, so its rows are written."""
        self._unwritten = False

    def _write(self, out: np.ndarray, first: int, start: int, own: np.ndarray) -> None:
        """Fill out [rows, width] with the values of the rows from `first` on, for a pass at `start`."""
        at = start - first  # first of the own rows, which may begin before or end after `out`
        n = min(max(at, 0), len(out))
        out[:n] = 0
        if self._origin > first:
            out[: min(self._origin - first, n)] = HIDDEN
        out[n:] = HIDDEN
        block = out[n : max(at + len(own), 0)]
        block[:, : own.shape[1]] = own[max(-at, 0) :][: len(block)]
