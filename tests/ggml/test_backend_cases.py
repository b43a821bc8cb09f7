"""Tests of our operations on the CPU, at the shapes that the patches give test-backend-ops, against the numpy reference.

On the CPU that tool compares the CPU with itself. The cases are read from the patched source, so a case that a
patch adds is run here too. The tree convolution must give the reference's bits; the rest is compared with float64,
relative to the largest magnitude of each part of the result. About 15 s.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from dflash_ggml.ggml.bindings import ffi, lib
from reference import backend_cases
from reference import tree_ops as ref
from reference.graph import OpGraph

ROOT = Path(__file__).resolve().parents[2]
SOURCE = (ROOT / "vendor/llama.cpp/tests/test-backend-ops.cpp").read_text(encoding="utf-8")
OPERATIONS = re.findall(
    r"\*(ggml_\w+)\(", (ROOT / "src/dflash_ggml/ggml/bindings/cdef/35_tree_ops.h").read_text(encoding="utf-8")
)
STRUCTS = backend_cases.structs_calling(SOURCE, OPERATIONS)
CASES = list(backend_cases.cases(SOURCE, "make_test_cases_eval", STRUCTS))
TREES = {"TREE_CHAIN": "chain", "TREE_RANDOM": "near", "TREE_FAN": "fan"}
TOL = 5e-6

Array = np.ndarray
Generator = np.random.Generator


def uniform(rng: Generator, *shape: int, low: float = -1.0, high: float = 1.0) -> Array:
    return rng.uniform(low, high, shape).astype(np.float32)


def parents_of(rng: Generator, n: int, seqs: int, kind: str) -> Array:
    return np.stack([ref.random_parents(rng, n, TREES[kind]) for _ in range(seqs)])


def paths_of(rng: Generator, n: int, rows: int, n_acc: int) -> Array:
    """Increasing nodes, padded with -1; every second row accepts half as many."""
    path = np.full((rows, n_acc + 2), -1, np.int32)
    for row in range(rows):
        length = min(n_acc if row % 2 == 0 else n_acc // 2, n)
        path[row, :length] = np.sort(rng.permutation(n)[:length])
    return path


def assert_close(found: Array, expected: Array, tol: float = TOL) -> None:
    assert found.shape == expected.shape and np.isfinite(found).all()
    assert np.abs(found - expected).max(initial=0.0) <= tol * np.abs(expected).max(initial=1e-30)


def silu_of(x: Array) -> Array:
    return x / (1.0 + np.exp(-x.astype(np.float64)))


class NetInputs(NamedTuple):
    """Inputs of a gated delta net in the layout of its operations: [..., heads, head size], decay and beta with heads of 1."""

    q: Array
    k: Array
    v: Array
    g_log: Array
    beta: Array

    def by_head(self) -> tuple[Array, ...]:
        """As the reference takes them: decay and beta [..., heads]."""
        return self.q, self.k, self.v, self.g_log[..., 0], self.beta[..., 0]


def net_inputs(
    rng: Generator,
    sizes: tuple[int, int, int],
    columns: tuple[int, ...],
    low: float,
    bounds: tuple[float, float] | None = None,
) -> NetInputs:
    """sizes: of a head, heads of q and k, heads of v. low: of the decay. bounds: of q and k, and of v; None: q and k of
    length 1."""
    head_size, n_head_k, n_head_v = sizes
    near, far = bounds or (1.0, 1.0)
    q, k = (uniform(rng, *columns, n_head_k, head_size, low=-near, high=near) for _ in range(2))
    v = uniform(rng, *columns, n_head_v, head_size, low=-far, high=far)
    if bounds is None:
        q, k = (a / np.linalg.norm(a, axis=-1, keepdims=True) for a in (q, k))
    g_log = uniform(rng, *columns, n_head_v, 1, low=low, high=-1e-4)
    return NetInputs(q, k, v, g_log, uniform(rng, *columns, n_head_v, 1, low=0.0))


def views_of(g: OpGraph, net: NetInputs, first: int) -> list:
    """q, k and v as views of rows that hold all three, behind `first` values that must not be read."""
    n_seqs, n, n_head_k, head_size = net.k.shape
    joint = np.concatenate([a.reshape(n_seqs, n, -1) for a in net[:3]], axis=-1)
    wide = g.tensor(np.pad(joint, ((0, 0), (0, 0), (first, 0)), constant_values=np.nan))
    counts, starts = (n_head_k, n_head_k, net.v.shape[2]), (0, n_head_k, 2 * n_head_k)
    return [
        g.columns(wide, first + at * head_size, head_size, count)
        for at, count in zip(starts, counts, strict=True)
    ]


def conv(
    rng: Generator, taps: int, channels: int, n: int, seqs: int, kind: str, first: int, with_silu: bool
) -> tuple[Array, Array]:
    """The operation over columns `first`.. of wider rows; returns state and inputs."""
    state, c = uniform(rng, seqs, channels, taps - 1), uniform(rng, channels, taps)
    x, parents = uniform(rng, seqs, n, channels), parents_of(rng, n, seqs, kind)
    wide = np.pad(x, ((0, 0), (0, 0), (first, first)), constant_values=np.nan)
    with OpGraph(threads=2) as g:
        view = g.columns(g.tensor(wide), first, channels) if first else g.tensor(x)
        out = lib.ggml_ssm_conv_tree(g.ctx, g.tensor(state), view, g.tensor(c), g.tensor(parents))
        outputs = [out, lib.ggml_silu(g.ctx, out)] if with_silu else [out]
        found = [a[0] for a in g.run(*outputs)]
    expected = ref.conv_tree(state, x, c, parents, np.float32)
    np.testing.assert_array_equal(found[0], expected)
    if with_silu:
        assert_close(found[1], silu_of(expected))
    return state, x


def conv_commit(rng: Generator, state: Array, x: Array, path: Array) -> None:
    with OpGraph(threads=2) as g:
        found = g.run(lib.ggml_ssm_conv_tree_commit(g.ctx, *map(g.tensor, (state, x, path))))[0][0]
    np.testing.assert_array_equal(found, ref.conv_commit(state, x, path))


def run_conv(
    rng: Generator, d_conv: int, d_inner: int, n_tokens: int, n_seqs: int, kind: str, silu: bool, view: bool
) -> None:
    conv(rng, d_conv, d_inner, n_tokens, n_seqs, kind, 32 if view else 0, silu)


def run_conv_commit(
    rng: Generator, d_conv: int, d_inner: int, n_tokens: int, n_seqs: int, n_acc: int, bcast: bool
) -> None:
    state, x = uniform(rng, n_seqs, d_inner, d_conv - 1), uniform(rng, n_seqs, n_tokens, d_inner)
    conv_commit(rng, state, x, paths_of(rng, n_tokens, 1 if bcast else n_seqs, n_acc))


def run_net_input(
    rng: Generator, head_size: int, n_norm: int, n_head: int, n_tokens: int, kind: str, chain: str
) -> None:
    """Of the chain in front of a delta net what is ours: convolution, SiLU, and where it has one the commit."""
    first = {"TEST_DELTA_IN_UNALIGNED": 3, "TEST_DELTA_IN_VIEW": 4}.get(chain, 0)
    state, x = conv(rng, 4, (n_norm + n_head) * head_size, n_tokens, 1, kind, first, True)
    if chain == "TEST_DELTA_IN_COMMIT":
        conv_commit(rng, state, x, np.array([[-1 if kind == "TREE_FAN" else 0]], np.int32))


def run_net_forest_input(
    rng: Generator,
    head_size: int,
    n_norm: int,
    n_head: int,
    n_tokens: int,
    n_seqs: int,
    most: int,
    commit: bool,
) -> None:
    channels = (n_norm + n_head) * head_size
    run_conv_forest(rng, 4, channels, n_tokens, n_seqs, n_seqs, most, "TREE_RANDOM", True)
    if commit:
        run_conv_forest_commit(rng, 4, channels, n_tokens, n_seqs, n_seqs, 1, most, -1)


def run_net(
    rng: Generator,
    head_size: int,
    n_head_k: int,
    n_head_v: int,
    n_tokens: int,
    n_seqs: int,
    kind: str,
    view: bool,
    cache: bool = False,
) -> None:
    n, bounds = n_tokens, (head_size**-0.5, head_size**-0.5) if view else None
    net = net_inputs(rng, (head_size, n_head_k, n_head_v), (n_seqs, n), -20.0 if n % 2 else -0.5, bounds)
    state = uniform(rng, n_seqs, n_head_v, head_size, head_size)
    parents = parents_of(rng, n, n_seqs, kind)
    lengths = [head_size * n_head_v, head_size * n_head_v, head_size * n_head_k]
    with OpGraph(threads=2) as g:
        heads = views_of(g, net, 0) if view else [g.tensor(a) for a in net[:3]]
        rest = [g.tensor(a) for a in (net.g_log, net.beta, state, parents)]
        out = lib.ggml_gated_delta_net_tree_persist(g.ctx, *heads, *rest)
        factors = g.columns(out, lengths[0], int(out.ne[0]) - lengths[0])
        outputs = [out, lib.ggml_cont(g.ctx, factors)] if cache else [out]
        rows, *copies = (a[0] for a in g.run(*outputs))
    expected = ref.delta_net_tree(*net.by_head(), state, parents, keep_states=False)
    o, u, keys, g_sum = np.split(rows, np.cumsum(lengths), axis=-1)
    assert_close(o.reshape(net.v.shape), expected.o)
    assert_close(u.reshape(net.v.shape), expected.u)
    assert_close(g_sum, expected.g_sum)
    np.testing.assert_array_equal(keys.reshape(net.k.shape), net.k)
    for copy in copies:
        np.testing.assert_array_equal(copy, rows[..., lengths[0] :])


def run_net_cached(rng: Generator, **parameters: object) -> None:
    run_net(rng, **parameters, cache=True)


def run_net_tree(
    rng: Generator, h_k: int, h_v: int, n_tokens: int, kind: str, chain: str, accepted: int
) -> None:
    """Of a whole delta net what is ours: what comes before the rule, and once for all that may follow the rule of a tree."""
    state, x = conv(rng, 4, (2 * h_k + h_v) * 128, n_tokens, 1, kind, 0, True)
    if accepted >= 0:
        conv_commit(rng, state, x, np.array([[accepted - 1]], np.int32))
    elif chain == "TEST_DELTA_TREE_RULE":
        run_net(rng, 128, h_k, h_v, n_tokens, 1, kind, view=True, cache=True)


def run_net_commit(
    rng: Generator,
    head_size: int,
    n_head_k: int,
    n_head_v: int,
    n_tokens: int,
    n_seqs: int,
    n_acc: int,
    bcast: bool,
) -> None:
    state = uniform(rng, n_seqs, n_head_v, head_size, head_size)
    u, k = (uniform(rng, n_seqs, n_tokens, heads, head_size) for heads in (n_head_v, n_head_k))
    falling = -0.1 * np.arange(n_tokens)[:, None] - 0.01 * np.arange(n_head_v)
    g_sum = np.tile(falling, (n_seqs, 1, 1)).astype(np.float32)
    path = paths_of(rng, n_tokens, 1 if bcast else n_seqs, n_acc)
    parts = [a.reshape(n_seqs, n_tokens, -1) for a in (np.full_like(u, np.nan), u, k, g_sum)]
    n_o = head_size * n_head_v
    with OpGraph(threads=2) as g:
        rows = g.tensor(np.concatenate(parts, axis=-1))
        factors = g.columns(rows, n_o, int(rows.ne[0]) - n_o)
        out = lib.ggml_gated_delta_net_tree_commit(g.ctx, g.tensor(state), factors, g.tensor(path))
        found = g.run(out)[0]
    assert_close(found, ref.delta_net_commit(state, u, k, g_sum, path))


def run_net_chunked(
    rng: Generator,
    head_size: int,
    n_head_k: int,
    n_head_v: int,
    n_tokens: int,
    n_seqs: int,
    decay: int,
    first: int,
    in_place: bool = False,
) -> None:
    bounds = None if first < 0 else (head_size**-0.5, head_size**-0.5)
    sizes = head_size, n_head_k, n_head_v
    net = net_inputs(rng, sizes, (n_seqs, n_tokens), -float(decay or 0.1), bounds)
    state, n_o = uniform(rng, n_seqs, n_head_v, head_size, head_size), net.v.size
    with OpGraph(threads=2) as g:
        heads = views_of(g, net, first) if first >= 0 else [g.tensor(a) for a in net[:3]]
        live = g.tensor(state)
        out = lib.ggml_gated_delta_net_chunked(g.ctx, *heads, g.tensor(net.g_log), g.tensor(net.beta), live)
        last = out
        if in_place:
            last = lib.ggml_cpy(g.ctx, g.flat(out, state.size, n_o), g.flat(live, state.size))
        g.run(lib.ggml_cont(g.ctx, last))
        found, after = g.read(out).ravel(), g.read(live)
    o, expected = ref.delta_net_chain(*net.by_head(), state)
    assert_close(found[:n_o].reshape(net.v.shape), o)
    assert_close(found[n_o:].reshape(state.shape), expected)
    if in_place:
        np.testing.assert_array_equal(after.ravel(), found[n_o:])


def run_net_chunked_in_place(rng: Generator, **parameters: object) -> None:
    run_net_chunked(rng, **parameters, in_place=True)


def forest_of(rng: Generator, n: int, entries: int, slots: int, most: int, kind: str) -> tuple[Array, Array]:
    """seqs int32 [entries, 3] and parents int32 [n]: trees as the tool's, of other random sizes."""
    seqs, at, parents = [], 0, np.full(n, -1, np.int32)
    for i, slot in enumerate(rng.permutation(slots)[:entries]):
        width = min(-most if most < 0 else 0 if i % 4 == 3 else int(rng.integers(1, most + 1)), n - at)
        if width:
            parents[at : at + width] = ref.random_parents(rng, width, TREES[kind])
        seqs.append((slot, at, width) if width else (-1, -1, 0))
        at += width
    return np.array(seqs, np.int32), parents


def trees_of(seqs: Array) -> list[tuple[int, int, slice]]:
    """Entry, slot and columns of the trees that are there."""
    return [(i, slot, slice(a, a + n)) for i, (slot, a, n) in enumerate(seqs.tolist()) if n]


def forest_paths(rng: Generator, seqs: Array, n_acc: int) -> Array:
    """Paths of the trees, or of those of one column when n_acc is negative, which the operations do without a path."""
    if n_acc < 0:
        return np.where(seqs[:, 2:] == 1, 0, -1).astype(np.int32)
    return np.concatenate([paths_of(rng, int(n), 1, n_acc) for n in seqs[:, 2]])


def path_of(g: OpGraph, path: Array, n_acc: int):
    return ffi.NULL if n_acc < 0 else g.tensor(path)


def slots_of(g: OpGraph, whole, layer: int, *ne: int):
    """One layer of whole [a, b, layers, slots] as [*ne, slots]."""
    offset, strides = layer * whole.nb[2], (whole.nb[1], *([ne[0] * whole.nb[1]] if len(ne) == 3 else []))
    view = lib.ggml_view_4d if len(ne) == 3 else lib.ggml_view_3d
    return view(g.ctx, whole, *ne, whole.ne[3], *strides, whole.nb[3], offset)


def run_conv_forest(
    rng: Generator,
    d_conv: int,
    d_inner: int,
    n_tokens: int,
    n_seqs: int,
    n_slots: int,
    most: int,
    kind: str,
    silu: bool,
) -> None:
    seqs, parents = forest_of(rng, n_tokens, n_seqs, n_slots, most, kind)
    state, c = uniform(rng, n_slots, 2, d_inner, d_conv - 1), uniform(rng, d_inner, d_conv)
    x = uniform(rng, n_tokens, d_inner)
    with OpGraph(threads=2) as g:
        view = slots_of(g, g.tensor(state), 1, d_conv - 1, d_inner)
        out = lib.ggml_ssm_conv_forest(g.ctx, view, *map(g.tensor, (x, c, parents, seqs)))
        found = [a[0, 0] for a in g.run(*([out, lib.ggml_silu(g.ctx, out)] if silu else [out]))]
    expected = np.zeros(x.shape, np.float32)
    for _, slot, columns in trees_of(seqs):
        own = state[slot, 1][None], x[columns][None], c, parents[columns][None]
        expected[columns] = ref.conv_tree(*own, np.float32)[0]
    np.testing.assert_array_equal(found[0], expected)
    if silu:
        assert_close(found[1], silu_of(expected))


def run_conv_forest_commit(
    rng: Generator,
    d_conv: int,
    d_inner: int,
    n_tokens: int,
    n_seqs: int,
    n_slots: int,
    n_layers: int,
    most: int,
    n_acc: int,
) -> None:
    seqs, _ = forest_of(rng, n_tokens, n_seqs, n_slots, most, "TREE_CHAIN")
    state, x = uniform(rng, n_slots, n_layers, d_inner, d_conv - 1), uniform(rng, n_layers, n_tokens, d_inner)
    path = forest_paths(rng, seqs, n_acc)
    with OpGraph(threads=2) as g:
        whole = g.tensor(state)
        live = lib.ggml_permute(g.ctx, whole, 0, 1, 3, 2)
        out = lib.ggml_ssm_conv_forest_commit(
            g.ctx, live, g.tensor(x), path_of(g, path, n_acc), g.tensor(seqs)
        )
        g.run(lib.ggml_cont(g.ctx, out))
        found = g.read(whole)
    expected = state.copy()
    for i, slot, columns in trees_of(seqs):
        expected[slot] = ref.conv_commit(state[slot], x[:, columns], path[i : i + 1])
    np.testing.assert_array_equal(found, expected)


def run_net_forest(
    rng: Generator,
    head_size: int,
    n_head_k: int,
    n_head_v: int,
    n_tokens: int,
    n_seqs: int,
    n_slots: int,
    most: int,
    kind: str,
) -> None:
    seqs, parents = forest_of(rng, n_tokens, n_seqs, n_slots, most, kind)
    low = -20.0 if n_tokens % 2 else -0.5
    net = net_inputs(rng, (head_size, n_head_k, n_head_v), (n_tokens,), low)
    state = uniform(rng, n_slots, 2, n_head_v * head_size, head_size)
    with OpGraph(threads=2) as g:
        view = slots_of(g, g.tensor(state), 1, head_size, head_size, n_head_v)
        out = lib.ggml_gated_delta_net_forest_persist(
            g.ctx, *map(g.tensor, net), view, g.tensor(parents), g.tensor(seqs)
        )
        rows = g.run(out)[0][0, 0]
    lengths = [head_size * n_head_v, head_size * n_head_v, head_size * n_head_k]
    free = np.ones(n_tokens, bool)
    for _, slot, columns in trees_of(seqs):
        free[columns] = False
        own = [a[columns][None] for a in net.by_head()]
        live = state[slot, 1].reshape(1, n_head_v, head_size, head_size)
        expected = ref.delta_net_tree(*own, live, parents[columns][None], keep_states=False)
        o, u, keys, g_sum = np.split(rows[columns], np.cumsum(lengths), axis=-1)
        assert_close(o.reshape(expected.o[0].shape), expected.o[0])
        assert_close(u.reshape(expected.u[0].shape), expected.u[0])
        assert_close(g_sum, expected.g_sum[0])
        np.testing.assert_array_equal(keys.reshape(net.k[columns].shape), net.k[columns])
    assert not rows[free].any()


def run_net_forest_advance(
    rng: Generator,
    head_size: int,
    n_head_k: int,
    n_head_v: int,
    n_tokens: int,
    n_seqs: int,
    n_slots: int,
    most: int,
    kind: str,
) -> None:
    """What the pass adds to the two operations that have cases of their own: one in the other's graph."""
    seqs, parents = forest_of(rng, n_tokens, n_seqs, n_slots, most, kind)
    net = net_inputs(rng, (head_size, n_head_k, n_head_v), (n_tokens,), -0.5, (head_size**-0.5, 1.0))
    state = uniform(rng, n_slots, n_head_v * head_size, head_size)
    n_o = head_size * n_head_v
    with OpGraph(threads=2) as g:
        whole, seqs_ = g.tensor(state), g.tensor(seqs)
        view = lib.ggml_view_4d(
            g.ctx,
            whole,
            head_size,
            head_size,
            n_head_v,
            n_slots,
            whole.nb[1],
            head_size * whole.nb[1],
            whole.nb[2],
            0,
        )
        rows = lib.ggml_gated_delta_net_forest_persist(
            g.ctx, *map(g.tensor, net), view, g.tensor(parents), seqs_
        )
        tail = g.columns(rows, n_o, int(rows.ne[0]) - n_o)
        live = lib.ggml_view_4d(
            g.ctx, whole, head_size, n_o, n_slots, 1, whole.nb[1], whole.nb[2], whole.nb[3], 0
        )
        out = lib.ggml_gated_delta_net_forest_commit(g.ctx, live, tail, ffi.NULL, seqs_)
        g.run(lib.ggml_cont(g.ctx, out))
        found = g.read(whole).reshape(state.shape)
    expected = state.astype(np.float64)
    for _, slot, columns in trees_of(seqs):
        if columns.stop - columns.start == 1:
            own = [a[columns][None] for a in net.by_head()]
            after = ref.delta_net_chain(*own, state[slot].reshape(1, n_head_v, head_size, head_size))[1]
            expected[slot] = after.reshape(state[slot].shape)
    assert_close(found, expected)


def run_net_forest_commit(
    rng: Generator,
    head_size: int,
    n_head_k: int,
    n_head_v: int,
    n_tokens: int,
    n_seqs: int,
    n_slots: int,
    n_layers: int,
    most: int,
    n_acc: int,
) -> None:
    seqs, _ = forest_of(rng, n_tokens, n_seqs, n_slots, most, "TREE_CHAIN")
    state = uniform(rng, n_slots, n_layers, n_head_v * head_size, head_size)
    u, k = (uniform(rng, n_layers, n_tokens, heads, head_size) for heads in (n_head_v, n_head_k))
    falling = -0.1 * np.arange(n_tokens)[:, None] - 0.01 * np.arange(n_head_v)
    g_sum = np.tile(falling, (n_layers, 1, 1)).astype(np.float32)
    path = forest_paths(rng, seqs, n_acc)
    factors = np.concatenate([a.reshape(n_layers, n_tokens, -1) for a in (u, k, g_sum)], axis=-1)
    with OpGraph(threads=2) as g:
        whole = g.tensor(state)
        live = lib.ggml_permute(g.ctx, whole, 0, 1, 3, 2)
        out = lib.ggml_gated_delta_net_forest_commit(
            g.ctx, live, g.tensor(factors), path_of(g, path, n_acc), g.tensor(seqs)
        )
        g.run(lib.ggml_cont(g.ctx, out))
        found = g.read(whole)
    expected = state.astype(np.float64)
    for i, slot, columns in trees_of(seqs):
        live = state[slot].reshape(n_layers, n_head_v, head_size, head_size)
        moved = ref.delta_net_commit(live, u[:, columns], k[:, columns], g_sum[:, columns], path[i : i + 1])
        expected[slot] = moved.reshape(state[slot].shape)
    assert_close(found, expected)


def run_top_k(rng: Generator, n: int, n_rows: int, k: int, ties: bool, bad: bool) -> None:
    values = (20.0 * (np.arange(n) // (3 if ties else 1)) / n).astype(np.float32)
    a = np.stack([rng.permutation(values) for _ in range(n_rows)])
    n_bad = 5 if bad else 0
    if bad:
        a[1], a[[2, 4]], a[[0, 2], n // 2], a[3, n // 2] = np.nan, -np.inf, np.nan, np.inf
    with OpGraph(threads=2) as g:
        found = g.run(lib.ggml_top_k_log_probs(g.ctx, g.tensor(a), k))[0][0]
    broken, found = found[:n_bad], found[n_bad:]
    assert np.isnan(broken[:, 1]).all()
    assert ((broken[:, 0] >= 0) & (broken[:, 0] < n)).all()
    best, log_probs = ref.top_k_log_probs(a[n_bad:], k)
    np.testing.assert_array_equal(found[:, 0], best)
    assert_close(found[:, 1], log_probs)


def run_all_reduce(rng: Generator, n: int, n_rows: int, cells: int, repeats: int) -> None:
    """A mailbox without another is its own: each time the sum of a value with itself."""
    a = uniform(rng, n_rows, n)
    with OpGraph(threads=2) as g:
        mailbox, out = g.tensor(np.zeros(lib.GGML_ALL_REDUCE_HEADER + 2 * cells, np.int64)), g.tensor(a)
        for _ in range(repeats):
            out = lib.ggml_all_reduce(g.ctx, out, mailbox)
        found = g.run(out)[0]
    np.testing.assert_array_equal(found.reshape(a.shape), a * np.float32(2**repeats))


def ranges_of(rng: Generator, n: int, kv: int, kind: str) -> Array:
    """First and end of what each column sees, int32 [2, n]: as the tool's own, the random ones others."""
    end = np.maximum(kv - n + np.arange(n) + 1 - kv // 8, 0)
    first = np.maximum(end - 100, 0) if kind == "TEST_RANGES_WINDOW" else np.minimum(3, end)
    if kind == "TEST_RANGES_RANDOM":
        first = rng.integers(0, kv, n)
        end = np.where(np.arange(n) % 3 == 0, first, rng.integers(first, kv + 1))
    return np.stack([first, end]).astype(np.int32)


def run_range_attention(
    rng: Generator,
    d: int,
    kv_heads: int,
    gqa: int,
    n: int,
    kv: int,
    type_k: str,
    type_v: str,
    kind: str,
    sinks: bool,
    shifted: bool = False,
) -> None:
    """Keys and values are given as float32 and converted by ggml; the reference takes what came of that.

    shifted: Each K/V head begins a row behind the one before.
    """
    q = uniform(rng, n, kv_heads * gqa, d, low=-8.0, high=8.0)
    ranges = ranges_of(rng, n, kv, kind)
    held_rows, held_heads = (kv + kv_heads, 1) if shifted else (kv, kv_heads)
    caches = [uniform(rng, held_rows, held_heads * d) for _ in "kv"]
    of_heads = uniform(rng, kv_heads * gqa, low=-10.0, high=10.0) if sinks else None
    with OpGraph(threads=2) as g:
        views, rounded = [], []
        for cache, name in zip(caches, (type_k, type_v), strict=True):
            type_ = getattr(lib, name)
            held = lib.ggml_cast(g.ctx, g.tensor(cache), type_)
            view = lib.ggml_view_3d(
                g.ctx, held, d, kv, held_heads, held.nb[1], lib.ggml_row_size(type_, d), 0
            )
            if shifted:
                view.ne[2], view.nb[2] = kv_heads, held.nb[1]
            views.append(view)
            rounded.append(lib.ggml_cast(g.ctx, held, lib.GGML_TYPE_F32))
        queries = lib.ggml_permute(g.ctx, g.tensor(q), 0, 2, 1, 3)
        out = lib.ggml_flash_attn_ranges(g.ctx, queries, *views, g.tensor(ranges), d**-0.5)
        if of_heads is not None:
            lib.ggml_flash_attn_ext_add_sinks(out, g.tensor(of_heads))
        found, k, v = (a[0] for a in g.run(out, *rounded))
    some = rng.permutation(n)[:12]  # float64 takes its time
    k, v = (a.reshape(held_rows, held_heads, d) for a in (k, v))
    if shifted:
        heads = np.r_[0, rng.permutation(kv_heads)[:6], kv_heads - 1]
        k, v = (np.stack([a[h : h + kv, 0] for h in heads], 1) for a in (k, v))
        every = (heads[:, None] * gqa + np.arange(gqa)).ravel()
        q, found, of_heads = q[:, every], found[:, every], None if of_heads is None else of_heads[every]
    expected = ref.range_attention(q[some], k, v, ranges[:, some], d**-0.5, of_heads)
    # a single column over another type than float32 is summed in float16, or multiplied with a rounded query
    narrow = n * gqa < 64 and (type_k, type_v) != ("GGML_TYPE_F32", "GGML_TYPE_F32")
    assert_close(found[some], expected, 2e-2 if narrow else TOL)


def run_range_mask(rng: Generator, n: int, kv: int, kind: str) -> None:
    ranges = ranges_of(rng, n, kv, kind)
    with OpGraph(threads=2) as g:
        mask = lib.ggml_range_mask(g.ctx, g.tensor(ranges), kv)
        found = g.run(lib.ggml_cast(g.ctx, mask, lib.GGML_TYPE_F32))[0][0, 0]
    rows = np.arange(kv)
    seen = (rows >= ranges[0][:, None]) & (rows < ranges[1][:, None])
    np.testing.assert_array_equal(found, np.where(seen, 0.0, -np.inf))


def run_forest_mask(rng: Generator, n: int, kv: int, n_seqs: int, most: int) -> None:
    seqs, parents = forest_of(rng, n, n_seqs, n_seqs, most, "TREE_RANDOM")
    rows = rng.permutation(kv)[:n].astype(np.int32)
    ranges = rng.integers(0, kv + 1, (4, n)).astype(np.int32)
    with OpGraph(threads=2) as g:
        mask = lib.ggml_forest_mask(g.ctx, *map(g.tensor, (ranges, rows, parents, seqs)), kv)
        found = g.run(lib.ggml_cast(g.ctx, mask, lib.GGML_TYPE_F32))[0][0, 0]
    at = np.arange(kv)
    seen = at == rows[:, None]
    for first, end in ranges.reshape(2, 2, n):
        seen |= (at >= first[:, None]) & (at < end[:, None])
    for _, _, columns in trees_of(seqs):
        for i in range(columns.start, columns.stop):
            path = ref.path_to(parents[columns], i - columns.start)
            seen[i, rows[columns.start + np.array(path)]] = True
    np.testing.assert_array_equal(found, np.where(seen, 0.0, -np.inf))


RUNNERS: dict[str, Callable[..., None]] = {
    "test_flash_attn_ranges": run_range_attention,
    "test_range_mask": run_range_mask,
    "test_ssm_conv_tree": run_conv,
    "test_ssm_conv_tree_commit": run_conv_commit,
    "test_gated_delta_net_tree_persist": run_net,
    "test_gated_delta_net_tree_cache_fusion": run_net_cached,
    "test_gated_delta_net_tree_commit": run_net_commit,
    "test_forest_mask": run_forest_mask,
    "test_ssm_conv_forest": run_conv_forest,
    "test_ssm_conv_forest_commit": run_conv_forest_commit,
    "test_gated_delta_net_forest_persist": run_net_forest,
    "test_gated_delta_net_forest_commit": run_net_forest_commit,
    "test_gated_delta_net_forest_advance": run_net_forest_advance,
    "test_delta_net_forest_input": run_net_forest_input,
    "test_gated_delta_net_chunked": run_net_chunked,
    "test_gated_delta_net_chunked_in_place": run_net_chunked_in_place,
    "test_delta_net_input": run_net_input,
    "test_delta_net_tree": run_net_tree,
    "test_top_k_log_probs": run_top_k,
    "test_all_reduce": run_all_reduce,
}


def test_every_operation_of_ours_has_cases() -> None:
    assert len(OPERATIONS) >= 5
    ran = {name for name, _ in CASES}
    for operation in OPERATIONS:
        calls = [name for name, s in STRUCTS.items() if re.search(rf"\b{operation}\(ctx\b", s.text)]
        assert ran.intersection(calls), f"test-backend-ops has no case of {operation}"
    assert ran <= set(STRUCTS) == set(RUNNERS), "a test struct of ours has no counterpart here"


def label(case: tuple[str, backend_cases.Case]) -> str:
    return "-".join([case[0].removeprefix("test_"), *map(str, case[1].values())])


@pytest.mark.parametrize("case", CASES, ids=label)
def test_case(case: tuple[str, backend_cases.Case]) -> None:
    name, parameters = case
    RUNNERS[name](np.random.default_rng(zlib.crc32(label(case).encode())), **parameters)


def test_loops_and_defaults_are_read() -> None:
    source = """
struct test_a : public test_case {
    test_a(int64_t n = 3, test_kind kind = KIND_X, bool b = false)
        : n(n), kind(kind), b(b) {}
    ggml_tensor * build_graph(ggml_context * ctx) override { return ggml_ours(ctx, n); }
};
struct test_b : public test_a {
    using test_a::test_a;
};
struct test_c : public test_case {
    ggml_tensor * build_graph(ggml_context * ctx) override { return ggml_other(ctx); }
};
static std::vector<std::unique_ptr<test_case>> make() {
    for (int64_t n : { 1, 20 }) { // a comment with { and new test_a(7)
        for (test_kind kind : {KIND_Y,
                               KIND_Z}) {
            test_cases.emplace_back(new test_a(n, kind, n == 20 ? true : false));
        }
        test_cases.emplace_back(new test_c(n, {1, 1}));
    }
    test_cases.emplace_back(new test_b(5, KIND_X, /*b=*/ true));
    test_cases.emplace_back(new test_a());
}
"""
    structs = backend_cases.structs_calling(source, ["ggml_ours"])
    assert list(structs) == ["test_a", "test_b"]
    found = [(name, *case.values()) for name, case in backend_cases.cases(source, "make", structs)]
    assert found == [
        ("test_a", 1, "KIND_Y", False),
        ("test_a", 1, "KIND_Z", False),
        ("test_a", 20, "KIND_Y", True),
        ("test_a", 20, "KIND_Z", True),
        ("test_b", 5, "KIND_X", True),
        ("test_a", 3, "KIND_X", False),
    ]
    guarded = source.replace("    for (int64_t n :", "    if (more) {\n    for (int64_t n :").replace(
        "    test_cases.emplace_back(new test_b", "    }\n    test_cases.emplace_back(new test_b"
    )
    with pytest.raises(ValueError, match=r"test_a\(n, kind.* in a block that is not understood"):
        list(backend_cases.cases(guarded, "make", structs))
