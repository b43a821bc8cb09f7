"""A recurrent layer's state in one pass: a tree's nodes read it, a linear batch advances it.

With state indices, an input selects the sequences' states, so that one graph serves all of them.
"""

from __future__ import annotations

from typing import Any

from ..ggml.bindings import Tensor
from ..ggml.graph import Graph
from ..state.state import TargetState


class Recurrence:
    """Conv window and delta-net state of layer number `layer`. S = state's dimension, C = channels, n = columns."""

    def __init__(self, g: Graph, state: TargetState, layer: int, parents, path, seqs) -> None:
        """Take the layer's state for a batch of one sequence.

        Args:
            state: The states of all sequences.
            layer: Number of the layer.
            parents: int32 [n], the parent of each column.
            path: int32 [n], 0, 1, ..., for a linear batch; None for a tree.
            seqs: See `Batch`; None for a sequence in the first state index.
        """
        self.g, self.state, self.layer, self.parents, self.path = g, state, layer, parents, path
        self.window, self.delta = state.window(layer), state.delta(layer)
        self._state_index: Any = None
        self._inputs: Any = None  # window and columns [K-1 + n, C], where ggml's own convolution serves
        if seqs is not None:
            self._state_index = g.view(seqs, (1,))
            self._windows, self._deltas = state.all_states(g, layer)
            shapes = (t.ne[0:3] for t in (self.window, self.delta))
            rows = (g.get_rows(t, self._state_index) for t in (self._windows, self._deltas))
            self.window, self.delta = (g.expand(g.reshape(t, *ne)) for t, ne in zip(rows, shapes))

    def convolve(self, x: Tensor, kernel: Tensor) -> Tensor:
        """The short convolution of x [C, n] after the window; kernel [K, C] -> [C, n]."""
        g = self.g
        if self.path is None or g.device.has_own_kernels:
            return g.ssm_conv_tree(self.window, x, kernel, self.parents)
        self._inputs = g.concat(self.window, g.transpose(x), 0)
        return g.ssm_conv(self._inputs, kernel)

    def advance_window(self, x: Tensor) -> None:
        """For a linear batch, update the window with the inputs x [C, n]."""
        if self.path is None:
            return
        g = self.g
        if self._inputs is None:
            window = g.expand(g.ssm_conv_tree_commit(self.window, x, self.path))
        else:
            last, apart = self.window.ne[0:2], self._inputs.nb[1]
            window = g.expand(g.copy(g.view(self._inputs, last, (apart,), offset=4 * x.ne[1]), self.window))
        if self._state_index is not None:
            g.expand(g.set_rows(self._windows, g.reshape(window, self._windows.ne[0], 1), self._state_index))

    def apply(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """The gated delta rule: q and k [S, H_k, n], v [S, H_v, n], decay and beta [1, H_v, n] -> [S, H_v, n].

        A tree stores its nodes' factors in the state, a linear batch advances it."""
        g, (s, h_v, n) = self.g, v.ne[0:3]
        if self.path is None:
            factors = self.state.factors(g, self.layer, n)
            return g.gated_delta_net_tree_persist(q, k, v, decay, beta, self.delta, factors, self.parents)[0]
        out = g.gated_delta_net(q, k, v, decay, beta, self.delta)
        # flat, so that a GPU writes the state in place instead of copying it
        size = s * s * h_v
        after = g.view(out, (size,), offset=s * h_v * n * 4)
        if self._state_index is None:
            g.expand(g.copy(after, g.view(self.delta, (size,))))
        else:
            g.expand(g.set_rows(self._deltas, g.reshape(after, size, 1), self._state_index))
        return g.view(out, (s, h_v, n))


class ForestRecurrence:
    """`Recurrence` for trees of several sequences, each with its state index, in n columns."""

    path = None

    def __init__(self, g: Graph, state: TargetState, layer: int, parents, seqs) -> None:
        """Take the layer's states for trees of several sequences.

        Args:
            state: The states of all sequences.
            layer: Number of the layer.
            parents: int32 [n], counted from the first column of each tree.
            seqs: See `Batch`.
        """
        self.g, self.state, self.layer, self.parents, self.seqs = g, state, layer, parents, seqs
        windows, deltas = state.all_states(g, layer)
        (k, c), (s, _, h) = state.window(layer).ne[0:2], state.delta(layer).ne[0:3]
        n_states, apart = state.n_states, (windows.nb[1], deltas.nb[1])
        self.windows = g.view(windows, (k, c, n_states), (4 * k, apart[0]))
        self.deltas = g.view(deltas, (s, s, h, n_states), (4 * s, 4 * s * s, apart[1]))
        self.rows_of_deltas = g.view(deltas, (s, s * h, n_states), (4 * s, apart[1]))

    def convolve(self, x: Tensor, kernel: Tensor) -> Tensor:
        """See Recurrence."""
        return self.g.ssm_conv_tree(self.windows, x, kernel, self.parents, self.seqs)

    def advance_window(self, x: Tensor) -> None:
        """Update the windows of sequences of one column."""
        self.g.expand(self.g.ssm_conv_tree_commit(self.windows, x, None, self.seqs))

    def apply(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """See Recurrence; sequences of one column are advanced."""
        g, factors = self.g, self.state.factors(self.g, self.layer, v.ne[2])
        sources = q, k, v, decay, beta, self.deltas, factors, self.parents, self.seqs
        o, factors = g.gated_delta_net_tree_persist(*sources)
        g.expand(g.gated_delta_net_tree_commit(self.rows_of_deltas, factors, None, self.seqs))
        return o
