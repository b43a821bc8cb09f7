"""State of a target's sequences: K/V caches, conv windows, delta-net states, and buffers for the trees of one pass.

Only two graphs change the committed state: a linear graph advances it, a commit graph applies an accepted path. A tree
pass writes outside of it (spare K/V rows, conv inputs, factors, features), so rejecting it costs nothing.

The recurrent state of a sequence is contiguous under its state index: a snapshot is one copy instead of 96 by layer, and graphs
for state index 0 are those of an engine for one sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from copy import copy
from itertools import islice
from typing import Any

from ..ggml.bindings import Tensor, lib
from ..ggml.device import F32, I32, Device
from ..ggml.graph import Graph
from ..ggml.mailboxes import Mailboxes, mailbox_words
from ..ggml.store import Store, Stored
from .kv import KvCache, LayerCache
from .kv_type import KvType
from .memory import ADVICE, Part, padded
from .ring import Ring, ring_rows
from .spec import KvLayer, Recurrent, StateSpec

SPARE = 8  # rows for the padding of a pass: `verify_width` adds at most 7 columns
_FEWER = "decode fewer sequences in a batch (--parallel)"
_LOWER_CONTEXT = "lower the context (-c; 0 takes what fits)"


class Features(Stored):
    """Features of the target's tapped layers, kept until the draft takes them in; empty without a draft that needs them.

    Each of `width` columns holds those of one token, [taps * D], `row` float32: a tree's node has the column of its index, a
    plain step uses one that no unseen token occupies.
    """

    def __init__(self, device: Device, row: int, width: int) -> None:
        self.width = width if row else 0
        self.tensor: Any = None
        if self.width:
            store = Store(device, 1)
            self._stores = [store]
            self.tensor = store.tensor(F32, row, width, name="features")
            store.allocate()

    def columns(self, g: Graph, x: Tensor, tap: int, n: int) -> Tensor:
        """View [D, n] of tap number `tap` in the first n columns."""
        d = x.ne[0]
        return g.view(self.tensor, (d, n), (self.tensor.nb[1],), offset=tap * d * 4)

    def put(self, g: Graph, x: Tensor, tap: int, column: Tensor) -> Tensor:
        """Write the rows x [D, n] of tap number `tap` to the columns that the int32 tensor `column` [n] names."""
        d = x.ne[0]
        home = g.view(self.tensor, (d, self.width), (self.tensor.nb[1],), offset=tap * d * 4)
        return g.expand(g.set_rows(home, x, column))

    def free(self, taken: Collection[int], n: int) -> list[int]:
        """n columns that are not in `taken`, or as many as there are."""
        first = len(taken)  # columns are used cyclically
        if n == 1 and first < self.width and first not in taken:
            return [first]
        return list(islice((column for column in range(self.width) if column not in taken), n))


class TargetState:
    """Memory of a target for `n_states` sequences: their committed states, and trees of `max_width` nodes in total.

    Methods take a layer's number in the model; each of several ranks has a view of its own layers (`of_rank`).
    """

    def __init__(
        self,
        device: Device,
        spec: StateSpec,
        kv_type: KvType,
        n_rows: int,
        max_width: int,
        feature_row: int,
        n_states: int = 1,
        n_batch: int = 0,
        draft_device: Device | None = None,
    ) -> None:
        """Allocate the state of a target.

        Args:
            device: The first of the devices.
            spec: The target's layers.
            kv_type: Types of the K/V caches.
            n_rows: K/V rows of layers with full attention.
            max_width: Columns of the widest tree; 0: no memory for trees (plain decoding).
            feature_row: Feature elements per node for the draft.
            n_states: Sequences.
            n_batch: Tokens of a prefill batch, for the layers with a window.
            draft_device: The side with the features (None: the first).

        Raises:
            DeviceError: It does not fit.
        """
        self.device, self.spec, self.max_width, self.n_states = device, spec, max_width, n_states
        # further rows are padding of passes, never read
        spare = SPARE if n_states > 1 else 0
        layers = spec.with_window(None)
        self.kv = KvCache(device, layers.kv, kv_type, n_rows + spare, layers.sides)
        columns = max(n_batch, max_width, 1)
        self.rings = []
        for i, window in enumerate(spec.windows):
            layers, rows = spec.with_window(window), ring_rows(window, columns, n_rows)
            self.rings.append(Ring(device, f"ring{i}", layers.kv, kv_type, rows, n_states, layers.sides))
        self.rank = 0
        self.mailboxes = Mailboxes(device.sides[: spec.n_ranks]) if spec.n_ranks > 1 else None
        # of each side with recurrent layers
        self.recurrent = {
            side: LayerStates(device.sides[side], spec.on(side).recurrent, n_states, max_width)
            for side in sorted(set(spec.sides) or {0})
            if spec.on(side).recurrent
        }
        # unseen features of some sequences wait while others' trees are verified
        self.features = Features(draft_device or device, feature_row, max_width * (2 if n_states > 1 else 1))

    def of_rank(self, rank: int) -> TargetState:
        """The view of one rank."""
        view = copy(self)
        view.rank = rank
        return view

    def summed(self, g: Graph, y: Tensor) -> Tensor:
        """The sum of all ranks' parts of a layer's output, given one rank's part `y`; y itself with one rank."""
        return y if self.mailboxes is None else g.all_reduce(y, self.mailboxes.tensors[self.rank])

    def _number(self, layer: int) -> int:
        """A layer's number among those of all ranks."""
        return layer + self.rank * (len(self.spec.layers) // self.spec.n_ranks)

    def _kind_index(self, layer: int) -> int:
        return self.spec.kind_index[self._number(layer)]

    def cache(self, layer: int) -> LayerCache:
        """Keys and values of an attention layer: in a ring if it has a window."""
        of = self.spec.layers[self._number(layer)]
        assert isinstance(of, KvLayer)
        whole = self.kv if of.window is None else self.rings[self.spec.windows.index(of.window)].cache
        return whole.layer(self._kind_index(layer))

    @property
    def caches(self) -> list[tuple[str, KvCache]]:
        """All K/V caches, with the prefix of a commit's input names for each."""
        return [("", self.kv), *((f"{ring.name}_", ring.cache) for ring in self.rings)]

    def window(self, layer: int) -> Tensor:
        """Conv window of a recurrent layer [K-1, channels] in state index 0, oldest input first."""
        return self._states_of(layer).window[self._kind_index(layer)]

    def delta(self, layer: int) -> Tensor:
        """Delta-net state of a recurrent layer [S, S, H_v] in state index 0, key dimension contiguous."""
        return self._states_of(layer).delta[self._kind_index(layer)]

    def _states_of(self, layer: int) -> LayerStates:
        return self.recurrent[self.spec.side(self._number(layer))]

    def all_states(self, g: Graph, layer: int) -> tuple[Tensor, Tensor]:
        """Conv windows [(K-1) * channels, n_states] and delta-net states [S * S * H_v, n_states] of a recurrent layer, views."""
        of, at = self._states_of(layer), self._kind_index(layer)
        whole = (of.windows, of.windows.nb[2]), (of.deltas, of.deltas.nb[3])
        windows, deltas = (
            g.view(t, (size // 4, self.n_states), (len(of.window) * size,), offset=at * size)
            for t, size in whole
        )
        return windows, deltas

    def store_conv_inputs(self, g: Graph, x: Tensor, layer: int) -> Tensor:
        """Store the conv inputs `x` [channels, n] of a tree's nodes for the commit."""
        return g.compute_into(x, self._states_of(layer).conv_inputs, self._kind_index(layer))

    def factors(self, g: Graph, layer: int, columns: int) -> Tensor:
        """Destination of the factors of a tree's nodes in one recurrent layer, [factors, columns]."""
        return g.slice(self._states_of(layer).factors, self._kind_index(layer), columns)

    def reset(self, state_index: int = 0) -> None:
        """Clear the recurrent state of a state index. K/V rows stay: masks hide them."""
        self.device.synchronize()  # clearing does not wait for a commit still running on a GPU
        if self.n_states > 1:
            for t in self.live(state_index):
                lib.ggml_backend_tensor_memset(t, 0, 0, lib.ggml_nbytes(t))
            return
        for of in self.recurrent.values():
            lib.ggml_backend_buffer_clear(of.windows.buffer, 0)

    def live_parts(self, state_index: int = 0) -> list[list]:
        """The recurrent state of a state index, which snapshots copy besides K/V rows: conv windows and delta-net states of all
        layers in order, each as one tensor per side that has some."""
        return [list(t) for t in zip(*(of.by_index[state_index] for of in self.recurrent.values()))]

    def live(self, state_index: int = 0) -> list[Tensor]:
        """`live_parts` as one list."""
        return [t for part in self.live_parts(state_index) for t in part]

    def nbytes_on(self, side: Device) -> dict[str, int]:
        """Bytes by part on a side."""
        own = [of for of in self.recurrent.values() if of.device is side]
        mailbox = {"mailbox": self.mailboxes.nbytes_on(side)} if self.mailboxes else {}
        return {
            "target K/V": sum(cache.nbytes_on(side) for _, cache in self.caches),
            "recurrent state": sum(of.live.nbytes for of in own),
            "tree": sum(of.tree.nbytes for of in own) + self.features.nbytes_on(side),
            **mailbox,
        }

    def close(self) -> None:
        """Free the memory."""
        self.kv.close()
        for ring in self.rings:
            ring.close()
        for of in self.recurrent.values():
            of.close()
        self.features.close()
        if self.mailboxes is not None:
            self.mailboxes.close()


class LayerStates(Stored):
    """Conv windows and delta-net states of the recurrent layers on one device, and the buffers from a tree to its commit.

    Attributes:
        windows, deltas: Of all state indices, [K-1, channels, ...] and [S, S, H_v, ...].
        window, delta: By layer, in state index 0.
        by_index: By state index, windows and states of all layers.
        factors, conv_inputs: Of the nodes of trees, by layer; None without trees.
    """

    def __init__(self, device: Device, layers: Sequence[Recurrent], n_states: int, max_width: int) -> None:
        self.device, n = device, len(layers)
        conv, delta = layers[0].conv, layers[0].delta
        self.live = Store(device, 2 + 2 * n + 2 * n_states)
        self.tree = Store(device, 2)
        self._stores = self.live, self.tree
        window, state = (conv.kernel - 1, conv.channels), (delta.dim, delta.dim, delta.v_heads)
        self.windows = self.live.tensor(F32, *window, n * n_states, name="conv windows")
        self.deltas = self.live.tensor(F32, *state, n * n_states, name="delta states")
        a_window, a_state = self.windows.nb[2], self.deltas.nb[3]
        self.window = [self.live.view(self.windows, i * a_window, *window) for i in range(n)]
        self.delta = [self.live.view(self.deltas, i * a_state, *state) for i in range(n)]
        self.by_index = [
            (
                self.live.view(self.windows, i * n * a_window, *window, n),
                self.live.view(self.deltas, i * n * a_state, *state, n),
            )
            for i in range(n_states)
        ]
        self.live.allocate()
        self.factors: Any = None
        self.conv_inputs: Any = None
        if max_width:
            self.factors = self.tree.tensor(F32, delta.factors, max_width, n, name="factors u|k|G")
            self.conv_inputs = self.tree.tensor(F32, conv.channels, max_width, n, name="conv inputs")
            self.tree.allocate()

    def every(self, g: Graph) -> tuple[Tensor, Tensor]:
        """Windows [K-1, channels, n_states, layers] and states [S, S * H_v, n_states, layers], views."""
        (k, c, layers), s, n = self.by_index[0][0].ne[0:3], self.deltas.ne[0], len(self.by_index)
        a_window, a_delta = self.windows.nb[2], self.deltas.nb[3]
        windows = g.view(self.windows, (k, c, n, layers), (4 * k, layers * a_window, a_window))
        shape = s, a_delta // (4 * s), n, layers
        return windows, g.view(self.deltas, shape, (4 * s, layers * a_delta, a_delta))


def state_parts(
    spec: StateSpec,
    unit: int,
    kv_type: KvType,
    max_width: int,
    feature_row: int,
    n_states: int = 1,
    n_batch: int = 0,
) -> list[Part]:
    """Memory parts of a TargetState with these arguments, for the memory plan.

    Args:
        unit: The device's alignment in bytes.
    """
    spare = SPARE if n_states > 1 else 0
    columns = max(n_batch, max_width, 1)

    def kv_bytes(rows: int) -> int:
        rings = (
            spec.with_window(w).kv_bytes(n_states * ring_rows(w, columns, rows), kv_type)
            for w in spec.windows
        )
        return spec.with_window(None).kv_bytes(rows + spare, kv_type) + sum(rings)

    n, parts = len(spec.recurrent), [Part("target K/V", kv_bytes, _LOWER_CONTEXT)]
    tree = padded(4 * feature_row * max_width * (2 if n_states > 1 else 1), unit)
    if n:
        conv, delta = spec.recurrent[0].conv, spec.recurrent[0].delta
        live = padded(4 * (conv.kernel - 1) * conv.channels * n * n_states, unit)
        live += padded(4 * delta.dim**2 * delta.v_heads * n * n_states, unit)
        parts.append(Part("recurrent state", lambda rows: live, _FEWER if n_states > 1 else ADVICE))
        tree += sum(padded(4 * size * max_width * n, unit) for size in (delta.factors, conv.channels))
    if spec.n_ranks > 1:
        parts.append(Part("mailbox", lambda rows: padded(8 * mailbox_words(), unit)))
    return [*parts, Part("tree", lambda rows: tree, "lower the budget (--budget)")]


def commit_graph(
    device: Device, state: TargetState, max_path: int, moved: int, is_forest: bool = False
) -> Graph:
    """Graph that commits an accepted path of up to `max_path` nodes of the sequence in state index 0, all layers at once.

    Inputs: with recurrent layers path = node indices, root first, -1 beyond the end; with `moved` also from0, from1, ... (one
    per tensor of `KvCache.wholes`) and to: cache rows int32 [moved] (from repeated per slice) that bring the path's K/V into
    sequence order; the same for each ring, with prefixes `ring0_`, `ring1_`, .... Unused entries copy a row to itself. Rows are
    moved as raw words, without rounding.

    For a forest there are paths of several sequences: path [max_path, n_states], one for each entry of `seqs` (see Batch),
    counted from the sequence's first column; from0, ... and to are those of all sequences.
    """
    # a layer's composed delta net takes up to 36 nodes
    g, n = Graph(device, 64 + 40 * len(state.spec.recurrent)), state.n_states if is_forest else 1
    path = g.input("path", I32, max_path, n) if state.recurrent else None
    seqs = g.input("seqs", I32, 3, n) if state.recurrent and is_forest else None
    for of in state.recurrent.values():
        windows, deltas = of.every(g) if is_forest else of.by_index[0]
        g.expand(g.ssm_conv_tree_commit(windows, of.conv_inputs, path, seqs))
        g.expand(g.gated_delta_net_tree_commit(deltas, of.factors, path, seqs))
    if moved:
        _move_rows(g, state, moved)
    return g


def _move_rows(g: Graph, state: TargetState, n: int) -> None:
    """Move n cache rows of all layers, from the inputs from0, from1, ... to the input `to`; rings have inputs of their own."""
    for prefix, cache in state.caches:
        sources = [g.input(f"{prefix}from{i}", I32, n, t.ne[2]) for i, t in enumerate(cache.wholes)]
        target = g.input(f"{prefix}to", I32, n)
        for whole, source in zip(cache.wholes, sources):
            g.expand(g.set_rows(whole, g.get_rows(whole, source), target))


def move_graph(device: Device, caches: Iterable[Tensor], n: int) -> Graph:
    """Graph that copies n rows of each cache [row, n_rows] from the input `from`, int32 [n], to `to`.

    Rows are copied as raw words, without rounding. All rows of a cache are read before the first is written, so the ranges may
    overlap.
    """
    caches = list(caches)
    g = Graph(device, 4 * len(caches) + 2)
    source, target = g.input("from", I32, n), g.input("to", I32, n)
    for t in caches:
        words = g.rows_as(t, F32, t.nb[1] // 4)
        g.expand(g.set_rows(words, g.get_rows(words, source), target))
    return g
