"""Attention masks that stay on the device: a step rewrites the few cache slots whose visibility changed, whatever the context.

Attention wants [n_kv, width], slot fastest. Here each slot is a row of `width` columns, [width, n_rows], so that a slot is
rewritten with one `set_rows`; the graph turns the part it needs over. Uploading whole masks would cost n_kv * width * 2
bytes a step: 6 MB for 24 columns over 128k slots.
"""

from __future__ import annotations

import numpy as np

from .device import F16, F32, I32, Device, Store
from .ggml import Graph

HIDDEN = np.float32(-np.inf)


class SlotMask:
    """Mask of one kind of pass. Slots below a pass's start are the committed prefix, the next ones its own columns.

    window: a column at position p sees slots above p - window only (None: all).
    """

    def __init__(
        self, device: Device, width: int, max_advance: int, n_rows: int, window: int | None = None
    ) -> None:
        """`width`: most columns of a pass; `max_advance`: most slots committed between two passes."""
        self.device, self.width, self.window = device, width, window
        self.n_changes = min(max_advance + width, n_rows)
        self.n_rows = n_rows
        self._store = Store(device, 1)
        self._slots = self._store.tensor(F16, width, n_rows, name="mask slots")
        self._store.allocate(clear=False)
        self._below = self._above = (
            0  # slots under `_below` are as a pass starting there left them, from `_above` on hidden
        )
        self._unwritten = True

    @property
    def n_updates(self) -> int:
        """Groups of slots that a pass rewrites: around its start, and where a window's edge moved."""
        return 1 if self.window is None else 2

    def build(self, g: Graph, name: str, n_kv: int, columns: int):
        """The mask float16 [n_kv, columns] as part of graph `g`; `fill` provides its inputs `name`0, `name`1."""
        slots = self._slots
        for i in range(self.n_updates):
            rows = g.input(f"{name}_rows{i}", I32, self.n_changes)
            values = g.input(f"{name}_values{i}", F32, self.width, self.n_changes)
            slots = g.set_rows(slots, values, rows)
        return g.cont(g.transpose(g.view(slots, (columns, n_kv), (slots.nb[1],))))

    def fill(
        self, graph: Graph, name: str, start: int, visible: np.ndarray, valid: np.ndarray | None = None
    ) -> None:
        """Set the inputs for a pass at `start`: visible bool [w, w], row i the own columns that column i sees.

        Call `ran` once the pass has run: without it the next pass rewrites every slot.
        valid: bool, slots of the prefix that hold something (None: all).
        """
        w = len(visible)
        low, high = min(self._below, start), max(self._above, start + w)
        far = self._unwritten or high - low > self.n_changes or start < self._below
        if far:
            everything = np.arange(self.n_rows)
            self.device.write(self._slots, self._values(everything, start, visible, valid).astype(np.float16))
            low = start
        groups = [low] if self.window is None else [low, low - self.window + 1]
        for i, first in enumerate(groups):
            first = max(0, min(first, self.n_rows - self.n_changes))
            rows = np.arange(first, first + self.n_changes, dtype=np.int32)
            graph.inputs[f"{name}_rows{i}"].array[:] = rows
            graph.inputs[f"{name}_values{i}"].array[:] = self._values(rows, start, visible, valid)
        self._below, self._above, self._unwritten = start, start + w, True

    def ran(self) -> None:
        """The pass that `fill` prepared has rewritten its slots."""
        self._unwritten = False

    def _values(
        self, rows: np.ndarray, start: int, visible: np.ndarray, valid: np.ndarray | None
    ) -> np.ndarray:
        """Values float32 [len(rows), width] of some slots for a pass at `start`."""
        w = len(visible)
        values = np.full((len(rows), self.width), HIDDEN, np.float32)
        prefix = rows < start
        if valid is not None:
            prefix &= valid[np.minimum(rows, len(valid) - 1)]
        values[prefix] = 0
        own = np.flatnonzero((rows >= start) & (rows < start + w))
        values[own, :w] = np.where(visible.T[rows[own] - start], np.float32(0), HIDDEN)
        if self.window is not None:
            values[rows[:, None] <= start + np.arange(self.width) - self.window] = HIDDEN
        return values

    def close(self) -> None:
        self._store.close()
