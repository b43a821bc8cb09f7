"""Tests of the tree operations over several sequences: against the float64 oracle and against each tree on its own.

Blocks of columns differ in size, entries may be empty, columns may belong to no sequence, and slots are taken in any order. All
run on the CPU and on each GPU that is present, in about 3 s on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from dflash_ggml.ggml.bindings import ffi, lib
from reference import tree_ops as ref
from reference.graph import OpGraph

TOL = 5e-6
TAPS, CHANNELS = 4, 96
SIZE, N_KEY, N_VALUE = 32, 2, 6
FACTORS = SIZE * (N_VALUE + N_KEY) + N_VALUE

MakeGraph = Callable[..., OpGraph]
Array = np.ndarray


@dataclass(frozen=True)
class Forest:
    """Columns in which trees lie: seqs int32 [entries, 3], parents int32 [columns] from each tree's first column."""

    seqs: Array
    parents: Array

    @property
    def trees(self) -> list[tuple[int, int, slice, Array]]:
        """Entry, slot, columns and parents of each tree that is there."""
        there = [(i, *map(int, entry)) for i, entry in enumerate(self.seqs) if entry[2]]
        return [(i, slot, slice(a, a + n), self.parents[a : a + n]) for i, slot, a, n in there]

    @property
    def unowned(self) -> Array:
        """Columns of no tree."""
        free = np.ones(len(self.parents), bool)
        for _, _, columns, _ in self.trees:
            free[columns] = False
        return np.flatnonzero(free)

    def paths(self, rng: np.random.Generator, longest: int) -> Array:
        """A path from the root to a random node of each tree, or none; int32 [entries, longest]."""
        out = np.full((len(self.seqs), longest), -1, np.int32)
        for i, _, _, parents in self.trees:
            path = (
                ref.path_to(parents, int(rng.integers(len(parents))))[:longest] if rng.random() < 0.8 else []
            )
            out[i, : len(path)] = path
        return out


def random_forest(rng: np.random.Generator, widths: list[int], slots: int, spare: int = 0) -> Forest:
    """Trees of these widths in columns of any order, empty entries with rubbish in them."""
    order = rng.permutation(len(widths))
    first, at = np.zeros(len(widths), int), 0
    for i in order:
        first[i], at = at, at + widths[i]
    taken = rng.permutation(slots)[: len(widths)]
    seqs = np.stack([taken, first, widths], axis=1).astype(np.int32)
    seqs[seqs[:, 2] == 0, :2] = -7
    parents = np.full(at + spare, -1, np.int32)
    for slot, a, n in seqs:
        if n and slot >= 0:
            parents[a : a + n] = ref.random_parents(rng, n, "tree")
    return Forest(seqs, parents)


def normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


def unit(a: Array) -> Array:
    return a / np.linalg.norm(a, axis=-1, keepdims=True)


def assert_close(found: Array, expected: Array, tol: float = TOL) -> None:
    assert found.shape == expected.shape and np.isfinite(found).all()
    assert np.abs(found - expected).max(initial=0.0) <= tol * np.abs(expected).max(initial=1e-30)


def layer_of(g: OpGraph, whole, layer: int, *ne: int):
    """One layer's states [*ne, slots] of whole [a, b, layers, slots]."""
    if len(ne) == 2:
        offset = layer * whole.nb[2]
        return lib.ggml_view_3d(g.ctx, whole, *ne, whole.ne[3], whole.nb[1], whole.nb[3], offset)
    strides = whole.nb[1], ne[0] * whole.nb[1], whole.nb[3]
    return lib.ggml_view_4d(g.ctx, whole, *ne, whole.ne[3], *strides, layer * whole.nb[2])


def slots_first(g: OpGraph, whole):
    """whole [a, b, layers, slots] as the commits want it, [a, b, slots, layers]."""
    return lib.ggml_permute(g.ctx, whole, 0, 1, 3, 2)


@dataclass(frozen=True)
class Inputs:
    """Of one pass through a layer: conv inputs and taps, then q, k, v, g, beta of the delta net, a row per column."""

    x: Array
    c: Array
    net: tuple[Array, ...]

    @classmethod
    def random(cls, rng: np.random.Generator, n: int) -> Inputs:
        q, k = (unit(normal(rng, n, N_KEY, SIZE)) for _ in "qk")
        g = rng.uniform(-0.5, -1e-4, (n, N_VALUE, 1)).astype(np.float32)
        beta = rng.uniform(0, 1, (n, N_VALUE, 1)).astype(np.float32)
        net = q, k, normal(rng, n, N_VALUE, SIZE), g, beta
        return cls(normal(rng, n, CHANNELS), normal(rng, CHANNELS, TAPS), net)

    def of(self, columns) -> Inputs:
        return Inputs(self.x[columns], self.c, tuple(a[columns] for a in self.net))


def states_of(rng: np.random.Generator, slots: int, layers: int) -> tuple[Array, Array]:
    """Conv windows and delta-net states of all slots, a slot in one piece."""
    return normal(rng, slots, layers, CHANNELS, TAPS - 1), normal(rng, slots, layers, N_VALUE * SIZE, SIZE)


def run_pass(
    graph: MakeGraph,
    states: tuple[Array, Array],
    layer: int,
    inputs: Inputs,
    forest: Forest,
    threads: int = 2,
) -> tuple[Array, Array]:
    """Result rows of the convolution and of the delta net; NaN in slots that no tree has must not show."""
    with graph(threads=threads) as g:
        windows, deltas = (g.tensor(a) for a in states)
        parents, seqs = g.tensor(forest.parents), g.tensor(forest.seqs)
        window = layer_of(g, windows, layer, TAPS - 1, CHANNELS)
        conv = lib.ggml_ssm_conv_forest(g.ctx, window, g.tensor(inputs.x), g.tensor(inputs.c), parents, seqs)
        state = layer_of(g, deltas, layer, SIZE, SIZE, N_VALUE)
        net = map(g.tensor, inputs.net)
        rows = lib.ggml_gated_delta_net_forest_persist(g.ctx, *net, state, parents, seqs)
        found = g.run(conv, rows)
        for whole, array in zip((windows, deltas), states):
            np.testing.assert_array_equal(g.read(whole).reshape(array.shape), array)
    return found[0][0, 0], found[1][0, 0]


def run_commit(
    graph: MakeGraph, states: tuple[Array, Array], x: Array, factors: Array, path: Array, forest: Forest
) -> tuple[Array, Array]:
    """The states after the paths; x and factors [layers, columns, ...]."""
    with graph(threads=2) as g:
        wholes = [g.tensor(a) for a in states]
        path_, seqs = g.tensor(path), g.tensor(forest.seqs)
        conv = lib.ggml_ssm_conv_forest_commit(g.ctx, slots_first(g, wholes[0]), g.tensor(x), path_, seqs)
        delta = lib.ggml_gated_delta_net_forest_commit(
            g.ctx, slots_first(g, wholes[1]), g.tensor(factors), path_, seqs
        )
        graph_ = g.prepare(conv, delta)
        assert lib.ggml_backend_graph_compute(g.backend, graph_) == lib.GGML_STATUS_SUCCESS
        windows, deltas = (g.read(whole).reshape(a.shape) for whole, a in zip(wholes, states))
    return windows, deltas


def alone(
    graph: MakeGraph, states: tuple[Array, Array], layer: int, inputs: Inputs, forest: Forest, tree
) -> tuple:
    """What the operations of one tree give for one of the forest's."""
    _, slot, columns, parents = tree
    own = inputs.of(columns)
    with graph(threads=2) as g:
        tree_ = g.tensor(parents[None])
        conv = lib.ggml_ssm_conv_tree(
            g.ctx, g.tensor(states[0][slot, layer][None]), g.tensor(own.x[None]), g.tensor(own.c), tree_
        )
        state = g.tensor(states[1][slot, layer].reshape(1, N_VALUE, SIZE, SIZE))
        net = (g.tensor(a[None]) for a in own.net)
        found = g.run(conv, lib.ggml_gated_delta_net_tree_persist(g.ctx, *net, state, tree_))
    return found[0][0, 0], found[1][0, 0]


WIDTHS = [[1], [5, 3], [1, 1, 1, 1, 1], [17, 0, 1, 40, 0, 6], [0, 2], [70, 9], [8] * 8]


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("spare", [0, 3])
def test_a_forest_is_its_trees(graph: MakeGraph, widths: list[int], spare: int) -> None:
    rng = np.random.default_rng(sum(widths) + spare)
    forest = random_forest(rng, widths, len(widths) + 2, spare)
    states = states_of(rng, len(widths) + 2, 2)
    inputs = Inputs.random(rng, len(forest.parents))
    conv, rows = run_pass(graph, states, 1, inputs, forest)
    n_o = SIZE * N_VALUE
    for tree in forest.trees:
        _, slot, columns, parents = tree
        own = inputs.of(columns)
        expected = ref.conv_tree(states[0][slot, 1][None], own.x[None], own.c, parents[None])[0]
        assert_close(conv[columns], expected, 2e-6)
        q, k, v, g, beta = (a[None] for a in own.net)
        state = states[1][slot, 1].reshape(1, N_VALUE, SIZE, SIZE)
        net = ref.delta_net_tree(q, k, v, g[..., 0], beta[..., 0], state, parents[None])
        o, u, keys, g_sum = np.split(rows[columns], [n_o, 2 * n_o, 2 * n_o + SIZE * N_KEY], axis=-1)
        assert_close(o, net.o.reshape(o.shape))
        assert_close(u, net.u.reshape(u.shape))
        assert_close(g_sum, net.g_sum.reshape(g_sum.shape))
        np.testing.assert_array_equal(keys, own.net[1].reshape(keys.shape))
        conv_alone, rows_alone = alone(graph, states, 1, inputs, forest, tree)
        np.testing.assert_array_equal(conv[columns], conv_alone)
        if graph is OpGraph:
            np.testing.assert_array_equal(rows[columns], rows_alone)
    assert not conv[forest.unowned].any() and not rows[forest.unowned].any()


def test_slots_of_no_tree_are_not_read(graph: MakeGraph) -> None:
    rng = np.random.default_rng(1)
    forest = random_forest(rng, [3, 0, 9], 6, 2)
    states = states_of(rng, 6, 2)
    inputs = Inputs.random(rng, len(forest.parents))
    expected = run_pass(graph, states, 0, inputs, forest)
    used = [slot for _, slot, _, _ in forest.trees]
    for array in states:
        array[np.setdiff1d(np.arange(6), used)] = array[:, 1] = 1e30
    for found, other in zip(run_pass(graph, states, 0, inputs, forest), expected):
        np.testing.assert_array_equal(found, other)


@pytest.mark.parametrize("longest", [1, 4, 30])
def test_successive_commits_follow_the_accepted_path(graph: MakeGraph, longest: int) -> None:
    """8 passes over a changing choice of 6 sequences: each state is that of the stock recurrence over its own accepted tokens,
    and a sequence that is not there keeps its state to the bit."""
    rng = np.random.default_rng(longest)
    slots, layers = 6, 2
    start = states = states_of(rng, slots, layers)
    sequences: list[list[list[Inputs]]] = [[[] for _ in range(layers)] for _ in range(slots)]
    for _ in range(8):
        widths = [int(n) for n in rng.choice([0, 1, 1, 4, 12, 30], size=int(rng.integers(1, slots + 1)))]
        forest = random_forest(rng, widths, slots, 1)
        inputs = [Inputs.random(rng, len(forest.parents)) for _ in range(layers)]
        path = forest.paths(rng, longest)
        x = np.stack([i.x for i in inputs])
        rows = [run_pass(graph, states, layer, i, forest)[1] for layer, i in enumerate(inputs)]
        factors = np.stack(rows)[..., SIZE * N_VALUE :]
        before = states
        states = run_commit(graph, states, x, np.ascontiguousarray(factors), path, forest)
        moved = set()
        for i, slot, columns, _ in forest.trees:
            nodes = columns.start + np.array(ref.accepted(path[i]), int)
            if len(nodes):
                moved.add(slot)
            for layer in range(layers):
                sequences[slot][layer].append(inputs[layer].of(nodes))
        for now, then in zip(states, before):
            for slot in set(range(slots)) - moved:
                np.testing.assert_array_equal(now[slot], then[slot])
    for slot, layer in np.ndindex(slots, layers):
        text = sequences[slot][layer]
        x = np.concatenate([start[0][slot, layer].T, *(t.x for t in text)])
        np.testing.assert_array_equal(states[0][slot, layer], x[-(TAPS - 1) :].T)
        state = start[1][slot, layer].reshape(1, N_VALUE, SIZE, SIZE)
        if sum(len(t.x) for t in text):
            q, k, v, g, beta = (np.concatenate(parts)[None] for parts in zip(*(t.net for t in text)))
            state = ref.delta_net_chain(q, k, v, g[..., 0], beta[..., 0], state)[1]
        assert_close(states[1][slot, layer], state.reshape(N_VALUE * SIZE, SIZE))


def test_bits_do_not_depend_on_threads() -> None:
    rng = np.random.default_rng(3)
    forest = random_forest(rng, [9, 1, 0, 22], 4, 2)
    states = states_of(rng, 4, 2)
    inputs = Inputs.random(rng, len(forest.parents))
    first = run_pass(OpGraph, states, 0, inputs, forest, 1)
    for threads in (2, 3, 7):
        for found, expected in zip(run_pass(OpGraph, states, 0, inputs, forest, threads), first):
            np.testing.assert_array_equal(found, expected)


def test_sequences_of_one_column_advance_in_the_pass(graph: MakeGraph) -> None:
    """A commit without a path behind the pass's operations; trees of more nodes are left alone there."""
    rng = np.random.default_rng(4)
    forest = random_forest(rng, [1, 6, 1, 0], 4)
    states = states_of(rng, 4, 2)
    inputs = Inputs.random(rng, len(forest.parents))
    with graph(threads=2) as g:
        windows, deltas = (g.tensor(a) for a in states)
        parents, seqs, x = (g.tensor(a) for a in (forest.parents, forest.seqs, inputs.x))
        window = layer_of(g, windows, 1, TAPS - 1, CHANNELS)
        conv = lib.ggml_ssm_conv_forest(g.ctx, window, x, g.tensor(inputs.c), parents, seqs)
        conv_after = lib.ggml_ssm_conv_forest_commit(g.ctx, window, x, ffi.NULL, seqs)
        state = layer_of(g, deltas, 1, SIZE, SIZE, N_VALUE)
        net = map(g.tensor, inputs.net)
        rows = lib.ggml_gated_delta_net_forest_persist(g.ctx, *net, state, parents, seqs)
        n_o = SIZE * N_VALUE
        factors = g.columns(rows, n_o, FACTORS)
        live = layer_of(g, deltas, 1, SIZE, n_o)
        after = lib.ggml_gated_delta_net_forest_commit(g.ctx, live, factors, ffi.NULL, seqs)
        graph_ = g.prepare(conv, conv_after, rows, after)
        assert lib.ggml_backend_graph_compute(g.backend, graph_) == lib.GGML_STATUS_SUCCESS
        found = [g.read(t)[0, 0] for t in (conv, rows)]
        moved = [g.read(whole).reshape(a.shape) for whole, a in zip((windows, deltas), states)]
    expected = run_pass(graph, states, 1, inputs, forest)
    for a, b in zip(found, expected):
        np.testing.assert_array_equal(a, b)
    path = np.where(forest.seqs[:, 2:] == 1, 0, -1).astype(np.int32)
    x, factors = inputs.x[None], np.ascontiguousarray(expected[1][None, :, n_o:])
    one_layer = tuple(np.ascontiguousarray(a[:, 1:]) for a in states)
    for i, after in enumerate(run_commit(graph, one_layer, x, factors, path, forest)):
        np.testing.assert_array_equal(moved[i][:, 0], states[i][:, 0])
        assert_close(moved[i][:, 1:], after, 1e-6)


@pytest.mark.parametrize("widths, spare", [([1], 0), ([3, 0, 12, 1], 2), ([40, 24], 0), ([8] * 8, 0)])
@pytest.mark.parametrize("n_ranges", [1, 2])
def test_a_mask_shows_ranges_ancestors_and_the_own_row(
    graph: MakeGraph, widths: list[int], spare: int, n_ranges: int
) -> None:
    rng = np.random.default_rng(len(widths))
    forest, n_kv = random_forest(rng, widths, len(widths), spare), 301
    n = len(forest.parents)
    rows = rng.permutation(n_kv)[:n].astype(np.int32)
    ranges = rng.integers(0, n_kv + 1, (2 * n_ranges, n)).astype(np.int32)
    with graph(threads=2) as g:
        mask = lib.ggml_forest_mask(g.ctx, *map(g.tensor, (ranges, rows, forest.parents, forest.seqs)), n_kv)
        found = g.run(lib.ggml_cast(g.ctx, mask, lib.GGML_TYPE_F32))[0][0, 0]
    seen = np.zeros((n, n_kv), bool)
    for i, bounds in enumerate(ranges.T):
        for first, end in bounds.reshape(-1, 2):
            seen[i, first:end] = True
        seen[i, rows[i]] = True
    for _, _, columns, parents in forest.trees:
        for node in range(len(parents)):
            seen[columns.start + node, rows[columns.start + np.array(ref.path_to(parents, node))]] = True
    np.testing.assert_array_equal(found, np.where(seen, 0.0, -np.inf))


def test_a_range_mask_of_two_ranges(graph: MakeGraph) -> None:
    ranges = np.array([[0, 9, 5], [4, 3, 20], [10, 12, 7], [12, 12, 9]], np.int32)
    with graph() as g:
        mask = lib.ggml_range_mask(g.ctx, g.tensor(ranges), 20)
        found = g.run(lib.ggml_cast(g.ctx, mask, lib.GGML_TYPE_F32))[0][0, 0]
    seen = [np.r_[0:4, 10:12], [], np.r_[5:20]]
    for row, rows in zip(found, seen, strict=True):
        np.testing.assert_array_equal(np.flatnonzero(row == 0), rows)


@pytest.mark.parametrize("type_", ["GGML_TYPE_F32", "GGML_TYPE_F16", "GGML_TYPE_Q8_0"])
@pytest.mark.parametrize(
    "widths, spare", [([1], 0), ([1] * 8, 0), ([3, 0, 12, 1], 2), ([40, 23], 1), ([8] * 8, 0)]
)
def test_attention_does_not_need_the_rows_of_others(
    graph: MakeGraph, type_: str, widths: list[int], spare: int
) -> None:
    """Spans change nothing, on the CPU no bit."""
    rng = np.random.default_rng(len(widths))
    forest, d, kv_heads, gqa = random_forest(rng, widths, len(widths), spare), 128, 2, 3
    n, n_kv = len(forest.parents), 1536
    q, k, v = normal(rng, n, kv_heads * gqa, d), *(normal(rng, n_kv, kv_heads * d) for _ in "kv")
    seen, spans = np.zeros((n, n_kv), bool), np.zeros((len(widths), 2), np.int32)
    seen[:, 0] = True  # of columns of no tree
    for entry, _, columns, _ in forest.trees:
        first = 60 + entry * 180
        spans[entry] = first, first + int(rng.integers(1, 170))
        rows = np.arange(n_kv)
        own = (rows >= first) & (rows < spans[entry, 1])
        seen[columns] = own & (rng.random((columns.stop - columns.start, n_kv)) < 0.7)
        seen[columns, first] = True
    mask = np.where(seen, 0.0, -np.inf).astype(np.float32)
    found = []
    for with_spans in (False, True):
        with graph(threads=2) as g:
            caches = [lib.ggml_cast(g.ctx, g.tensor(a), getattr(lib, type_)) for a in (k, v)]
            size = lib.ggml_row_size(caches[0].type, d)
            views = [lib.ggml_view_3d(g.ctx, t, d, n_kv, kv_heads, t.nb[1], size, 0) for t in caches]
            queries = lib.ggml_permute(g.ctx, g.tensor(q), 0, 2, 1, 3)
            mask_ = lib.ggml_cast(g.ctx, g.tensor(mask), lib.GGML_TYPE_F16)
            out = lib.ggml_flash_attn_ext(g.ctx, queries, *views, mask_, d**-0.5, 0.0, 0.0)
            lib.ggml_prec_set_acc(out, lib.GGML_PREC_F32)
            if with_spans:
                lib.ggml_flash_attn_ext_add_seqs(out, g.tensor(forest.seqs), g.tensor(spans))
            found.append(g.run(out)[0][0])
    plain, spanned = (np.delete(a, forest.unowned, axis=0) for a in found)
    if graph is OpGraph:
        np.testing.assert_array_equal(spanned, plain)
    assert_close(spanned, plain, 2e-3)
