"""K/V caches: rows of keys and values of all attention layers of a model.

The rows of the whole context are reserved once, so that nothing is reallocated and graphs stay valid; a graph reads only those in
use (`kv_bucket`). On a CPU, rows not yet written take no memory (`Store.reserve`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..ggml.bindings import Tensor
from ..ggml.device import F32, Device
from ..ggml.graph import Graph
from ..ggml.store import Store, Stored
from .kv_type import KvType, row_bytes, stored_row
from .rotation import Rotation, Rotations
from .spec import KvLayer

STEP, GPU_STEP = 256, 1024  # rows


def kv_bucket(rows: int, on_gpu: bool = False) -> int:
    """Cache rows of a graph when `rows` are in use: steps of 256 (on a GPU 1,024) that grow from an eighth of the length on, so
    that graphs stay few.

    On a GPU (27B shape) a new graph costs 15 to 30 ms, and `auto` needs four or five per bucket; attention over 512 more rows
    costs 0.04 ms a pass.
    """
    step = GPU_STEP if on_gpu else STEP
    while step * 8 <= rows:
        step *= 2
    return -(-rows // step) * step


class Visibility:
    """The cache rows that each column of a pass sees: a mask float16 [n_kv, n], or a range of rows per column, int32 [n, 2]."""

    n_kv: int
    _mask: Tensor | None = None
    _ranges: Tensor | None = None
    # the rows that a sequence's columns see, so that others need not be read: int32 [2, sequences], and the sequences
    _spans: Tensor | None = None
    _spanned: Tensor | None = None

    def attend(
        self, g: Graph, q: Tensor, keys: Tensor, values: Tensor, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        """Attention over the rows that each column sees.

        Args:
            q: [d, n, heads].
            keys, values: [d, n_kv, kv_heads].
            scale: Scale of the scores.
            sinks: See `Graph.attention`.

        Returns:
            [d, heads, n].
        """
        if self._mask is None:
            return g.range_attention(q, keys, values, self._ranges, scale, sinks)
        return g.attention(q, keys, values, self._mask, scale, self._spanned, self._spans, sinks)


def under(mask: Tensor) -> Callable[..., Tensor]:
    """Attention over the rows that a mask float16 [n_kv, n] shows, for `LayerCache.attend`."""
    return lambda g, q, keys, values, scale: g.attention(q, keys, values, mask, scale)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's keys and values [row, n_rows] with their rotation: the interface for building attention."""

    keys: Tensor
    values: Tensor
    rotation: Rotation

    def queries(self, g: Graph, q: Tensor) -> Tensor:
        """Rotated q [head_dim, heads, n], for `attend`."""
        return g.expand(self.rotation.of_keys(g, q))

    def write(self, g: Graph, k: Tensor, v: Tensor, rows: Tensor) -> LayerCache:
        """Write k [head_dim, kv_heads, n] and v [row, n] to `rows`, int32 [n]; readers of the result run after the write."""
        k = g.reshape(self.rotation.of_keys(g, k), v.ne[0], v.ne[1])
        keys = g.expand(g.set_rows(self.keys, k, rows))
        values = g.expand(g.set_rows(self.values, self.rotation.of_values(g, v), rows))
        return replace(self, keys=keys, values=values)

    def attend(
        self,
        g: Graph,
        q: Tensor,
        attention: Callable[..., Tensor],
        n_kv: int,
        rows: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Attention over the first `n_kv` rows of the cache, or over `rows`.

        Args:
            q: Result of `queries`, [head_dim, heads, n].
            attention: (graph, q, keys, values, scale), over the rows that each column sees; shapes as in `Graph.attention`.
            n_kv: Rows from the first on.
            rows: int32 [m], the rows to gather instead.
            scale: Scale of the scores, 1 / sqrt(head_dim) unless given.

        Returns:
            [head_dim, heads, n].
        """
        both, n = (self.keys, self.values), n_kv
        if rows is not None:
            both, n = tuple(_gathered(g, t, rows) for t in both), rows.ne[0]
        keys, values = (g.heads(t, q.ne[0], n) for t in both)
        o = attention(g, g.permute(q, 0, 2, 1, 3), keys, values, q.ne[0] ** -0.5 if scale is None else scale)
        return self.rotation.of_values(g, o)


def _gathered(g: Graph, t, rows):
    """Gather rows of keys or values as raw words: `get_rows` would convert them to float32, up to seven times the bytes."""
    words = g.expand(g.get_rows(g.rows_as(t, F32, t.nb[1] // 4), rows))
    return g.rows_as(words, t.type, t.ne[0])


class KvCache(Stored):
    """K and V rows of attention layers.

    There is one tensor of words [words of a row, n_rows, slices] per device and row length in bytes, so that a commit moves
    the rows of all its layers at once, without conversion.

    Args:
        device: The first of the devices.
        layers: The attention layers.
        type_: Types of keys and values.
        n_rows: Rows of each layer.
        sides: The side of each layer; empty if all are on `device`.

    Attributes:
        slices: Keys and values of each layer in order, [elements stored of a row, n_rows] each.

    Raises:
        DeviceError: The rows do not fit.
    """

    def __init__(
        self, device: Device, layers: Sequence[KvLayer], type_: KvType, n_rows: int, sides: Sequence[int] = ()
    ) -> None:
        self.device, self.layers, self.type, self.n_rows = device, tuple(layers), type_, n_rows
        # (type, elements of a row, bytes of a row) of each slice
        kinds = [
            (type_of, layer.row, row_bytes(type_of, layer.row))
            for layer in self.layers
            for type_of in (type_.k, type_.v)
        ]
        self.wholes: list = []
        # keys and values of layer 0, of layer 1, ...: stored tensors, and views with the layers' row elements
        self.slices: list = [None] * len(kinds)
        self._rows: list = [None] * len(kinds)
        self._stores: list[Store] = []
        self._on = [device.sides[side] for side in sides] or [device] * len(self.layers)
        self._rotations: dict[Device, Rotations] = {}
        for by in dict.fromkeys(self._on):
            own = [i for i in range(len(kinds)) if self._on[i // 2] is by]
            lengths = sorted({kinds[i][2] for i in own})
            members = [[i for i in own if kinds[i][2] == length] for length in lengths]
            store = Store(by, len(lengths) + 2 * len(own))
            wholes = [
                store.tensor(F32, length // 4, n_rows, len(of), name="kv")
                for length, of in zip(lengths, members)
            ]
            self._stores.append(store.reserve())
            self.wholes += wholes
            for whole, of in zip(wholes, members):
                for at, i in enumerate(of):
                    (type_of, row, _), offset = kinds[i], at * whole.nb[2]
                    self.slices[i] = store.rows_as(whole, type_of, offset, stored_row(type_of, row), n_rows)
                    self._rows[i] = store.rows_as(whole, type_of, offset, row, n_rows)
            dims = [layer.head_dim for layer, on in zip(self.layers, self._on) if on is by]
            self._rotations[by] = rotations = Rotations(by, dims, type_)
            self._stores.append(rotations.store)

    def layer(self, layer: int) -> LayerCache:
        """The cache's layer number `layer`."""
        keys, values = self._rows[2 * layer : 2 * layer + 2]
        rotations = self._rotations[self._on[layer]]
        return LayerCache(keys, values, rotations.of(self.layers[layer].head_dim))

    def close(self) -> None:
        """Free the memory."""
        super().close()
        self.wholes, self.slices, self._rows = [], [], []
