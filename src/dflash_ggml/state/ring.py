"""K/V of a target's sliding-window layers: a ring of rows per sequence, independent of the context length.

The token at position p is in row p % size. A pass gathers the rows that its columns see, in order of their positions, so
that a column sees one range, and attention reads no more than a window (docs/decisions/0008).

Only rows outside the window may be overwritten. A pass writes its own columns' rows before it reads, and a rejected
tree's rows stay until they are overwritten: `ring_rows` is large enough for both beside a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..ggml.bindings import Tensor
from ..ggml.device import F16, I32, NARROW_COLUMNS, Device
from ..ggml.graph import Graph, packed
from ..ggml.operations import MOST_SPANS
from .kv import KvCache, Visibility
from .kv_type import KvType
from .mask import HIDDEN
from .memory import padded
from .spec import KvLayer

TILE = 64  # gathered rows begin at multiples of it: kernels sum in such pieces, so results do not depend on the batch


def ring_rows(window: int, columns: int, n_rows: int) -> int:
    """Rows of a ring for passes of up to `columns` columns, in a context of `n_rows`."""
    return min(padded(window - 1 + columns, 256), n_rows)


@dataclass(frozen=True, slots=True)
class TreeColumns:
    """Columns of a tree after the first `start` tokens of a sequence.

    Attributes:
        depths: [w], of each column below the root.
        own: [w, w], whether a column sees another.
    """

    state_index: int
    start: int
    depths: NDArray[np.int32]
    own: NDArray[np.bool_]


class RingView(Visibility):
    """What the columns of a pass see of a ring; the counterpart of `Columns` for whole caches.

    Args:
        seqs: See Batch; None for columns of one sequence.
    """

    def __init__(self, g: Graph, name: str, window: int, n: int, positions, is_tree: bool, seqs=None) -> None:
        self.n, self.positions = n, positions
        self.n_kv = padded(window - 1 + TILE - 1 + n, 256)
        if seqs is not None:
            self.n_kv = padded(seqs.ne[1] * (window - 1 + 2 * (TILE - 1)) + n, 256)
            if seqs.ne[1] <= MOST_SPANS:
                self._spanned, self._spans = seqs, g.input(f"{name} spans", I32, 2, seqs.ne[1])
        parts = packed(g, f"{name} rows", n, self.n_kv, *(() if is_tree else (2 * n,)))
        self.rows, self.gathered = parts[:2]
        if is_tree:
            self._mask = g.input(f"{name} mask", F16, self.n_kv, n)
            return
        self._ranges = g.reshape(parts[2], n, 2)
        if g.device.is_gpu and n <= NARROW_COLUMNS:
            self._mask = g.range_mask(self._ranges, self.n_kv)


class Ring:
    """The layers with one window: their rows, and which of them a pass sees.

    Args:
        device: The first of the devices.
        name: Start of its inputs' names.
        layers: The attention layers, all with this window.
        kv_type: Types of keys and values.
        n_rows: Rows of each state index, as `ring_rows` gives them.
        n_states: Sequences.
        sides: The side of each layer; empty if all are on `device`.

    Attributes:
        window: Tokens that a column sees, itself included.
    """

    def __init__(
        self,
        device: Device,
        name: str,
        layers: Sequence[KvLayer],
        kv_type: KvType,
        n_rows: int,
        n_states: int,
        sides: Sequence[int] = (),
    ) -> None:
        assert layers[0].window is not None
        self.name, self.window, self.n_rows = name, layers[0].window, n_rows
        self.cache = KvCache(device, layers, kv_type, n_rows * n_states, sides)

    def build(
        self, g: Graph, n: int, positions: Tensor, is_tree: bool, seqs: Tensor | None = None
    ) -> RingView:
        """Create the inputs of a pass of n columns at `positions`; `fill` sets them, or `fill_trees` those of trees."""
        return RingView(g, self.name, self.window, n, positions, is_tree, seqs)

    def rows(self, state_index: int, start: int, n: int) -> NDArray[np.int32]:
        """The rows of n tokens from position `start` on."""
        return state_index * self.n_rows + (start + np.arange(n, dtype=np.int32)) % self.n_rows

    def fill(self, graph: Graph, state_index: int, start: int, n: int) -> None:
        """Set the inputs of a linear pass of n columns whose first is at position `start`."""
        rows = graph.inputs[f"{self.name} rows"].array
        visible, ranges = rows[n : -2 * n], rows[-2 * n :].reshape(2, n)
        base = max(start - self.window + 1, 0) // TILE * TILE
        before = start - base
        rows[:n] = self.rows(state_index, start, n)
        positions = start + np.arange(n)
        ranges[0] = np.maximum(positions - self.window + 1, 0) - base
        ranges[1] = positions - base + 1
        visible[: before + n] = self.rows(state_index, base, before + n)
        visible[before + n :] = rows[0]  # any finite row: it is never seen

    def fill_trees(self, graph: Graph, n: int, trees: Sequence[TreeColumns]) -> None:
        """Set the inputs of a pass of n columns over trees, concatenated from the first column on."""
        rows = graph.inputs[f"{self.name} rows"].array
        visible, mask = rows[n:], graph.inputs[f"{self.name} mask"].array.reshape(n, -1)
        mask[:] = HIDDEN
        spans = np.zeros((len(trees), 2), np.int32)
        column = at = 0
        for i, tree in enumerate(trees):
            w, start = len(tree.depths), tree.start
            base = max(start - self.window + 1, 0) // TILE * TILE
            before, own = start - base, slice(column, column + w)
            rows[own] = self.rows(tree.state_index, start, w)
            visible[at : at + before + w] = self.rows(tree.state_index, base, before + w)
            lag = start + tree.depths[:, None] - (base + np.arange(before))
            mask[own, at : at + before] = np.where(lag < self.window, np.float16(0), HIDDEN)
            seen = tree.own & (tree.depths[:, None] - tree.depths < self.window)
            mask[own, at + before : at + before + w] = np.where(seen, np.float16(0), HIDDEN)
            spans[i] = at, at + before + w
            end = at + before + w
            at += padded(before + w, TILE)
            visible[end:at] = rows[0]  # any finite row: it is never seen
            column += w
        visible[at:] = rows[0]
        # padding: behind the last tree, never read
        rows[column:n] = self.rows(tree.state_index, start + w, n - column)
        mask[column:, 0] = 0
        if f"{self.name} spans" in graph.inputs:
            array = graph.inputs[f"{self.name} spans"].array.reshape(-1, 2)
            array[: len(trees)], array[len(trees) :] = spans, 0

    @property
    def kept(self) -> list[tuple[Tensor, int, int]]:
        """Keys and values of each layer, with the rows of the ring and the number of last tokens still visible."""
        return [(t, self.n_rows, self.window - 1) for t in self.cache.slices]

    def close(self) -> None:
        """Free the memory."""
        self.cache.close()
