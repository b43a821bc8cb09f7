"""What a target keeps of a sequence: K/V caches, conv windows, delta-net states, and room for one tree under verification.

The committed state changes in two places only: a linear graph advances it, a commit graph takes in an accepted path. A
tree under verification writes beside it (spare K/V rows, conv inputs, factors, features), so rejecting it costs nothing.
"""

from __future__ import annotations

from typing import Any

from ..ggml.bindings import lib
from ..ggml.device import F32, I32, Device
from ..ggml.graph import Graph
from ..ggml.store import Store
from .features import Features
from .kv import KvCache, LayerCache
from .kv_type import KvType
from .memory import Part, padded
from .spec import StateSpec

_LOWER_CONTEXT = "lower the context (-c; 0 takes what fits)"


class TargetState:
    """Memory of a target for one sequence: the committed state, and room for one tree of `max_width` nodes.

    Layers are asked for by their number in the model.
    """

    def __init__(
        self, device: Device, spec: StateSpec, kv_type: KvType, n_rows: int, max_width: int, feature_row: int
    ) -> None:
        """`n_rows` K/V rows, of types `kv_type`; `max_width` 0 leaves the tree's memory out (plain decoding);
        `feature_row`: elements that the draft wants of each node."""
        self.device, self.spec, self.max_width = device, spec, max_width
        self.kv = KvCache(device, spec.kv, kv_type, n_rows)
        n = len(spec.recurrent)
        self._live = Store(device, 2 + 2 * n)
        self._tree = Store(device, 2)
        self.windows: Any = None
        self.deltas: Any = None
        self.all_factors: Any = None
        self.conv_inputs: Any = None
        self._window: list = []
        self._delta: list = []
        if n:
            conv, delta = spec.recurrent[0].conv, spec.recurrent[0].delta
            window, state = (conv.kernel - 1, conv.channels), (delta.dim, delta.dim, delta.v_heads)
            self.windows = self._live.tensor(F32, *window, n, name="conv windows")
            self.deltas = self._live.tensor(F32, *state, n, name="delta states")
            self._window = [self._live.view(self.windows, i * self.windows.nb[2], *window) for i in range(n)]
            self._delta = [self._live.view(self.deltas, i * self.deltas.nb[3], *state) for i in range(n)]
            self._live.allocate()
            if max_width:
                self.all_factors = self._tree.tensor(F32, delta.factors, max_width, n, name="factors u|k|G")
                self.conv_inputs = self._tree.tensor(F32, conv.channels, max_width, n, name="conv inputs")
                self._tree.allocate()
        self.features = Features(device, feature_row, max_width)

    def cache(self, layer: int) -> LayerCache:
        """Keys and values of an attention layer."""
        return self.kv.layer(self.spec.place[layer])

    def window(self, layer: int):
        """Conv window of a recurrent layer [K-1, channels], oldest input first."""
        return self._window[self.spec.place[layer]]

    def delta(self, layer: int):
        """Delta-net state of a recurrent layer [S, S, H_v], key dimension contiguous."""
        return self._delta[self.spec.place[layer]]

    def land_conv_inputs(self, g: Graph, x, layer: int):
        """Let the conv inputs `x` [channels, n] of a tree's nodes be computed where the commit finds them."""
        return g.land(x, self.conv_inputs, self.spec.place[layer])

    def factors(self, g: Graph, layer: int, columns: int):
        """Where the factors of a tree's nodes go, of one recurrent layer [factors, columns]."""
        return g.slice(self.all_factors, self.spec.place[layer], columns)

    def reset(self) -> None:
        """Forget the sequence. K/V rows stay as they are: masks hide them."""
        self.device.synchronize()  # clearing does not wait for a commit that a GPU is still at
        if self.windows is not None:
            lib.ggml_backend_buffer_clear(self.windows.buffer, 0)

    @property
    def live_tensors(self) -> list:
        """The recurrent state, whole: what a snapshot must copy besides K/V rows."""
        return [] if self.windows is None else [self.windows, self.deltas]

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes by part."""
        return {
            "target K/V": self.kv.nbytes,
            "recurrent state": self._live.nbytes,
            "tree": self._tree.nbytes + self.features.nbytes,
        }

    def close(self) -> None:
        self.kv.close()
        self._live.close()
        self._tree.close()
        self.features.close()


def state_parts(spec: StateSpec, unit: int, kv_type: KvType, max_width: int, feature_row: int) -> list[Part]:
    """What a TargetState of these arguments takes, for the memory plan. `unit`: the device's alignment in bytes."""
    n, parts = (
        len(spec.recurrent),
        [Part("target K/V", lambda rows: spec.kv_bytes(rows, kv_type), _LOWER_CONTEXT)],
    )
    tree = padded(4 * feature_row * max_width, unit)
    if n:
        conv, delta = spec.recurrent[0].conv, spec.recurrent[0].delta
        live = padded(4 * (conv.kernel - 1) * conv.channels * n, unit)
        live += padded(4 * delta.dim**2 * delta.v_heads * n, unit)
        parts.append(Part("recurrent state", lambda rows: live))
        tree += sum(padded(4 * size * max_width * n, unit) for size in (delta.factors, conv.channels))
    return [*parts, Part("tree", lambda rows: tree, "lower the budget (--budget)")]


def commit_graph(device: Device, state: TargetState, max_path: int, move_rows: bool) -> Graph:
    """Graph that commits an accepted path of up to `max_path` nodes, all layers at once.

    Inputs: with recurrent layers path = node indices, root first, -1 beyond the end; with `move_rows` also from0, from1, ... (one
    per tensor of `KvCache.wholes`) and to: cache rows int32 [max_path] (from repeated per slice) that bring the path's K/V into
    sequence order. A row copies itself when unused. Rows are moved as words, so that none is rounded again.
    """
    g = Graph(device, 64)
    if state.windows is not None:
        path = g.input("path", I32, max_path)
        g.expand(g.ssm_conv_tree_commit(state.windows, state.conv_inputs, path))
        g.expand(g.gated_delta_net_tree_commit(state.deltas, state.all_factors, path))
    if move_rows:
        sources = [g.input(f"from{i}", I32, max_path, whole.ne[2]) for i, whole in enumerate(state.kv.wholes)]
        target = g.input("to", I32, max_path)
        for whole, source in zip(state.kv.wholes, sources):
            g.expand(g.set_rows(whole, g.get_rows(whole, source), target))
    return g
