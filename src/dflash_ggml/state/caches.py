"""What a sequence leaves in memory: K/V caches, conv windows, delta-net states, tapped features, and how a tree is committed.

The committed state changes in two places only: a linear graph advances it, a commit graph takes in an accepted path. A
tree under verification writes beside it (spare K/V rows, conv inputs, factors, features), so rejecting it costs nothing.
"""

from __future__ import annotations

import numpy as np

from ..drafts.dflash.params import DraftParams
from ..errors import DeviceError
from ..ggml.bindings import lib
from ..ggml.device import F16, F32, I32, Device, Store
from ..ggml.graph import Graph
from ..models.qwen35_params import TargetParams

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
    """K and V rows of several attention layers in one tensor [row, n_rows, 2 * layers]; grown when needed."""

    def __init__(self, device: Device, row: int, layers: int, type_: int, n_rows: int) -> None:
        self.device, self.row, self.layers, self.type, self.n_rows = device, row, layers, type_, 0
        self._store: Store | None = None
        self._slices: list = []
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
        store = Store(self.device, 1 + 2 * self.layers)
        self.whole = store.tensor(self.type, self.row, n_rows, 2 * self.layers, name="kv")
        slices = [
            store.view(self.whole, i * self.whole.nb[2], self.row, n_rows) for i in range(2 * self.layers)
        ]
        try:
            store.allocate()
        except DeviceError:
            store.close()
            raise
        self._store, self._slices, self.n_rows = store, slices, n_rows

    def keys(self, layer: int):
        """Keys of one layer [row, n_rows]."""
        return self._slices[2 * layer]

    def values(self, layer: int):
        """Values of one layer [row, n_rows]."""
        return self._slices[2 * layer + 1]

    @property
    def nbytes(self) -> int:
        return self._store.nbytes if self._store else 0

    def close(self) -> None:
        if self._store:
            self._store.close()
            self._store, self._slices, self.n_rows = None, [], 0


class TargetState:
    """Memory of the target for one sequence: the committed state, and room for one tree of `max_width` nodes."""

    def __init__(
        self, device: Device, p: TargetParams, kv_type: str, n_rows: int, max_width: int, n_taps: int
    ) -> None:
        """`n_rows` K/V rows to begin with; `max_width` 0 leaves the tree's memory out (plain decoding)."""
        self.p, self.max_width = p, max_width
        self._n_delta = sum(p.recurrent)
        self.kv = KvCache(
            device, p.n_kv_heads * p.head_dim, p.n_layers - self._n_delta, KV_TYPES[kv_type], n_rows
        )
        s, h_v, channels = p.ssm_state, p.ssm_v_heads, p.conv_channels
        self._live = Store(device, 2 + 2 * self._n_delta)
        self.windows = self._live.tensor(F32, p.conv_kernel - 1, channels, self._n_delta, name="conv windows")
        self.deltas = self._live.tensor(F32, s, s, h_v, self._n_delta, name="delta states")
        self._window = [
            self._live.view(self.windows, i * self.windows.nb[2], p.conv_kernel - 1, channels)
            for i in range(self._n_delta)
        ]
        self._delta = [
            self._live.view(self.deltas, i * self.deltas.nb[3], s, s, h_v) for i in range(self._n_delta)
        ]
        self._live.allocate()
        self._tree = Store(device, 3)
        if max_width:
            row = s * h_v + s * p.ssm_k_heads + h_v
            self.all_factors = self._tree.tensor(F32, row, max_width, self._n_delta, name="factors u|k|G")
            self.conv_inputs = self._tree.tensor(F32, channels, max_width, self._n_delta, name="conv inputs")
            self.features = self._tree.tensor(F32, max(n_taps, 1) * p.n_embd, max_width, name="features")
            self._tree.allocate()

    def keys(self, layer: int):
        return self.kv.keys(layer)

    def values(self, layer: int):
        return self.kv.values(layer)

    def window(self, layer: int):
        """Conv window of one delta-net layer [K-1, channels], oldest input first."""
        return self._window[layer]

    def delta(self, layer: int):
        """State of one delta-net layer [S, S, H_v], key dimension contiguous."""
        return self._delta[layer]

    def reset(self) -> None:
        """Forget the sequence. K/V rows stay as they are: masks hide them."""
        self.kv.device.synchronize()  # clearing does not wait for a commit that a GPU is still at
        lib.ggml_backend_buffer_clear(self.windows.buffer, 0)

    @property
    def live_tensors(self) -> list:
        """The recurrent state, whole: what a snapshot must copy besides K/V rows."""
        return [self.windows, self.deltas]

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes by part."""
        return {"kv": self.kv.nbytes, "recurrent": self._live.nbytes, "tree": self._tree.nbytes}

    def close(self) -> None:
        self.kv.close()
        self._live.close()
        self._tree.close()


class DraftState:
    """The draft's context K/V: one row per committed token, then spare rows for the block and for unused appends."""

    def __init__(self, device: Device, p: DraftParams, kv_type: str, n_rows: int) -> None:
        self.p = p
        self.kv = KvCache(device, p.n_kv_heads * p.head_dim, p.n_layers, KV_TYPES[kv_type], n_rows)

    def keys(self, layer: int):
        return self.kv.keys(layer)

    def values(self, layer: int):
        return self.kv.values(layer)

    @property
    def spare_row(self) -> int:
        """First of the `block_size` rows that take appends nobody reads."""
        return self.kv.n_rows - self.p.block_size

    def close(self) -> None:
        self.kv.close()


def commit_graph(device: Device, state: TargetState, max_path: int, move_rows: bool) -> Graph:
    """Graph that commits an accepted path of up to `max_path` nodes, all layers at once.

    Inputs: path = node indices, root first, -1 beyond the end; with `move_rows` also from and to: cache rows int32
    [max_path] (from repeated per layer) that bring the path's K/V into sequence order. A row copies itself when unused.
    """
    g = Graph(device, 64)
    path = g.input("path", I32, max_path)
    g.expand(g.ssm_conv_tree_commit(state.windows, state.conv_inputs, path))
    g.expand(g.gated_delta_net_tree_commit(state.deltas, state.all_factors, path))
    if move_rows:
        whole = state.kv.whole
        source = g.input("from", I32, max_path, whole.ne[2])
        target = g.input("to", I32, max_path)
        g.expand(g.set_rows(whole, g.get_rows(whole, source), target))
    return g
