"""The operations of a graph as methods, with their shapes.

Shapes are in ggml's order, dimension 0 contiguous. ggml aborts the process on a bad shape, so shapes are checked here. Our own
operations are composed of ggml's on devices without kernels for them (`stock`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any, NamedTuple

from ..errors import DeviceError
from . import stock
from .bindings import Tensor, ffi, lib
from .device import Device

MOST_SPANS = 32  # sequences whose ranges of rows attention accepts


class Yarn(NamedTuple):
    """YaRN: rotary positions extended by `factor` beyond the original training's `n_ctx` (arXiv 2309.00071).

    Attributes:
        attention: Factor on rotated queries and keys.
        fast, slow: Rotations within n_ctx above which a pair is kept, and below which it is interpolated.
    """

    factor: float
    n_ctx: int
    attention: float
    fast: float = 32.0
    slow: float = 1.0


class Operations:
    """Each adds a node to the graph that `ctx` holds and returns its tensor."""

    ctx: Any
    device: Device
    expand: Callable[..., Any]  # Graph.expand
    aligned: Callable[
        ..., Any
    ]  # Graph.aligned: a view of an input at an offset that the device's kernels support

    def _own(self, node, composition: Callable[..., Any], *sources):
        """`node`, an operation of our own, or its composition if the device does not support it."""
        return composition(self, *sources) if stock.is_composed(self.device, node) else node

    # ---- views and layout

    def view(self, t: Tensor, ne: tuple[int, ...], strides: tuple[int, ...] = (), offset: int = 0) -> Tensor:
        """View of `t` with shape `ne`; `strides` of dimensions 1.. and `offset` in bytes (default: contiguous)."""
        n0, n1, n2, n3 = (*ne, 1, 1, 1)[:4]
        row = lib.ggml_row_size(t.type, n0)
        nb1, nb2, nb3, *_ = (*strides, None, None, None)
        nb1 = row if nb1 is None else nb1
        nb2 = nb1 * n1 if nb2 is None else nb2
        nb3 = nb2 * n2 if nb3 is None else nb3
        last = offset + (n1 - 1) * nb1 + (n2 - 1) * nb2 + (n3 - 1) * nb3 + row
        if last > lib.ggml_nbytes(t):
            raise ValueError(
                f"view {ne} at {offset} leaves tensor '{ffi.string(t.name).decode()}' of shape {tuple(t.ne)}"
            )
        return lib.ggml_view_4d(self.ctx, t, n0, n1, n2, n3, nb1, nb2, nb3, offset)

    def slice(self, t: Tensor, index: int, columns: int) -> Tensor:
        """The first `columns` columns of slice `index` of t [d, max columns, slices], as a view [d, columns]."""
        return self.view(t, (t.ne[0], columns), (t.nb[1],), offset=index * t.nb[2])

    def heads(self, t: Tensor, head_dim: int, rows: int) -> Tensor:
        """The first `rows` cache rows of t [heads * head_dim, n_rows] per head: a view [head_dim, rows, heads]."""
        strides = (t.nb[1], lib.ggml_row_size(t.type, head_dim))
        return self.view(t, (head_dim, rows, t.ne[0] // head_dim), strides)

    def rows_as(self, t: Tensor, type_: int, row: int) -> Tensor:
        """View [row, rows] of the rows of `t` [.., rows], reinterpreted as `row` elements of another type."""
        if lib.ggml_row_size(type_, row) > t.nb[1]:
            raise ValueError(f"rows of {t.nb[1]} bytes have no room for {row} such elements")
        apart = t.nb[1], t.nb[1] * t.ne[1], t.nb[1] * t.ne[1]
        rows = lib.ggml_view_4d(self.ctx, t, t.ne[0], t.ne[1], 1, 1, *apart, 0)
        rows.type, rows.ne[0], rows.nb[0] = type_, row, lib.ggml_type_size(type_)
        return rows

    def compute_into(self, t: Tensor, into: Tensor, index: int) -> Tensor:
        """Compute the result `t` [d, n] directly into slice `index` of into [d, max columns, slices], without a copy."""
        address = ffi.cast("char *", into.data) + index * into.nb[2]
        if t.ne[0] != into.ne[0] or t.ne[1] > into.ne[1] or index >= into.ne[2]:
            raise ValueError(f"{tuple(t.ne)} has no room in slice {index} of {tuple(into.ne)}")
        if lib.ggml_backend_tensor_alloc(into.buffer, t, address) != lib.GGML_STATUS_SUCCESS:
            raise DeviceError("a result could not be placed in a persistent tensor")
        return t

    def reshape(self, t: Tensor, *ne: int) -> Tensor:
        """Contiguous `t` with another shape of as many elements."""
        ne4 = (*ne, 1, 1, 1)[:4]
        if math.prod(ne4) != lib.ggml_nelements(t):
            raise ValueError(f"cannot reshape {tuple(t.ne)} to {ne}")
        return lib.ggml_reshape_4d(self.ctx, t, *ne4)

    def permute(self, t: Tensor, a: int, b: int, c: int, d: int) -> Tensor:
        """Dimension i of `t` becomes dimension (a, b, c, d)[i]."""
        return lib.ggml_permute(self.ctx, t, a, b, c, d)

    def transpose(self, t: Tensor) -> Tensor:
        """Dimensions 0 and 1 exchanged, a view."""
        return lib.ggml_transpose(self.ctx, t)

    def cont(self, t: Tensor, *ne: int) -> Tensor:
        """Contiguous copy of `t`, optionally with another shape."""
        return lib.ggml_cont_4d(self.ctx, t, *(*ne, 1, 1, 1)[:4]) if ne else lib.ggml_cont(self.ctx, t)

    def concat(self, a: Tensor, b: Tensor, dim: int) -> Tensor:
        """`b` behind `a` along dimension `dim`, the others equal."""
        return lib.ggml_concat(self.ctx, a, b, dim)

    def join(self, parts: Iterable[Tensor], dim: int) -> Tensor:
        """The parts one behind another along dimension `dim`, the others equal."""
        return reduce(lambda a, b: self.concat(a, b, dim), parts)

    def copy(self, src: Tensor, dst: Tensor) -> Tensor:
        """Write `src` into `dst` (same number of elements); the result is a view of `dst`."""
        return lib.ggml_cpy(self.ctx, src, dst)

    def get_rows(self, t: Tensor, ids: Tensor) -> Tensor:
        """Rows `ids` (int32 [n, ...]) of `t` [d, rows, ...] as float32 [d, n, ...]; int32 stays int32."""
        return lib.ggml_get_rows(self.ctx, t, ids)

    def set_rows(self, t: Tensor, src: Tensor, ids: Tensor) -> Tensor:
        """Write rows of `src` [d, n, ...] to rows `ids` (int32 [n]) of `t` [d, rows, ...]; the result is a view of `t`."""
        if t.ne[0] != src.ne[0] or src.ne[1] != ids.ne[0]:
            raise ValueError(f"set_rows: {tuple(src.ne)} at {tuple(ids.ne)} does not fit {tuple(t.ne)}")
        return lib.ggml_set_rows(self.ctx, t, src, ids)

    # ---- arithmetic

    def mul_mat(self, w: Tensor, x: Tensor, exact: bool = False) -> Tensor:
        """w [k, m] times x [k, n] -> [m, n], float32.

        Args:
            exact: Sum in float32 on a GPU too if `w` is float16.
        """
        if w.ne[0] != x.ne[0]:
            raise ValueError(
                f"mul_mat: '{ffi.string(w.name).decode()}' {tuple(w.ne)} does not fit {tuple(x.ne)}"
            )
        y = lib.ggml_mul_mat(self.ctx, w, x)
        if exact:
            lib.ggml_prec_set_acc(y, lib.GGML_PREC_F32)
        return y

    def mul_mat_id(self, w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
        """For column j and slot i the matrix ids[i, j] of w [k, m, matrices] times x[:, 0 or i, j]; x [k, 1 or slots, n],
        ids int32 [slots, n] -> [m, slots, n], float32."""
        if w.ne[0] != x.ne[0] or x.ne[1] not in (1, ids.ne[0]) or x.ne[2] != ids.ne[1]:
            raise ValueError(
                f"mul_mat_id: '{ffi.string(w.name).decode()}' {tuple(w.ne)} does not fit {tuple(x.ne)} at {tuple(ids.ne)}"
            )
        return lib.ggml_mul_mat_id(self.ctx, w, x, ids)

    def add_id(self, a: Tensor, b: Tensor, ids: Tensor) -> Tensor:
        """a [m, slots, n] plus for column j and slot i the row ids[i, j] of b float32 [m, rows]; ids int32 [slots, n]."""
        if a.ne[0] != b.ne[0] or (a.ne[1], a.ne[2]) != (ids.ne[0], ids.ne[1]):
            raise ValueError(f"add_id: {tuple(b.ne)} at {tuple(ids.ne)} does not fit {tuple(a.ne)}")
        return lib.ggml_add_id(self.ctx, a, b, ids)

    def hadamard(self, h: Tensor, x: Tensor) -> Tensor:
        """`mul_mat` of an orthonormal Hadamard matrix h [k, k] in Sylvester's order with x [k, ...], by fast kernels."""
        y = self.mul_mat(h, x)
        lib.ggml_mul_mat_set_hint(y, lib.GGML_HINT_SRC0_IS_HADAMARD)
        return y

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """a + b, `b` repeated over the missing dimensions."""
        return lib.ggml_add(self.ctx, a, b)

    def sub(self, a: Tensor, b: Tensor) -> Tensor:
        """a - b, `b` repeated over the missing dimensions."""
        return lib.ggml_sub(self.ctx, a, b)

    def div(self, a: Tensor, b: Tensor) -> Tensor:
        """a / b, `b` repeated over the missing dimensions."""
        return lib.ggml_div(self.ctx, a, b)

    def exp(self, a: Tensor) -> Tensor:
        """e^a, element-wise."""
        return lib.ggml_exp(self.ctx, a)

    def sum_rows(self, a: Tensor) -> Tensor:
        """Sums over dimension 0 of `a` [n, ...], whose rows are contiguous -> [1, ...]."""
        return lib.ggml_sum_rows(self.ctx, a)

    def softmax(self, a: Tensor, factor: float = 1.0) -> Tensor:
        """exp(factor a) over its sum, along dimension 0."""
        return lib.ggml_soft_max_ext(self.ctx, a, ffi.NULL, factor, 0.0)

    def clamp(self, a: Tensor, low: float, high: float) -> Tensor:
        """`a`, within low and high; on the CPU NaN becomes `high`."""
        return lib.ggml_clamp(self.ctx, a, low, high)

    def repeat(self, a: Tensor, *ne: int) -> Tensor:
        """`a` repeated to shape `ne`, whole multiples of its own."""
        return lib.ggml_repeat_4d(self.ctx, a, *(*ne, 1, 1, 1)[:4])

    def cast(self, a: Tensor, type_: int) -> Tensor:
        """Contiguous copy of `a` with elements of another type; float32 becomes int32 by truncation."""
        return lib.ggml_cast(self.ctx, a, type_)

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        """Element-wise; `b` is repeated over the missing dimensions."""
        return lib.ggml_mul(self.ctx, a, b)

    def scale(self, a: Tensor, factor: float) -> Tensor:
        """factor * a, element-wise."""
        return lib.ggml_scale(self.ctx, a, factor)

    def sigmoid(self, a: Tensor) -> Tensor:
        """1 / (1 + e^-a), element-wise."""
        return lib.ggml_sigmoid(self.ctx, a)

    def silu(self, a: Tensor) -> Tensor:
        """a * sigmoid(a), element-wise."""
        return lib.ggml_silu(self.ctx, a)

    def softplus(self, a: Tensor) -> Tensor:
        """log(1 + e^a), element-wise."""
        return lib.ggml_softplus(self.ctx, a)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up."""
        return lib.ggml_swiglu_split(self.ctx, gate, up)

    def clamped_swiglu(self, gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
        """gate * sigmoid(alpha * gate) * (up + 1), with gate at most `limit`, up within -limit and limit."""
        return lib.ggml_swiglu_oai(self.ctx, gate, up, alpha, limit)

    def gelu(self, a: Tensor) -> Tensor:
        """GELU (tanh approximation), element-wise; on the CPU rounded to float16."""
        return lib.ggml_gelu(self.ctx, a)

    def geglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """gelu(gate) * up."""
        return lib.ggml_geglu_split(self.ctx, gate, up)

    def softcap(self, a: Tensor, limit: float) -> Tensor:
        """limit * tanh(a / limit), element-wise."""
        return self.scale(lib.ggml_tanh(self.ctx, self.scale(a, 1 / limit)), limit)

    def rms_norm(self, a: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
        """a / sqrt(mean(a^2) + eps) over dimension 0, times `weight` when given."""
        y = lib.ggml_rms_norm(self.ctx, a, eps)
        return y if weight is None else lib.ggml_mul(self.ctx, y, weight)

    def l2_norm(self, a: Tensor, eps: float) -> Tensor:
        """a / sqrt(sum(a^2) + eps) over dimension 0 (eps inside the root, unlike ggml_l2_norm)."""
        if not self.device.has_own_kernels:
            return stock.l2_norm(self, a, eps)
        n = a.ne[0]
        return self.scale(lib.ggml_rms_norm(self.ctx, a, eps / n), n**-0.5)

    def rope(
        self,
        a: Tensor,
        positions: Tensor,
        n_dims: int,
        theta: float,
        yarn: Yarn | None = None,
        *,
        stretch: float = 1.0,
        adjacent: bool = False,
        factors: Tensor | None = None,
    ) -> Tensor:
        """Rotate the first `n_dims` of each head, pairs (j, j + n_dims/2), angle position * theta^(-2j/n_dims).

        Args:
            stretch: Divisor of all positions; not used with `yarn`.
            adjacent: Whether the pairs are (2j, 2j + 1).
            factors: Divisors of each pair's angle, float32 [n_dims/2].
        """
        n_ctx, scale, ramp, attention, fast, slow = 0, 1 / stretch, 0.0, 1.0, 0.0, 0.0
        if yarn is not None:
            n_ctx, scale, ramp, fast, slow = yarn.n_ctx, 1 / yarn.factor, 1.0, yarn.fast, yarn.slow
            attention = yarn.attention / (1 + 0.1 * math.log(yarn.factor))  # ggml applies this factor itself
        mode, positions = 0 if adjacent else lib.GGML_ROPE_TYPE_NEOX, self.aligned(positions)
        more = (n_ctx, theta, scale, ramp, attention, fast, slow)
        divisors = ffi.NULL if factors is None else factors
        return lib.ggml_rope_ext(self.ctx, a, positions, divisors, n_dims, mode, *more)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor,
        scale: float,
        seqs: Tensor | None = None,
        spans: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Softmax attention.

        Args:
            q: [d, n, heads].
            k, v: [d, n_kv, kv_heads].
            mask: float16 [n_kv, n], 0 or -inf.
            scale: Scale of the scores.
            seqs: As in `ssm_conv_forest`.
            spans: int32 [2, sequences], first row that a column of the sequence sees, and the one after the last; rows outside
                are masked and need not be read.
            sinks: float32 [heads], an additional logit per head, with value 0.

        Returns:
            [d, heads, n].
        """
        if mask.ne[0] != k.ne[1] or mask.ne[1] < q.ne[1] or q.ne[2] % k.ne[2]:
            raise ValueError(f"attention: q {tuple(q.ne)}, k {tuple(k.ne)}, mask {tuple(mask.ne)} do not fit")
        y = lib.ggml_flash_attn_ext(self.ctx, q, k, v, mask, scale, 0.0, 0.0)
        lib.ggml_prec_set_acc(y, lib.GGML_PREC_F32)
        if seqs is not None:
            lib.ggml_flash_attn_ext_add_seqs(y, seqs, spans)
        if sinks is not None:
            lib.ggml_flash_attn_ext_add_sinks(y, sinks)
        return y

    def range_attention(
        self, q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        """`attention` with column i limited to rows ranges[0, i] up to, not including, ranges[1, i]; ranges int32 [n, 2].

        A column without rows gets zeros, also with sinks.
        """
        if ranges.ne[0] != q.ne[1] or ranges.ne[1] != 2 or q.ne[2] % k.ne[2]:
            raise ValueError(
                f"attention: q {tuple(q.ne)}, k {tuple(k.ne)}, ranges {tuple(ranges.ne)} do not fit"
            )
        y = lib.ggml_flash_attn_ranges(self.ctx, q, k, v, ranges, scale)
        if sinks is not None:
            lib.ggml_flash_attn_ext_add_sinks(y, sinks)
        return self._own(y, stock.range_attention, q, k, v, ranges, scale, sinks)

    def range_mask(self, ranges: Tensor, n_kv: int) -> Tensor:
        """The mask float16 [n_kv, n] equivalent to ranges int32 [n, 2], or [n, 2 m]: first, end, first, ..."""
        return self._own(lib.ggml_range_mask(self.ctx, ranges, n_kv), stock.range_mask, ranges, n_kv)

    def forest_mask(self, ranges: Tensor, rows: Tensor, parents: Tensor, seqs: Tensor, n_kv: int) -> Tensor:
        """The mask float16 [n_kv, n] of trees: a column sees its ranges, its own row of rows int32 [n], and its ancestors'.

        parents and seqs as in `ssm_conv_forest`."""
        y = lib.ggml_forest_mask(self.ctx, ranges, rows, parents, seqs, n_kv)
        return self._own(y, stock.forest_mask, ranges, rows, parents, seqs, n_kv)

    def top_k_log_probs(self, a: Tensor, k: int) -> Tensor:
        """The `k` best of each row of logits a [n, rows], best first: float32 [k, 2, rows], indices and log-probabilities."""
        return self._own(lib.ggml_top_k_log_probs(self.ctx, a, k), stock.top_k_log_probs, a, k)

    def all_reduce(self, a: Tensor, mailbox: Tensor) -> Tensor:
        """The sum of `a` over both ranks, with identical bits on both.

        Args:
            mailbox: See Mailboxes.
        """
        return lib.ggml_all_reduce(self.ctx, a, mailbox)

    def argmax(self, a: Tensor) -> Tensor:
        """Index of the largest of each row, int32 [rows]."""
        return lib.ggml_argmax(self.ctx, a) if self.device.has_own_kernels else stock.argmax(self, a)

    def top_k(self, a: Tensor, k: int) -> Tensor:
        """Indices of the `k` largest of each row of a [n, rows], largest first: int32 [k, rows], a view of all n in order."""
        if not 0 < k <= a.ne[0]:
            raise ValueError(f"top_k: {k} of {tuple(a.ne)}")
        return lib.ggml_argsort_top_k(self.ctx, a, k)

    # ---- delta net, in order and along a tree

    def gated_delta_net(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
    ) -> Tensor:
        """The gated delta rule (arXiv 2412.06464) over the columns of one sequence.

        Computed token by token, or in chunks if the device supports that and there are enough columns; never in reference mode.

        Args:
            q, k: [S, H_k, n].
            v: [S, H_v, n].
            g, beta: [1, H_v, n], logarithm of the decay, and write strength.
            state: [S, S, H_v].

        Returns:
            The outputs [S*H_v, n], then the state after the last token [S*H_v, S].
        """
        # ggml-vulkan aborts on a view that it cannot bind, which its `supports_op` does not check
        bound = (
            t if t.view_offs % self.device.view_alignment == 0 else self.cont(t)
            for t in (q, k, v, g, beta, state)
        )
        return lib.ggml_gated_delta_net_chunked(self.ctx, *bound)

    def ssm_conv(self, x: Tensor, c: Tensor) -> Tensor:
        """Depthwise convolution of columns in order: x [K-1 + n, C, sequences], c [K, C] -> [C, n, sequences]."""
        return lib.ggml_ssm_conv(self.ctx, x, c)

    # ---- one tree, or with seqs trees of several sequences: int32 [3, sequences] of state index, first column, number of columns

    def ssm_conv_tree(
        self, state: Tensor, x: Tensor, c: Tensor, parents: Tensor, seqs: Tensor | None = None
    ) -> Tensor:
        """Depthwise causal convolution along trees.

        Args:
            state: [K-1, C], with `seqs` [K-1, C, states].
            x: [C, n].
            c: [K, C].
            parents: int32 [n], with `seqs` from the first column of each block.
            seqs: See above.

        Returns:
            [C, n], composed [C, 1, n].
        """
        return self._of_trees("ssm_conv_tree", seqs, state, x, c, parents)

    def ssm_conv_tree_commit(
        self, state: Tensor, x: Tensor, path: Tensor | None, seqs: Tensor | None = None
    ) -> Tensor:
        """state <- last K-1 inputs of (state + x[path]), all layers at once.

        Args:
            state: [K-1, C, layers], with `seqs` [K-1, C, states, layers].
            x: [C, n, layers].
            path: int32 [m], with `seqs` [m, sequences], or None: sequences of one column are advanced.
            seqs: See above.
        """
        return self._of_trees("ssm_conv_tree_commit", seqs, state, x, path)

    def gated_delta_net_tree_persist(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        state: Tensor,
        factors: Tensor,
        parents: Tensor,
        seqs: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Gated delta rule along trees; `factors` <- one column per node: u S*H_v | k S*H_k | G H_v.

        With `seqs` state is [S, S, H_v, states].

        Returns:
            The outputs [S, H_v, n], and `factors` for operations after that.
        """
        (s, h, n), sources = v.ne[0:3], (q, k, v, g, beta, state)
        if seqs is None:
            rows = lib.ggml_gated_delta_net_tree_persist(self.ctx, *sources, parents)
        else:
            rows = lib.ggml_gated_delta_net_forest_persist(self.ctx, *sources, parents, seqs)
        if stock.is_composed(self.device, rows):
            return stock.gated_delta_net_tree_persist(self, *sources, factors, parents, seqs)
        tail = self.view(rows, (rows.ne[0] - s * h, n), (rows.nb[1],), offset=s * h * 4)
        factors = self.expand(self.copy(tail, factors))
        return self.view(rows, (s, h, n), (s * 4, rows.nb[1])), factors

    def gated_delta_net_tree_commit(
        self, state: Tensor, factors: Tensor, path: Tensor | None, seqs: Tensor | None = None
    ) -> Tensor:
        """state <- the state after the accepted path, from the factors u | k | G; all layers at once through the last dimension.

        With `seqs` state is [S, S*H_v, states, layers]; path as in `ssm_conv_tree_commit`.
        """
        return self._of_trees("gated_delta_net_tree_commit", seqs, state, factors, path)

    def _of_trees(self, name: str, seqs: Tensor | None, *sources: Tensor | None) -> Tensor:
        """An operation along one tree, or with `seqs` its twin for several, which may have no path."""
        if seqs is None:
            y = getattr(lib, f"ggml_{name}")(self.ctx, *sources)
        else:
            bound = (ffi.NULL if t is None else t for t in (*sources, seqs))
            y = getattr(lib, f"ggml_{name.replace('tree', 'forest')}")(self.ctx, *bound)
        return self._own(y, getattr(stock, name), *sources, seqs)
