"""Our operations composed of ggml's own, for devices whose backend has no kernels for them.

Every function has the parameters of the method of `Operations` with its name, and the same result up to rounding. The native
operations evaluate parents, paths and ranges while they run; here the host derives indices and masks from the same inputs before
each run (`Graph.derive`).

Matmuls of states and factors are single-column matmuls: for several columns Vulkan and Metal round both operands to float16,
and states are float32.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bindings import Tensor, ffi, lib
from .device import F16, F32, I32, Device

Array = NDArray[Any]
Graph = Any  # graph.py imports this module
HIDDEN = np.float16(-np.inf)
_CHUNK = 64 << 20  # scratch bytes up to which layers are committed at once
_TITLES = {
    "SSM_CONV_TREE": "convolutions of trees",
    "SSM_CONV_TREE_COMMIT": "commits of convolutions",
    "GATED_DELTA_NET_TREE_PERSIST": "delta nets of trees",
    "GATED_DELTA_NET_TREE_COMMIT": "commits of delta nets",
    "RANGE_MASK": "masks of ranges",
    "FLASH_ATTN_RANGES": "attention over ranges",
    "TOP_K_LOG_PROBS": "best candidates",
}
log = logging.getLogger("dflash_ggml")


def is_composed(device: Device, node: Tensor) -> bool:
    """Whether `node`, an operation of our own, must be composed on the side of its weights or state; logged the first time."""
    # ggml-cuda reports operations with sources on another device as unsupported
    by = next((device.owner(t) for t in node.src if t != ffi.NULL and device.side(t) is not None), device)
    if not device.stock and lib.ggml_backend_dev_supports_op(by.info.handle, node):
        return False
    name = ffi.string(lib.ggml_op_desc(node)).decode()
    title = _TITLES.get(name, name)
    if title not in device.composed:
        device.composed.add(title)
        log.info("%s: %s by composition", by.info.name, title)
    return True


def lacking(device: Device) -> list[str]:
    """Operations that are composed on a device, for messages; checked with small shapes."""
    ctx = lib.ggml_init(
        {"mem_size": 64 * lib.ggml_tensor_overhead(), "mem_buffer": ffi.NULL, "no_alloc": True}
    )

    def tensor(type_: int, *ne: int):
        return lib.ggml_new_tensor(ctx, type_, len(ne), ffi.new("int64_t[]", ne))

    x, window, kernel, path = tensor(F32, 64, 8), tensor(F32, 3, 64), tensor(F32, 4, 64), tensor(I32, 8)
    q, v, decay = tensor(F32, 16, 2, 8), tensor(F32, 16, 4, 8), tensor(F32, 1, 4, 8)
    delta, factors = tensor(F32, 16, 16, 4), tensor(F32, 16 * 6 + 4, 8)
    heads, keys, ranges = tensor(F32, 64, 8, 2), tensor(F16, 64, 256, 2), tensor(I32, 8, 2)
    nodes = (
        lib.ggml_ssm_conv_tree(ctx, window, x, kernel, path),
        lib.ggml_ssm_conv_tree_commit(ctx, window, x, path),
        lib.ggml_gated_delta_net_tree_persist(ctx, q, q, v, decay, decay, delta, path),
        lib.ggml_gated_delta_net_tree_commit(ctx, delta, factors, path),
        lib.ggml_range_mask(ctx, ranges, 256),
        lib.ggml_flash_attn_ranges(ctx, heads, keys, keys, ranges, 1.0),
        lib.ggml_top_k_log_probs(ctx, x, 4),
    )
    found = [
        _TITLES[ffi.string(lib.ggml_op_desc(node)).decode()]
        for node in nodes
        if device.stock or not lib.ggml_backend_dev_supports_op(device.info.handle, node)
    ]
    lib.ggml_free(ctx)
    return found


# ---- inputs derived by the host; arrays in numpy's order, the last dimension contiguous


def _blocks(seqs: Array | None, n: int) -> Iterator[tuple[int, int, int]]:
    """State, first column and number of columns of each sequence."""
    if seqs is None:
        yield 0, 0, n
        return
    for index, first, columns in seqs.reshape(-1, 3).tolist():
        if columns > 0:
            yield index, first, columns


def _owners(seqs: Array | None, n: int) -> tuple[Array, Array]:
    """For each column its sequence's state and first column; 0 for columns of no sequence."""
    owners = np.zeros((2, n), np.int32)
    for index, first, columns in _blocks(seqs, n):
        owners[:, first : first + columns] = [[index], [first]]
    return owners[0], owners[1]


def _up(parents: Array, seqs: Array | None) -> Array:
    """The column of each column's parent, -1 for roots and columns of no sequence."""
    up = np.full(len(parents), -1, np.int32)
    for _, first, columns in _blocks(seqs, len(parents)):
        own = parents[first : first + columns]
        up[first : first + columns] = np.where(own >= 0, own + first, -1)
    return up


def ancestors(parents: Array, seqs: Array | None = None) -> Array:
    """Whether column j is column i or one of its ancestors, bool [n (i), n (j)]."""
    found = np.eye(len(parents), dtype=bool)
    for column, parent in enumerate(_up(parents, seqs).tolist()):
        if parent >= 0:
            found[column] |= found[parent]
    return found


def _fill_tree(outs: list[Array], parents: Array, seqs: Array | None) -> None:
    """For columns i and j the nodes above i up to j, and last all above i; the terms of each equation; ones on the diagonal."""
    (between, terms, eye), n = outs, len(parents)
    own, between = ancestors(parents, seqs), between.reshape(n, n + 1, n)
    between[:, :n] = own[:, None] & ~own
    between[:, n] = own
    terms[:, :, :n] = own
    np.fill_diagonal(terms[0], 0)
    np.fill_diagonal(eye, 1)


def _fill_heads(rows: Array, h_k: int, h: int, n: int) -> None:
    """Rows of the keys, then of the queries of all columns, for each value head; a column has its queries' heads first."""
    firsts = 2 * h_k * np.arange(n)
    heads = np.arange(h) % h_k
    rows.reshape(h, 2, n)[:] = heads[:, None, None] + np.array([h_k, 0])[:, None] + firsts


def _fill_state_heads(outs: list[Array], parents: Array, seqs: Array, apart: int) -> None:
    """For each head and column, twice, the index of its sequence's state matrix; states are `apart` matrices apart."""
    heads, columns = outs[0].shape
    index, _ = _owners(seqs, columns // 2)
    outs[0][:] = np.tile(index * apart, 2) + np.arange(heads)[:, None]


def _fill_taps(outs: list[Array], parents: Array, seqs: Array | None, states: int) -> None:
    """Input rows of each column's convolution, oldest first; windows of `states` states precede the columns."""
    (taps,) = outs
    n, kernel = taps.shape
    size = kernel - 1
    before, (index, _), up = states * size, _owners(seqs, n), _up(parents, seqs)
    above = np.concatenate([np.arange(before) - 1, np.where(up >= 0, before + up, (index + 1) * size - 1)])
    at = before + np.arange(n)
    for tap in reversed(range(kernel)):
        taps[:, tap] = at
        at = np.maximum(above[at], 0)


def _paths(path: Array | None, seqs: Array | None, n: int) -> Iterator[tuple[int, list[int]]]:
    """The states to commit, with their accepted columns."""
    if seqs is None:
        assert path is not None
        rows = [(0, 0, path.reshape(-1).tolist())]
    elif path is None:
        rows = [(index, first, [0]) for index, first, columns in _blocks(seqs, n) if columns == 1]
    else:
        seq_rows, node_rows = (
            seqs.reshape(-1, 3).tolist(),
            path.reshape(len(seqs.reshape(-1, 3)), -1).tolist(),
        )
        rows = [(i, first, nodes) for (i, first, columns), nodes in zip(seq_rows, node_rows) if columns > 0]
    for index, first, nodes in rows:
        end = next((at for at, node in enumerate(nodes) if node < 0), len(nodes))
        if end:
            yield index, [first + node for node in nodes[:end]]


def _fill_window(outs: list[Array], path: Array | None, seqs: Array | None, n: int) -> None:
    """Columns that enter the windows, [layers, states * size], and the remaining rows of windows and columns, [layers * states,
    size]."""
    entering, kept = outs
    layers, size = len(entering), kept.shape[-1]
    entering, kept = entering.reshape(layers, -1, size), kept.reshape(layers, -1, size)
    entering[:], kept[:] = 0, np.arange(size)
    for index, columns in _paths(path, seqs, n):
        last = columns[-size:]
        entering[:, index, : len(last)] = last
        kept[:, index] += len(last)


def _fill_path(outs: list[Array], path: Array | None, seqs: Array | None, n: int) -> None:
    """Factor columns of the accepted path, [layers, states * m], and of its last node, [layers, states]; `n`, a column of zeros,
    for padding."""
    nodes, last = outs
    layers, states = last.shape
    nodes = nodes.reshape(layers, states, -1)
    nodes[:], last[:] = n, n
    for index, columns in _paths(path, seqs, n):
        nodes[:, index, : len(columns)] = columns
        last[:, index] = columns[-1]


def _show_ranges(mask: Array, ranges: Array) -> None:
    mask[:] = HIDDEN
    n_kv = mask.shape[1]
    for first, end in ranges.reshape(-1, 2, len(mask)).clip(0, n_kv).tolist():
        for row, low, high in zip(mask, first, end):
            row[low:high] = 0


def _fill_ranges(outs: list[Array], ranges: Array) -> None:
    _show_ranges(outs[0], ranges)


def _fill_forest(outs: list[Array], ranges: Array, rows: Array, parents: Array, seqs: Array) -> None:
    (mask,) = outs
    _show_ranges(mask, ranges)
    column, other = np.nonzero(ancestors(parents, seqs))
    row = rows[other]
    exists = (row >= 0) & (row < mask.shape[1])
    mask[column[exists], row[exists]] = 0


# ---- compositions


def _column_matmul(g: Graph, a, b):
    """a [k, m, h] times b [k, n, h], contiguous -> [m, n, h], by single columns."""
    (k, m, h), n = a.ne[0:3], b.ne[1]
    return g.reshape(g.mul_mat(a, g.reshape(b, k, 1, n * h)), m, n, h)


def ssm_conv_tree(
    g: Graph, state: Tensor, x: Tensor, c: Tensor, parents: Tensor, seqs: Tensor | None = None
) -> Tensor:
    """See Operations.ssm_conv_tree."""
    kernel, (channels, n), states = c.ne[0], x.ne[0:2], state.ne[2]
    windows = g.permute(state, 1, 0, 2, 3)
    if states > 1:
        windows = g.cont(windows, channels, (kernel - 1) * states)
    inputs = g.concat(windows, x, 1)
    (taps,) = g.derive(
        f"taps {kernel} {states}",
        [(I32, (kernel, n))],
        lambda outs, parents, seqs: _fill_taps(outs, parents, seqs, states),
        parents,
        seqs,
    )
    read = g.reshape(g.get_rows(inputs, g.reshape(taps, kernel * n)), channels, kernel, n)
    return g.ssm_conv(g.cont(g.permute(read, 1, 0, 2, 3)), c)


def ssm_conv_tree_commit(
    g: Graph, state: Tensor, x: Tensor, path: Tensor, seqs: Tensor | None = None
) -> Tensor:
    """See Operations.ssm_conv_tree_commit."""
    size, channels = state.ne[0:2]
    n, layers = x.ne[1], x.ne[2]
    if seqs is None:
        state = g.view(state, (size, channels, 1, layers), (state.nb[1], state.nb[2], state.nb[2]))
    states = state.ne[2]
    entering, kept = g.derive(
        f"window {n}",
        [(I32, (size * states, layers)), (I32, (size, states * layers))],
        lambda outs, path, seqs: _fill_window(outs, path, seqs, n),
        path,
        seqs,
    )
    old = g.cont(g.permute(state, 1, 0, 2, 3), channels, size, states * layers)
    new = g.reshape(g.get_rows(x, entering), channels, size, states * layers)
    last = g.get_rows(g.concat(old, new, 1), kept)
    last = g.reshape(last, channels, size, states, layers)
    # packed first: ggml-cuda copies what is transposed as if its target had no gaps
    return g.copy(g.cont(g.permute(last, 1, 0, 2, 3)), state)


def gated_delta_net_tree_persist(
    g: Graph,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    factors: Tensor,
    parents: Tensor,
    seqs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See Operations.gated_delta_net_tree_persist.

    With A the ancestors of each column, itself included, G = A g the decay since the committed state S, and D the factors
    exp(G_i - G_j) where j is in A_i, 0 elsewhere: (1 + beta D (K K^T), without its diagonal) U = beta (V - exp(G) K S), and
    O = exp(G) Q S + D (Q K^T) U, scaled. Both are one triangular system, with columns of keys and then of queries, whose "beta"
    is minus the scale.
    """
    (s, h_k, n), h = k.ne[0:3], v.ne[1]
    shapes = (n, (n + 1) * n), (2 * n, n, 2), (2 * n, 2 * n)
    between, terms, eye = g.derive("tree", [(F32, ne) for ne in shapes], _fill_tree, parents, seqs)
    (minus_scale,) = g.derive(f"scale {s} {n}", [(F32, (1, n, h))], lambda outs: outs[0].fill(-(s**-0.5)))

    def keep(part: Tensor, first: int) -> None:
        """Write part [size, heads, n] to the factors, from float `first` on: in different steps, as their ranges overlap."""
        size, heads = part.ne[0:2]
        g.expand(g.copy(part, g.view(factors, (size, heads, n), (4 * size, factors.nb[1]), offset=4 * first)))

    # what needs no convolution first: the rest depends on it in as few steps as possible
    own = g.reshape(g.cont(g.transpose(g.reshape(decay, h, n))), n, 1, h)
    sums = g.reshape(g.mul_mat(between, own), n + 1, n, h)  # G_i - G_j, and behind them G_i
    decays, (row, head) = g.exp(sums), sums.nb[1:3]
    betas = g.reshape(g.concat(g.permute(beta, 0, 2, 1, 3), minus_scale, 1), 1, n, 2, h)
    pairs = g.repeat(g.view(decays, (n, n, 1, h), (row, head, head)), 2 * n, n, 2, h)
    pairs = g.expand(g.mul(g.mul(pairs, terms), betas))
    grown = g.mul(betas, g.view(decays, (1, n, 1, h), (row, head, head), offset=4 * n))
    grown = g.expand(g.scale(grown, s**0.5) if seqs is None else grown)
    values = lib.ggml_pad(g.ctx, g.permute(v, 0, 2, 1, 3), 0, n, 0, 0)
    values = g.expand(g.mul(g.reshape(values, s, n, 2, h), betas))
    columns = g.expand(_columns(g, q, k, h))
    among = g.expand(g.reshape(_column_matmul(g, columns, columns), 2 * n, n, 2, h))
    if seqs is None:
        read = g.expand(_read_state(g, state, q, k, columns))
    else:
        read = g.expand(g.reshape(_read_states(g, state, columns, parents, seqs), s, n, 2, h))
    keep(g.permute(g.view(sums, (1, n, h), (row, head), offset=4 * n), 0, 2, 1, 3), s * (h + h_k))
    right = g.reshape(g.sub(values, g.mul(read, grown)), s, 2 * n, h)
    matrix = g.add(g.reshape(g.mul(among, pairs), 2 * n, 2 * n, h), eye)
    keep(k, s * h)
    both = lib.ggml_solve_tri(g.ctx, matrix, right, True, True, False)  # U, then O
    u, o = (g.view(both, (s, n, h), (both.nb[1], both.nb[2]), offset=i * n * both.nb[1]) for i in (0, 1))
    keep(g.permute(u, 0, 2, 1, 3), 0)
    return g.permute(o, 0, 2, 1, 3), factors


def _columns(g: Graph, q, k, h: int):
    """Keys and then queries of all columns for each of h value heads, [s, 2 n, h]."""
    s, h_k, n = k.ne[0:3]
    both, size = q.view_src, 2 * s * h_k * n
    if (
        both == ffi.NULL
        or both != k.view_src
        or (q.view_offs, k.view_offs, lib.ggml_nelements(both)) != (0, 4 * s * h_k, size)
    ):
        both = g.concat(q, k, 1)
    (rows,) = g.derive(
        f"heads {h_k} {h} {n}", [(I32, (n * 2 * h,))], lambda outs: _fill_heads(outs[0], h_k, h, n)
    )
    return g.reshape(g.get_rows(g.reshape(both, s, 2 * h_k * n), rows), s, 2 * n, h)


def _read_state(g: Graph, state, q, k, columns):
    """The state [s, s, h] times keys and then queries, scaled by s^-0.5: [s, n, 2, h].

    The outputs of a delta net that changes nothing, whatever its values are: it reads the state once, not for every column.
    """
    (s, _, n), h = k.ne[0:3], columns.ne[2]
    both, row = g.concat(k, q, 2), 4 * s * h
    (gates,) = g.derive(f"zeros {n}", [(F32, (1, h, 2 * n))], lambda outs: None)
    out = g.gated_delta_net(both, both, g.reshape(columns, s, h, 2 * n), gates, gates, state)
    return g.permute(g.view(out, (s, h, n, 2), (4 * s, row, n * row)), 0, 3, 1, 2)


def _read_states(g: Graph, state, columns, parents, seqs):
    """Each column's sequence's state in [s, s, h, states] times columns [s, 2 n, h]."""
    (s, n, h), states = columns.ne[0:3], state.ne[3]
    # matrices of all states are equally spaced, with other layers' in between
    apart = state.nb[3] // state.nb[2]
    matrices = g.view(state, (s, s, (states - 1) * apart + h), (state.nb[1], state.nb[2]))
    (ids,) = g.derive(
        f"states {apart}",
        [(I32, (n, h))],
        lambda outs, parents, seqs: _fill_state_heads(outs, parents, seqs, apart),
        parents,
        seqs,
    )
    ids = g.reshape(ids, n * h, 1)
    return g.reshape(g.mul_mat_id(matrices, g.reshape(columns, s, n * h, 1), ids), s, n, h)


def gated_delta_net_tree_commit(
    g: Graph, state: Tensor, factors: Tensor, path: Tensor, seqs: Tensor | None = None
) -> Tensor:
    """See Operations.gated_delta_net_tree_commit."""
    s, layers = state.ne[0], state.ne[3]
    (size, n), m = factors.ne[0:2], 1 if path is None else path.ne[0]
    h = state.ne[2] if seqs is None else state.ne[1] // s
    states, apart = (1, state.nb[3]) if seqs is None else (state.ne[2], state.nb[2])
    part = max(1, _CHUNK // commit_bytes(s, h, size, n, m, states))
    done = state
    for first in range(0, layers, part):
        count = min(part, layers - first)
        some = g.view(factors, (size, n, count), (factors.nb[1], factors.nb[2]), offset=first * factors.nb[2])
        strides = (4 * s * s, apart, state.nb[3])
        home = g.view(state, (s * s, h, states, count), strides, offset=first * state.nb[3])
        done = g.expand(_commit(g, home, some, path, seqs, m, s))
    return done


def commit_bytes(s: int, h: int, size: int, n: int, m: int, states: int) -> int:
    """Scratch bytes of the commit of a layer: its factors, those of the paths, and the states' increments."""
    return 4 * (size * (n + 1) + states * (m * size + 3 * m * s * h + s * s * h))


def _commit(g: Graph, state, factors, path, seqs, m: int, s: int):
    """state [s * s, h, states, layers] <- exp(G) state + K^T (exp(G - G_j) U), for some layers."""
    h, states, layers = state.ne[1], state.ne[2], state.ne[3]
    size, n = factors.ne[0:2]
    h_k, each = (size - s * h - h) // s, states * layers
    # a column of zeros for padding: multiplying by 0 would let NaN of other sequences through
    zeros = lib.ggml_fill(
        g.ctx, g.cont(g.view(factors, (size, 1, layers), (factors.nb[1], factors.nb[2]))), 0.0
    )
    nodes, last = g.derive(
        f"path {n}",
        [(I32, (states * m, layers)), (I32, (states, layers))],
        lambda outs, path, seqs: _fill_path(outs, path, seqs, n),
        path,
        seqs,
    )
    whole = g.concat(factors, zeros, 1)
    f = g.reshape(g.get_rows(whole, nodes), size, m, each)
    row, decays = 4 * size, 4 * s * (h + h_k)
    u = g.view(f, (s, h, m, each), (4 * s, row, row * m))
    k = g.view(f, (s, h_k, m, each), (4 * s, row, row * m), offset=4 * s * h)
    before = g.view(f, (h, m, each), (row, row * m), offset=decays)
    end = g.reshape(g.get_rows(whole, last), size, 1, each)
    end = g.cont(g.view(end, (h, 1, each), (row, row), offset=decays))
    weights = g.exp(g.sub(g.repeat(end, h, m, each), before))
    u = g.mul(u, g.reshape(weights, 1, h, m, each))
    u, k = (g.cont(g.permute(t, 1, 2, 0, 3)) for t in (u, k))
    k = k if h == h_k else g.repeat(k, m, s, h, each)
    more = _column_matmul(g, g.reshape(k, m, s, h * each), g.reshape(u, m, s, h * each))
    grown = lib.ggml_mul_inplace(g.ctx, state, g.reshape(g.exp(end), 1, h, states, layers))
    return lib.ggml_add_inplace(g.ctx, grown, g.reshape(more, s * s, h, states, layers))


def range_mask(g: Graph, ranges: Tensor, n_kv: int) -> Tensor:
    """See Operations.range_mask."""
    return g.derive(f"ranges {n_kv}", [(F16, (n_kv, ranges.ne[0]))], _fill_ranges, ranges)[0]


def forest_mask(g: Graph, ranges: Tensor, rows: Tensor, parents: Tensor, seqs: Tensor, n_kv: int) -> Tensor:
    """See Operations.forest_mask."""
    shape = [(F16, (n_kv, ranges.ne[0]))]
    return g.derive(f"forest {n_kv}", shape, _fill_forest, ranges, rows, parents, seqs)[0]


def range_attention(
    g: Graph, q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """See Operations.range_attention. The mask is the device's own where it has that operation and lacks this head size."""
    return g.attention(q, k, v, g.range_mask(ranges, k.ne[1]), scale, sinks=sinks)


def top_k_log_probs(g: Graph, a: Tensor, k: int) -> Tensor:
    """See Operations.top_k_log_probs."""
    n, rows = a.ne[0:2]
    best = lib.ggml_top_k(g.ctx, a, k)  # unsorted
    if not lib.ggml_backend_dev_supports_op(g.device.info.handle, best):
        best = g.cont(g.top_k(a, k))
    values = g.reshape(g.get_rows(g.reshape(a, 1, n, rows), best), k, rows)
    order = lib.ggml_argsort(g.ctx, values, lib.GGML_SORT_ORDER_DESC)
    ids, values = (g.reshape(g.get_rows(g.reshape(t, 1, k, rows), order), k, rows) for t in (best, values))
    top = g.view(values, (1, rows), (values.nb[1],))
    total = lib.ggml_log(g.ctx, g.sum_rows(g.exp(g.sub(a, top))))
    log_probs = g.sub(g.sub(values, top), total)
    return g.concat(g.reshape(g.cast(ids, F32), k, 1, rows), g.reshape(log_probs, k, 1, rows), 1)


# ---- operations that ggml has, for backends whose kernels fuse or divide less than CUDA's


def l2_norm(g: Graph, a: Tensor, eps: float) -> Tensor:
    """See Operations.l2_norm: a weight is part of the norm's kernel, a scale is not."""
    n = a.ne[0]
    (root,) = g.derive(f"root {n}", [(F32, (n,))], lambda outs: outs[0].fill(n**-0.5))
    return g.rms_norm(a, eps / n, root)


def argmax(g: Graph, a: Tensor) -> Tensor:
    """See Operations.argmax: of blocks of a row and then of their largest, as ggml-vulkan has 32 threads for a row."""
    n, rows = a.ne[0:2]
    block = next(size for size in range(math.isqrt(n), 0, -1) if n % size == 0)
    if block < 32:
        return lib.ggml_argmax(g.ctx, a)
    blocks = n // block
    each = lib.ggml_argmax(g.ctx, g.reshape(a, block, blocks * rows))
    best = g.get_rows(g.reshape(a, 1, block, blocks * rows), g.reshape(each, 1, blocks * rows))
    which = lib.ggml_argmax(g.ctx, g.reshape(best, blocks, rows))
    first = np.arange(0, n, block, dtype=np.float32)
    (starts,) = g.derive(f"blocks {n}", [(F32, (blocks,))], lambda outs: np.copyto(outs[0], first))
    ids = g.add(g.reshape(g.cast(each, F32), blocks, rows), starts)  # exact below 2^24
    ids = g.get_rows(g.reshape(ids, 1, blocks, rows), g.reshape(which, 1, rows))
    return g.cast(g.reshape(ids, rows), I32)


# ---- scratch bytes of compositions, for the memory plan


def mask_bytes(columns: int, rows: int) -> int:
    """The mask of `columns` prefill columns over `rows` cache rows."""
    return 2 * columns * rows


def conv_bytes(columns: int, channels: int, kernel: int) -> int:
    """Gathered rows of a tree's convolution: window and inputs, and the taps twice."""
    return 4 * channels * (columns + kernel) + 8 * channels * kernel * columns


def delta_bytes(columns: int, s: int, h: int, size: int, m: int, states: int, layers: int) -> int:
    """The larger of a tree's matmuls (quadratic and linear in its columns) and of the layers committed at once."""
    tree = 4 * h * (columns * (24 * columns + 14 * s) + s * s)
    layer = commit_bytes(s, h, size, columns, m, states)
    return max(tree, layer * max(1, min(layers, _CHUNK // layer)))
