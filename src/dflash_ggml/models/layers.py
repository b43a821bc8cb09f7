"""Layers shared by architectures, as functions over one batch. Shapes in ggml's order; n = columns, D = embedding length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..ggml.bindings import Tensor
from ..ggml.device import F32, I32, NARROW_COLUMNS
from ..ggml.graph import Graph, packed
from ..ggml.operations import MOST_SPANS
from ..state.kv import Visibility
from ..state.memory import padded
from ..state.ring import TILE, RingView
from ..state.spec import Recurrent
from ..state.state import TargetState
from .feed_forward import matmul, matmuls
from .recurrence import ForestRecurrence, Recurrence
from .target import Batch, Reduction

# Rows of a graph from which attention is restricted to the ranges in use: with 120,000 of 131,072 rows in use that is 1.6 times
# as fast. A short sequence would pay 5 us a layer for nothing.
SPANNED = 16384
APPENDED = 512  # columns of a batch that the draft takes in at once


class Columns(Visibility):
    """Inputs of a batch: each column's token, position, cache row and visibility.

    Args:
        name: Prefix of the inputs' names.
    """

    def __init__(self, g: Graph, batch: Batch, name: str = "") -> None:
        self.batch, self.n, self.n_kv = batch, batch.columns, batch.n_kv
        self.is_tree = batch.mask is not None or batch.is_forest
        parts = packed(g, f"{name}ints", *[self.n] * 4, *(() if self.is_tree else (self.n, 2 * self.n)))
        self.ids, self.positions, self.rows, self.parents, *rest = parts
        self.path = rest[0] if rest else None
        self._ranges = g.reshape(rest[1], self.n, 2) if rest else None
        self._seqs = g.input(f"{name}seqs", I32, 3, batch.seqs) if batch.seqs else None
        self.seqs = self._seqs if batch.is_forest else None  # trees of several sequences
        self.gathered: Tensor | None = None  # visible rows, if not the first n_kv
        if batch.window is not None:
            self.gathered, self._mask = batch.window.build(g, self.n)
        elif batch.is_forest:
            ranges = g.input("ranges", I32, self.n, 2)
            # all rows that a sequence's columns see, so that others need not be read
            if batch.seqs <= MOST_SPANS:
                self._spans, self._spanned = g.input("spans", I32, 2, batch.seqs), self._seqs
            self._mask = g.forest_mask(ranges, self.rows, self.parents, self._seqs, self.n_kv)
        elif batch.mask is not None:
            self._mask = batch.mask.build(g, "mask", self.n_kv, self.n, batch.rank)
        else:
            # the GPU's narrow attention needs a mask: computed there from the same ranges, once for all layers
            narrow = g.device.is_gpu and self.n <= NARROW_COLUMNS
            self._mask = g.range_mask(self._ranges, self.n_kv) if narrow else None
        if not batch.is_forest and self.gathered is None and self._mask is not None and self.n_kv >= SPANNED:
            self._spans = g.input(f"{name}span", I32, 2, 1)
            self._spanned = g.input(f"{name}spanned", I32, 3, 1)

    @property
    def parts(self) -> Sequence[Columns]:
        """The parts that attention, recurrent layers and taps process separately."""
        return (self,)

    def cut(self, g: Graph, x: Tensor) -> list[Tensor]:
        """The columns of x [d, n] by part."""
        return [x]

    def join(self, g: Graph, parts: Sequence[Tensor]) -> Tensor:
        """Join the parts of `cut` again, of tensors with columns in dimension 2, the last."""
        return parts[0]

    def recurrence(self, g: Graph, state: TargetState, layer: int) -> Recurrence | ForestRecurrence:
        """The recurrent layer's state for these columns."""
        if self.seqs is not None:
            return ForestRecurrence(g, state, layer, self.parents, self.seqs)
        return Recurrence(g, state, layer, self.parents, self.path, self._seqs)


class Joined(Columns):
    """The columns of a forest followed by a linear batch, in one pass with shared matmuls.

    Args:
        batch: The linear batch, with its `forest`.
    """

    def __init__(self, g: Graph, batch: Batch) -> None:
        assert batch.forest is not None
        self.batch, self.n, self.n_kv = batch, batch.forest.columns + batch.columns, batch.n_kv
        linear = replace(batch, forest=None)
        self._parts = Columns(g, replace(batch.forest, rank=batch.rank)), Columns(g, linear, "chunk ")
        self.ids, self.positions, self.rows = packed(g, "joined", *[self.n] * 3)
        self.is_tree, self.seqs, self.gathered = False, None, None

    @property
    def parts(self) -> Sequence[Columns]:
        """The forest's columns and the linear ones."""
        return self._parts

    def cut(self, g: Graph, x: Tensor) -> list[Tensor]:
        """The columns of x [d, n] by part."""
        forest, linear = (part.n for part in self._parts)
        apart = (x.nb[1],)
        return [g.view(x, (x.ne[0], forest), apart), g.view(x, (x.ne[0], linear), apart, forest * x.nb[1])]

    def join(self, g: Graph, parts: Sequence[Tensor]) -> Tensor:
        """Join the parts of `cut` again, of tensors with columns in dimension 2, the last."""
        return g.concat(parts[0], parts[1], 2)

    def attend(
        self, g: Graph, q: Tensor, keys: Tensor, values: Tensor, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        """See `Columns.attend`; each part sees its own rows."""
        found, first = [], 0
        for part in self._parts:
            own = g.view(q, (q.ne[0], part.n, q.ne[2]), (q.nb[1], q.nb[2]), first * q.nb[1])
            found.append(part.attend(g, own, keys, values, scale, sinks))
            first += part.n
        return self.join(g, found)


def columns_of(g: Graph, batch: Batch) -> Columns:
    """The inputs of a batch; for a linear one with a forest, those of both."""
    return Columns(g, batch) if batch.forest is None else Joined(g, batch)


def ring_views(g: Graph, columns: Columns, state: TargetState) -> dict[int, RingView]:
    """Visibility of a pass's columns in window layers, by window."""
    sizes = columns.n, columns.positions, columns.is_tree, columns.seqs
    return {ring.window: ring.build(g, *sizes) for ring in state.rings}


def ring_view_rows(windows: Sequence[int | None], columns: int) -> int:
    """Most rows that a linear pass of so many columns gathers in a window layer; 0 without such layers."""
    return max((padded(window + TILE + columns, 256) for window in windows if window is not None), default=0)


def pass_bytes(columns: int, rows: int, per_column: int, feature_row: int, more: int = 0) -> int:
    """Estimated scratch memory of a linear pass over `rows` cache rows.

    Args:
        columns: Tokens of the pass.
        rows: Cache rows that they see.
        per_column: Floats of the layers for each column.
        feature_row: Floats of a token's features.
        more: Floats for the whole pass.
    """
    appended = 2 * feature_row * min(columns, APPENDED)
    return 4 * (columns * per_column + appended + more) + 2 * rows * min(columns, NARROW_COLUMNS)


class Taps:
    """Collects the tapped layers' outputs, which the trunk passes in order (see Batch)."""

    def __init__(self, g: Graph, columns: Columns, state: TargetState) -> None:
        self.g, self.batch, self.columns, self.state = g, columns.batch, columns, state
        self._parts = [Taps(g, part, state) for part in columns.parts] if len(columns.parts) > 1 else []
        batch = columns.batch
        self._waiting: list[tuple[int, Tensor]] = []
        self._kept: list = []
        keeps = batch.taps and batch.append is None and (batch.is_forest or not columns.is_tree)
        self._column = g.input("column", I32, columns.n) if keeps and not self._parts else None

    def take(self, layer: int, x: Tensor) -> None:
        """Record the output x [D, n] of a layer, if it is tapped."""
        for part, own in zip(self._parts, self.columns.cut(self.g, x)):
            part.take(layer, own)
        if not self._parts and layer in self.batch.taps:
            self._waiting.append((self.batch.taps.index(layer), x))

    def flush(self) -> None:
        """Flush pending taps. Called once the next layer's matmuls are built, so that the GPU fuses add, norm and conversion for
        them."""
        for part in self._parts:
            part.flush()
        for tap, x in self._waiting:
            if self._column is not None:
                self.state.features.put(self.g, x, tap, self._column)
            elif self.columns.is_tree:
                self.g.expand(self.g.copy(x, self.state.features.columns(self.g, x, tap, self.columns.n)))
            else:
                self._kept.append(x)
        self._waiting.clear()

    def finish(self) -> None:
        """End of the trunk: pass the remaining features to the draft."""
        for part in self._parts:
            part.finish()
        self.flush()
        if not self._kept or self.batch.append is None:
            return
        g, n = self.g, self.columns.n
        # some columns at a time: the concatenated features of a whole batch would be twice its largest tensor
        for first in range(0, n, APPENDED):
            size = min(APPENDED, n - first)
            parts = [g.view(x, (x.ne[0], size), (x.nb[1],), offset=first * x.nb[1]) for x in self._kept]
            c = self.columns
            ints = (g.view(t, (size,), offset=4 * first) for t in (c.ids, c.positions, c.rows))
            self.batch.append(g, g.join(parts, 0), *ints)


def gated_delta_net(
    g: Graph,
    w: Mapping[str, Tensor],
    name: str,
    y: Tensor,
    columns: Columns,
    state: TargetState,
    layer: int,
    shape: Recurrent,
    eps: float,
    grouped: bool = False,
) -> Tensor:
    """Gated delta net (arXiv 2412.06464) behind a short convolution; y [D, n] -> [D, n].

    A tree only reads the committed state, and writes the factors for its commit to `state`; a linear batch advances the state.
    Value head h uses key head h % h_k.

    Args:
        name: Start of the layer's tensor names.
        y: The normed input.
        columns: The batch's columns.
        state: The states of all sequences.
        layer: Number of the layer.
        shape: Sizes of its state.
        eps: Epsilon of its norms.
        grouped: Whether the value heads of a key head are adjacent in the gate and in the output matrix.
    """
    n, s, h_k, h_v = columns.n, shape.delta.dim, shape.delta.k_heads, shape.delta.v_heads
    qkv, z, alpha, beta = matmuls(
        g, w, [name + x for x in ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta")], y
    )
    if columns.is_tree:
        qkv = state.store_conv_inputs(g, qkv, layer)
    for x in (qkv, z, alpha, beta):
        g.expand(x)
    cut = zip(*(columns.cut(g, x) for x in (qkv, alpha, beta)))
    outputs = [
        _delta_rule(g, w, name, inputs, part, state, layer, shape, eps)
        for part, inputs in zip(columns.parts, cut)
    ]
    o = columns.join(g, outputs)
    if grouped and h_v > h_k:
        apart = o.nb[1], h_k * o.nb[1], o.nb[2]
        o = g.permute(g.view(o, (s, h_k, h_v // h_k, n), apart), 0, 2, 1, 3)
        o = g.cont(o, s, h_v, n)
    o = g.rms_norm(o, eps, w[name + "ssm_norm.weight"])
    z = g.silu(g.reshape(z, s, h_v, n))
    return matmul(g, w, name + "ssm_out", g.reshape(g.mul(o, z), s * h_v, n))


def _delta_rule(
    g: Graph,
    w: Mapping[str, Tensor],
    name: str,
    inputs: Sequence,
    columns: Columns,
    state: TargetState,
    layer: int,
    shape: Recurrent,
    eps: float,
):
    """Convolution and delta rule of the columns of one part; inputs: qkv [C, n], alpha and beta [H_v, n] -> [S, H_v, n]."""
    (qkv, alpha, beta), n = inputs, columns.n
    s, h_k, h_v = shape.delta.dim, shape.delta.k_heads, shape.delta.v_heads
    column = 4 * s * (2 * h_k + h_v)

    def gates() -> Sequence[Tensor]:
        rates = g.softplus(g.add(alpha, w[name + "ssm_dt.bias"]))
        found = g.expand(g.mul(rates, w[name + "ssm_a"])), g.expand(g.sigmoid(beta))
        return [g.reshape(t, 1, h_v, n) for t in found]

    # CUDA fuses all up to `beta` (and the commit of a single token) in this order; a composition first computes what it can
    # without the convolution
    fuses = g.device.has_own_kernels
    early = [] if fuses else gates()
    live = columns.recurrence(g, state, layer)
    c = g.expand(g.silu(live.convolve(qkv, w[name + "ssm_conv1d.weight"])))
    # q and k heads are adjacent: one norm for both
    qk = g.expand(g.l2_norm(g.view(c, (s, 2 * h_k, n), (s * 4, column)), eps))
    decay, beta = early or gates()
    live.advance_window(qkv)
    q, k = (g.view(qk, (s, h_k, n), (s * 4, qk.nb[2]), offset=i * s * h_k * 4) for i in (0, 1))
    v = g.view(c, (s, h_v, n), (s * 4, column), offset=2 * s * h_k * 4)
    return live.apply(q, k, v, decay, beta)


def declare_outputs(
    g: Graph,
    w: Mapping[str, Tensor],
    head_name: str,
    x: Tensor,
    eps: float,
    batch: Batch,
    softcap: float = 0.0,
) -> None:
    """Declare the batch's outputs, computed from the residual columns.

    The outputs are `hidden` [D, n], after the norm; else `logits` [n_vocab, n], or of the last column only, and `choice`,
    their argmax; with a reduction also `reduced` [3 k + watched + blocks, n].

    Args:
        head_name: Name of the output matrix.
        x: [D, n].
        eps: Epsilon of the output norm.
        batch: The pass.
        softcap: Soft bound of the logits (see `Graph.softcap`), 0 for none.
    """
    if batch.outputs == "hidden":
        g.output(g.rms_norm(x, eps, w["output_norm.weight"]), "hidden")
        return
    if batch.forest is not None or (batch.mask is None and batch.outputs == "last" and batch.columns > 1):
        last = g.view(x, (x.ne[0], 1), offset=(x.ne[1] - 1) * x.nb[1])
        forest = batch.forest and g.view(x, (x.ne[0], batch.forest.columns))
        x = last if forest is None else g.concat(forest, last, 1)
    x = g.rms_norm(x, eps, w["output_norm.weight"])
    logits = matmul(g, w, head_name.removesuffix(".weight"), x)
    logits = g.output(g.softcap(logits, softcap) if softcap else logits, "logits")
    g.output(g.argmax(logits), "choice")
    reduction = (batch.forest or batch).reduction
    if reduction is not None:
        g.output(reduced_logits(g, logits, reduction), "reduced")


def reduced_logits(g: Graph, logits: Tensor, reduction: Reduction) -> Tensor:
    """The reduction of logits [n_vocab, n], one column each: ids of the k largest as floats, best first | their
    log-probabilities | their logits | watched logits | per block of ids the sum of exp((logit - largest) / temperature).

    Inputs: `temperature` float32 [1], or [1, n] with `each`; `watch` int32 [watched, n], ids. All operations but the first are
    stock; a single one would save four passes over the logits, but be another kernel to maintain.
    """
    n_vocab, n = logits.ne[0], logits.ne[1]
    k = min(reduction.kept, n_vocab)
    best = g.top_k_log_probs(logits, k)
    ids = g.cast(g.view(best, (k, n), (best.nb[2],)), I32)
    ids = g.concat(ids, g.input("watch", I32, reduction.watched, n), 0)
    values = g.reshape(g.get_rows(g.reshape(logits, 1, n_vocab, n), ids), k + reduction.watched, n)
    scaled = g.div(
        g.sub(logits, g.view(values, (1, n), (values.nb[1],))),
        g.input("temperature", F32, 1, n if reduction.each else 1),
    )
    weights, size = g.exp(scaled), reduction.block
    blocks, rest = divmod(n_vocab, size)
    parts = [g.reshape(best, 2 * k, n), values]
    if blocks:
        whole = g.view(weights, (size, blocks, n), (4 * size, weights.nb[1]))
        parts.append(g.reshape(g.sum_rows(whole), blocks, n))
    if rest:
        last = g.view(weights, (rest, n), (weights.nb[1],), offset=4 * size * blocks)
        parts.append(g.sum_rows(last))
    return g.join(parts, 0)
