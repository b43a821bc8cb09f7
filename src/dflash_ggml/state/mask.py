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
        window: A column at position p sees rows above p - window only (None: all).
        ring: Rows are counted without wrapping; row r is at r % n_rows of the caches. The rows that a pass sees and those
            that it and the pass before rewrite must not overlap.
        ranks: Devices with a copy each (empty: `device` alone).

    Raises:
        ValueError: ring, and n_rows < window - 1 + max_advance + width.
    """

    def __init__(
        self,
        device: Device,
        width: int,
        max_advance: int,
        n_rows: int,
        window: int | None = None,
        ring: bool = False,
        ranks: Sequence[Device] = (),
    ) -> None:
        self.device, self.width, self.window, self.ring = device, width, window, ring
        if ring and (window is None or n_rows < window - 1 + max_advance + width):
            raise ValueError(f"a ring of {n_rows} rows is too short for a window of {window}")
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

    @property
    def n_updates(self) -> int:
        """Groups of rows that a pass rewrites: around its start, and where the window's edge moved."""
        return 1 if self.window is None else 2

    def build(self, g: Graph, name: str, n_kv: int, columns: int, rank: int = 0) -> Tensor:
        """The mask float16 [n_kv, columns] as part of graph `g`; `fill` provides its inputs `name`0, `name`1."""
        mask = self._rows[rank]
        for i in range(self.n_updates):
            rows = g.input(f"{name}_rows{i}", I32, self.n_changes)
            values = g.input(f"{name}_values{i}", F16, self.width, self.n_changes)
            mask = g.set_rows(mask, values, rows)
        return g.cont(g.transpose(g.view(mask, (columns, n_kv), (mask.nb[1],))))

    def fill(
        self,
        graph: Graph,
        name: str,
        n_kv: int,
        start: int,
        seen_by: np.ndarray,
        valid: np.ndarray | None = None,
        origin: int = 0,
    ) -> None:
        """Set the inputs of `build` for a pass. Call `ran` once it has run, and `forget` when `valid` changed in between.

        Args:
            n_kv: Rows that the graph reads.
            start: Row of the first column; the prefix is in rows `origin` to `start`.
            seen_by: uint8 [w, w / 8], bits: the columns that see column j.
            valid: bool [n_rows], rows that hold a token (None: all).
        """
        own = _OF_BITS.take(seen_by, 0).reshape(len(seen_by), -1)[:, : self.width]
        low, jump = min(self._below, start), abs(start - self._below)
        everything = self._unwritten or origin != self._origin
        self._origin = origin
        if self.ring:
            if everything or jump > self.n_changes - self.width:
                self._put_ring(start, own, valid)
                low = start
        elif everything or jump > self.n_changes - self.width:
            # of the earlier rows, those at the window's edge change as well
            first = 0 if everything else max(0, low - (self.window or 0))
            self._put(first, n_kv, start, own, valid)
            low, self._defined = start, n_kv
        elif n_kv > self._defined:
            self._put(self._defined, n_kv, start, own, valid)
            self._defined = n_kv
        for i, first in enumerate([low] if self.window is None else [low, low - self.window + 1]):
            rows = graph.inputs[f"{name}_rows{i}"].array
            if not self.ring:
                first = max(0, min(first, self.n_rows - self.n_changes))
            np.add(self._steps, first, rows)
            if self.ring:
                rows %= self.n_rows
            self._write(graph.inputs[f"{name}_values{i}"].array, first, start, own, valid)
        self._below, self._unwritten = start, True

    def _put(self, first: int, end: int, start: int, own: np.ndarray, valid: np.ndarray | None) -> None:
        """Write the rows from `first` to `end` now."""
        values = np.empty((end - first, self.width), np.float16)
        self._write(values, first, start, own, valid)
        for mask in self._rows:
            self.device.write(mask, values, first * mask.nb[1])

    def _put_ring(self, start: int, own: np.ndarray, valid: np.ndarray | None) -> None:
        """Write all rows of a ring now: those that a pass at `start` sees."""
        first = start + self.width - self.n_rows
        values = np.empty((self.n_rows, self.width), np.float16)
        self._write(values, first, start, own, valid)
        for mask in self._rows:
            self.device.write(mask, np.roll(values, first, axis=0))

    def forget(self) -> None:
        """Rewrite every row before the next pass."""
        self._unwritten = True

    def ran(self) -> None:
        """The pass that `fill` prepared has run, so its rows are written."""
        self._unwritten = False

    def _write(
        self, out: np.ndarray, first: int, start: int, own: np.ndarray, valid: np.ndarray | None
    ) -> None:
        """Fill out [rows, width] with the values of the rows from `first` on, for a pass at `start`."""
        at = start - first  # first of the own rows, which may begin before or end after `out`
        n = min(max(at, 0), len(out))
        prefix = out[:n]
        prefix[:] = 0
        if valid is not None:
            before = max(-first, 0)  # rows below 0, before a ring has wrapped
            if not (held := valid[first + before :][: max(n - before, 0)]).all():
                prefix[before:][~held] = HIDDEN
        if self._origin > first:
            prefix[: self._origin - first] = HIDDEN
        out[n:] = HIDDEN
        block = out[n : max(at + len(own), 0)]
        block[:, : own.shape[1]] = own[max(-at, 0) :][: len(block)]
        if self.window is not None and at + self.width > self.window:
            lag = np.arange(first, first + len(out))[:, None] - np.arange(start, start + self.width)
            out[lag <= -self.window] = HIDDEN
