"""Attention masks that stay on the device: a step rewrites only the cache rows whose visibility changed.

Attention wants [n_kv, width], slot fastest. Here each slot is a row of `width` columns, [width, n_rows], so that a slot is
rewritten with one `set_rows`; the graph turns the part it needs over. Uploading whole masks would cost n_kv * width * 2
bytes a step: 6 MB for 24 columns over 128k slots.
"""

from __future__ import annotations

import numpy as np

from ..ggml.device import F16, I32, Device
from ..ggml.graph import Graph
from ..ggml.store import Store

HIDDEN = np.float16(-np.inf)
# the mask values of 8 columns, from their bits: 1 = visible, lowest bit first
_OF_BITS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.float16(0), HIDDEN
)


class SlotMask:
    """Mask of one kind of pass. Slots below a pass's start are the committed prefix, the next ones its own columns.

    window: a column at position p sees slots above p - window only (None: all).
    ring: slot s is row s % n_rows of the caches. What a pass sees and what it rewrites, and what the one before it did, must
    then be rows apart: n_rows >= window - 1 + max_advance + width.
    """

    def __init__(
        self,
        device: Device,
        width: int,
        max_advance: int,
        n_rows: int,
        window: int | None = None,
        ring: bool = False,
    ) -> None:
        """`width`: most columns of a pass; `max_advance`: most slots committed between two passes."""
        self.device, self.width, self.window, self.ring = device, width, window, ring
        if ring and (window is None or n_rows < window - 1 + max_advance + width):
            raise ValueError(f"a ring of {n_rows} rows is too short for a window of {window}")
        self.n_changes = min(max_advance + width, n_rows)
        self.n_rows = n_rows
        self._store = Store(device, 1)
        self._slots = self._store.tensor(F16, width, n_rows, name="mask slots")
        self._store.allocate(clear=False)
        # slots under `_below` are as a pass starting there left them; from `_defined` on, nothing
        # has been written: that far no graph has looked
        self._below = self._defined = 0
        self._origin = 0
        self._unwritten = True
        self._steps = np.arange(self.n_changes, dtype=np.int32)

    @property
    def nbytes(self) -> int:
        return self._store.nbytes

    @property
    def n_updates(self) -> int:
        """Groups of slots that a pass rewrites: around its start, and where a window's edge moved."""
        return 1 if self.window is None else 2

    def build(self, g: Graph, name: str, n_kv: int, columns: int):
        """The mask float16 [n_kv, columns] as part of graph `g`; `fill` provides its inputs `name`0, `name`1."""
        slots = self._slots
        for i in range(self.n_updates):
            rows = g.input(f"{name}_rows{i}", I32, self.n_changes)
            values = g.input(f"{name}_values{i}", F16, self.width, self.n_changes)
            slots = g.set_rows(slots, values, rows)
        return g.cont(g.transpose(g.view(slots, (columns, n_kv), (slots.nb[1],))))

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
        """Set the inputs for a pass over `n_kv` slots whose prefix lies in those from `origin` to `start`, its own columns
        behind them.

        seen_by[j]: the columns that see column j, uint8 [w, w / 8], bits. valid: bool, slots that hold something (None: all).
        Call `ran` once the pass has run, and `forget` when other slots became valid: else the next pass rewrites every slot.
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
            # of the slots before, those at a window's edge change as well
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
        """Write the slots from `first` to `end` now."""
        values = np.empty((end - first, self.width), np.float16)
        self._write(values, first, start, own, valid)
        self.device.write(self._slots, values, first * self._slots.nb[1])

    def _put_ring(self, start: int, own: np.ndarray, valid: np.ndarray | None) -> None:
        """Write all rows of a ring now: those of the last slots that a pass at `start` has."""
        first = start + self.width - self.n_rows
        values = np.empty((self.n_rows, self.width), np.float16)
        self._write(values, first, start, own, valid)
        self.device.write(self._slots, np.roll(values, first, axis=0))

    def forget(self) -> None:
        """What is written says nothing about the next pass."""
        self._unwritten = True

    def ran(self) -> None:
        """The pass that `fill` prepared has rewritten its slots."""
        self._unwritten = False

    def _write(
        self, out: np.ndarray, first: int, start: int, own: np.ndarray, valid: np.ndarray | None
    ) -> None:
        """Fill out [slots, width] with the values of the slots from `first` on, for a pass at `start`."""
        at = start - first  # of the own slots, which may begin before or end after the others
        n = min(max(at, 0), len(out))
        prefix = out[:n]
        prefix[:] = 0
        if valid is not None:
            before = max(-first, 0)  # slots below 0, in front of a ring's first round
            if not (held := valid[first + before :][: max(n - before, 0)]).all():
                prefix[before:][~held] = HIDDEN
        if self._origin > first:
            prefix[: self._origin - first] = HIDDEN
        out[n:] = HIDDEN
        slots = out[n : max(at + len(own), 0)]
        slots[:, : own.shape[1]] = own[max(-at, 0) :][: len(slots)]
        if self.window is not None and at + self.width > self.window:
            lag = np.arange(first, first + len(out))[:, None] - np.arange(start, start + self.width)
            out[lag <= -self.window] = HIDDEN

    def close(self) -> None:
        self._store.close()
