"""A draft's state of a sequence: keys and values of its attention layers, and the rows that a block's columns see.

A layer with full attention has a row per token. A window layer has a ring: the token at position p is in row p % size,
so a window of 2,048 costs 2,304 rows at any context length (docs/decisions/0008).

A ring holds committed tokens and the current drafted block, whose rows the next pass overwrites: rejecting it costs
nothing. `ring_rows` makes it large enough that visible rows are not overwritten. Every state index has its own ring.

A pass specifies for each column the rows that it sees: one range or, around the end of a ring, two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..ggml.bindings import Tensor
from ..ggml.device import Device
from .kv import KvCache, LayerCache, kv_bucket
from .kv_type import KvType
from .memory import padded
from .spec import KvLayer, StateSpec

Ints = int | NDArray[np.int32]


def ring_rows(window: int | None, block: int, n_rows: int) -> int:
    """Rows for layers with this window in a context of `n_rows`, for passes of up to `block` columns.

    The first column of a block at position p sees back to p - window + 1, its last one lies at p + block - 1.
    """
    return n_rows if window is None else min(padded(window - 1 + block, 256), n_rows)


class ContextRows:
    """Layers with the same window: their K/V, and the cache row of each position.

    Position p of a sequence is in row first + p, or in the ring of its state index. `block` spare rows follow, which are never
    read, since appends have a fixed width.

    Args:
        n_rows: Rows of the context.
    """

    def __init__(
        self,
        device: Device,
        layers: Sequence[KvLayer],
        kv_type: KvType,
        n_rows: int,
        block: int,
        n_states: int,
    ) -> None:
        self.window, self._is_gpu = layers[0].window, device.is_gpu
        self.n_rows = ring_rows(self.window, block, n_rows)  # of a ring, or of all sequences
        self.is_ring = self.n_rows < n_rows
        self.end = self.n_rows * (n_states if self.is_ring else 1)
        self.cache = KvCache(device, layers, kv_type, self.end + block)
        self._spare = self.end + np.arange(block, dtype=np.int32)

    def rows(self, first: int, state_index: int, start: int, end: int) -> NDArray[np.int32]:
        """The rows of positions `start` to `end` of the sequence whose rows begin at `first`, or of a state index's ring."""
        return self.rows_of(first, state_index, np.arange(start, end, dtype=np.int32))

    def rows_of(self, first: Ints, state_index: Ints, positions: NDArray[np.int32]) -> NDArray[np.int32]:
        """The rows of positions, all of one sequence, or each of the sequence that `first` and `state_index` name."""
        return positions % self.n_rows + state_index * self.n_rows if self.is_ring else positions + first

    def spare(self, n: int) -> NDArray[np.int32]:
        """n rows that are never read; beyond a block they repeat."""
        if n > len(self._spare):
            self._spare = np.resize(self._spare, n)
        return self._spare[:n]

    def used(self, first: int, state_index: int, end: int) -> int:
        """Rows that a graph must read for a block that ends before position `end`."""
        if self.is_ring and state_index:
            return (state_index + 1) * self.n_rows
        return min(kv_bucket(end if self.is_ring else first + end, self._is_gpu), self.n_rows)

    @property
    def pieces(self) -> int:
        """Ranges of rows that a column sees."""
        return 2 if self.is_ring else 1

    def ranges(
        self, first: Ints, state_index: Ints, known: Ints, start: Ints, block: int, causal: bool
    ) -> NDArray[np.int32]:
        """The ranges of rows that the columns of a block from position `start` on see.

        Args:
            known: First position whose context the draft holds.
            causal: Whether columns do not see later ones of the block.

        Returns:
            First and end rows, int32 [pieces, 2, block]; with first, state_index, known and start of n sequences [n, 1],
            int32 [pieces, 2, n, block].
        """
        at = start + np.arange(block, dtype=np.int32)
        found = np.zeros((self.pieces, 2, *at.shape), np.int32)
        low = known + np.zeros_like(at) if self.window is None else np.maximum(known, at - self.window + 1)
        high = at + 1 if causal else start + block + np.zeros_like(at)
        if not self.is_ring:
            found[0] = first + low, first + high
            return found
        base, size = state_index * self.n_rows, self.n_rows
        low, length = low % size, high - low
        over = np.maximum(low + length - size, 0)
        found[0, 0], found[0, 1], found[1, 0], found[1, 1] = (
            base + low,
            base + low + length - over,
            base,
            base + over,
        )
        return found


class Context:
    """K/V of all layers of a draft.

    Attributes:
        groups: The layers by window, those without a window first.
    """

    def __init__(
        self,
        device: Device,
        layers: Sequence[KvLayer],
        kv_type: KvType,
        n_rows: int,
        block: int,
        n_states: int = 1,
    ) -> None:
        members = _groups(layers)
        self.groups = [
            ContextRows(device, [layers[i] for i in of], kv_type, n_rows, block, n_states) for of in members
        ]
        self._group_index = {i: (group, at) for group, of in enumerate(members) for at, i in enumerate(of)}

    def group(self, layer: int) -> int:
        """Index of the group of layer `layer`."""
        return self._group_index[layer][0]

    def layer(self, layer: int) -> LayerCache:
        """Keys and values of layer `layer`."""
        group, at = self._group_index[layer]
        return self.groups[group].cache.layer(at)

    @property
    def slices(self) -> list[Tensor]:
        """Keys and values [row, n_rows] of layers with a row per token."""
        return [t for group in self.groups if not group.is_ring for t in group.cache.slices]

    @property
    def rings(self) -> list[tuple[Tensor, int, int]]:
        """Keys and values of the ring layers, each with the rows of a ring and the number of last tokens still visible."""
        return [
            (t, group.n_rows, group.window - 1)
            for group in self.groups
            if group.is_ring and group.window is not None
            for t in group.cache.slices
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of K/V."""
        return sum(group.cache.nbytes for group in self.groups)

    def close(self) -> None:
        """Free the memory."""
        for group in self.groups:
            group.cache.close()


def context_bytes(
    layers: Sequence[KvLayer], kv_type: KvType, n_rows: int, block: int, n_states: int = 1
) -> int:
    """Bytes of K/V that a `Context` of these arguments takes."""
    found = 0
    for of in _groups(layers):
        members = tuple(layers[i] for i in of)
        rows = ring_rows(members[0].window, block, n_rows)
        found += StateSpec(members).kv_bytes(rows * (n_states if rows < n_rows else 1) + block, kv_type)
    return found


def _groups(layers: Iterable[KvLayer]) -> list[list[int]]:
    """Numbers of the layers by window, those without one first."""
    found: dict[int | None, list[int]] = {}
    for i, layer in enumerate(layers):
        found.setdefault(layer.window, []).append(i)
    return [found[window] for window in sorted(found, key=lambda w: -1 if w is None else w)]
