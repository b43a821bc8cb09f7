"""Tests of the tree operations against a float64 oracle, against ggml's chain operations, and against themselves.

Every test runs on the CPU and on each GPU that is present. Tolerances, relative to the largest magnitude:
CONV for the convolution against float64, TOL for the delta net (measured on the CPU: 4e-7; a commit of 128
nodes 2e-6). Runs in about 10 s on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from dflash_ggml.ggml.bindings import lib
from reference import tree_ops as ref
from reference.graph import OpGraph

CONV = 2e-6
TOL = 5e-6
KINDS = ("chain", "fan", "tree", "forest", "deep")

MakeGraph = Callable[..., OpGraph]


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def assert_close(found: np.ndarray, expected: np.ndarray, tol: float = TOL) -> None:
    """Largest difference at most `tol` times the largest expected magnitude."""
    assert found.shape == expected.shape
    assert np.isfinite(found).all()
    assert np.abs(found - expected).max(initial=0.0) <= tol * np.abs(expected).max(initial=1e-30)


def random_walk(rng: np.random.Generator, parents: np.ndarray) -> list[int]:
    """The path from a root to a random node."""
    return ref.path_to(parents, int(rng.integers(len(parents))))


# ---- convolution


def conv_inputs(
    rng: np.random.Generator, channels: int, taps: int, n: int, seqs: int, kind: str
) -> tuple[np.ndarray, ...]:
    """state, x, c, parents."""
    parents = np.stack([ref.random_parents(rng, n, kind) for _ in range(seqs)])
    return (
        normal(rng, seqs, channels, taps - 1),
        normal(rng, seqs, n, channels),
        normal(rng, channels, taps),
        parents,
    )


def conv_tree(graph: MakeGraph, *arrays: np.ndarray, threads: int = 2) -> np.ndarray:
    with graph(threads=threads) as g:
        return g.run(lib.ggml_ssm_conv_tree(g.ctx, *map(g.tensor, arrays)))[0][0]


def conv_stock(graph: MakeGraph, state: np.ndarray, x: np.ndarray, c: np.ndarray) -> np.ndarray:
    """ggml_ssm_conv over the tokens of x in order."""
    window = np.concatenate([state, x.transpose(0, 2, 1)], axis=2)
    with graph() as g:
        return g.run(lib.ggml_ssm_conv(g.ctx, g.tensor(window), g.tensor(c)))[0][0]


def conv_commit(graph: MakeGraph, *arrays: np.ndarray, threads: int = 2) -> np.ndarray:
    with graph(threads=threads) as g:
        return g.run(lib.ggml_ssm_conv_tree_commit(g.ctx, *map(g.tensor, arrays)))[0][0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "channels, taps, n, seqs", [(256, 4, 1, 1), (300, 4, 33, 2), (130, 2, 9, 3), (64, 9, 96, 1)]
)
def test_conv_equals_the_oracle(
    graph: MakeGraph, kind: str, channels: int, taps: int, n: int, seqs: int
) -> None:
    state, x, c, parents = conv_inputs(np.random.default_rng(n), channels, taps, n, seqs, kind)
    assert_close(conv_tree(graph, state, x, c, parents), ref.conv_tree(state, x, c, parents), CONV)


@pytest.mark.parametrize("kind", ["chain", "tree"])
@pytest.mark.parametrize("taps", range(2, 37))
def test_conv_bits_are_defined_on_the_cpu(taps: int, kind: str) -> None:
    """Every term rounded, taps added oldest first: the same bits on any machine and of any compiler."""
    inputs = conv_inputs(np.random.default_rng(taps), 301, taps, 12, 2, kind)
    found = conv_tree(OpGraph, *inputs)
    np.testing.assert_array_equal(found.view(np.int32), ref.conv_tree(*inputs, np.float32).view(np.int32))


def assert_stock_conv(
    graph: MakeGraph, found: np.ndarray, state: np.ndarray, x: np.ndarray, c: np.ndarray
) -> None:
    """`found` against ggml_ssm_conv of a chain: bit for bit on a GPU, to rounding on the CPU.

    The CPU's stock kernel is a plain loop, which compilers contract and reorder as they see fit. A sum of n
    products in any order, contracted or not, rounds each product at most n times on its way, so its error is at
    most gamma_n * sum |products| with gamma_n = n u / (1 - n u), u = 2**-24 (Higham, Accuracy and Stability of
    Numerical Algorithms, 3.1); two such sums differ by at most twice that.
    """
    stock = conv_stock(graph, state, x, c)
    if graph is not OpGraph:
        np.testing.assert_array_equal(found, stock)
        return
    n_u = c.shape[1] * 2.0**-24
    chain = np.tile(np.arange(-1, x.shape[1] - 1), (x.shape[0], 1))
    magnitude = ref.conv_tree(abs(state), abs(x), abs(c), chain)
    excess = np.abs(found.astype(np.float64) - stock) - 2 * n_u / (1 - n_u) * magnitude
    assert excess.max() <= 0


def test_conv_of_a_chain_is_the_stock_op(graph: MakeGraph) -> None:
    state, x, c, parents = conv_inputs(np.random.default_rng(1), 256, 4, 40, 2, "chain")
    assert_stock_conv(graph, conv_tree(graph, state, x, c, parents), state, x, c)


def test_conv_of_every_path_is_the_stock_op(graph: MakeGraph) -> None:
    rng = np.random.default_rng(2)
    state, x, c, parents = conv_inputs(rng, 128, 4, 32, 1, "tree")
    out = conv_tree(graph, state, x, c, parents)
    for leaf in set(range(32)) - set(parents[0]):
        path = ref.path_to(parents[0], leaf)
        assert_stock_conv(graph, out[:, path], state, x[:, path], c)


@pytest.mark.parametrize("taps", [2, 4, 9])
def test_conv_of_every_path_is_the_conv_of_a_chain_bit_for_bit(graph: MakeGraph, taps: int) -> None:
    state, x, c, parents = conv_inputs(np.random.default_rng(3), 130, taps, 40, 1, "forest")
    out = conv_tree(graph, state, x, c, parents)
    for leaf in set(range(40)) - set(parents[0]):
        path = ref.path_to(parents[0], leaf)
        chain = np.arange(-1, len(path) - 1, dtype=np.int32)[None]
        np.testing.assert_array_equal(out[:, path], conv_tree(graph, state, x[:, path], c, chain))


def test_conv_reads_a_column_range_of_wider_rows(graph: MakeGraph) -> None:
    state, x, c, parents = conv_inputs(np.random.default_rng(3), 128, 4, 12, 2, "tree")
    wide = np.pad(x, ((0, 0), (0, 0), (5, 9)), constant_values=np.nan)
    with graph(threads=2) as g:
        view = g.columns(g.tensor(wide), 5, 128)
        (out,) = g.run(lib.ggml_ssm_conv_tree(g.ctx, g.tensor(state), view, g.tensor(c), g.tensor(parents)))
    np.testing.assert_array_equal(out[0], conv_tree(graph, state, x, c, parents))


@pytest.mark.parametrize("taps", [2, 4, 9])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 11])
def test_conv_commit_keeps_the_last_inputs(graph: MakeGraph, taps: int, length: int) -> None:
    rng = np.random.default_rng(length)
    state, x, _, _ = conv_inputs(rng, 200, taps, 24, 3, "tree")
    path = np.sort(rng.permuted(np.tile(np.arange(24), (3, 1)), axis=1)[:, :length], axis=1)
    padded = np.pad(path, ((0, 0), (0, 4)), constant_values=-1).astype(np.int32)
    np.testing.assert_array_equal(conv_commit(graph, state, x, padded), ref.conv_commit(state, x, padded))
    shared = padded[:1]
    np.testing.assert_array_equal(conv_commit(graph, state, x, shared), ref.conv_commit(state, x, shared))


def test_successive_conv_commits_follow_the_accepted_path(graph: MakeGraph) -> None:
    rng = np.random.default_rng(4)
    state = start = normal(rng, 1, 96, 3)
    text: list[np.ndarray] = []
    for _ in range(12):
        _, x, _, parents = conv_inputs(rng, 96, 4, 15, 1, "tree")
        path = random_walk(rng, parents[0])
        state = conv_commit(graph, state, x, np.array([path + [-1] * (16 - len(path))], np.int32))
        text.extend(x[0, path])
    np.testing.assert_array_equal(state[0], np.concatenate([start[0], np.array(text).T], axis=1)[:, -3:])


# ---- delta net


def net_inputs(
    rng: np.random.Generator,
    size: int,
    n_key: int,
    n_value: int,
    n: int,
    seqs: int = 1,
    kind: str = "tree",
    decay: float = 0.5,
) -> tuple[np.ndarray, ...]:
    """q, k, v, g, beta, state, parents in the operation's shapes; g is uniform in [-decay, -1e-4]."""
    q, k = (normal(rng, seqs, n, n_key, size) for _ in range(2))
    q, k = (a / np.linalg.norm(a, axis=-1, keepdims=True) for a in (q, k))
    g = rng.uniform(-decay, -1e-4, (seqs, n, n_value, 1)).astype(np.float32)
    beta = rng.uniform(0, 1, (seqs, n, n_value, 1)).astype(np.float32)
    parents = np.stack([ref.random_parents(rng, n, kind) for _ in range(seqs)])
    return q, k, normal(rng, seqs, n, n_value, size), g, beta, normal(rng, seqs, n_value, size, size), parents


def oracle(inputs: tuple[np.ndarray, ...]) -> ref.DeltaNetTree:
    q, k, v, g, beta, state, parents = inputs
    return ref.delta_net_tree(q, k, v, g[..., 0], beta[..., 0], state, parents)


def net_tree(graph: MakeGraph, inputs: tuple[np.ndarray, ...], threads: int = 2) -> np.ndarray:
    """Result rows [seqs, n, o | u | k | G]."""
    with graph(threads=threads) as g:
        return g.run(lib.ggml_gated_delta_net_tree_persist(g.ctx, *map(g.tensor, inputs)))[0][0]


def split(rows: np.ndarray, inputs: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """o, u, k, G of result rows."""
    k, v = inputs[1], inputs[2]
    n_v, n_k = v[0, 0].size, k[0, 0].size
    o, u, keys, g_sum = np.split(rows, [n_v, 2 * n_v, 2 * n_v + n_k], axis=-1)
    return o.reshape(v.shape), u.reshape(v.shape), keys.reshape(k.shape), g_sum


def net_stock(graph: MakeGraph, inputs: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
    """ggml_gated_delta_net over the tokens in order: outputs like v, and the state after the last token."""
    v, state = inputs[2], inputs[5]
    with graph() as g:
        (flat,) = g.run(lib.ggml_gated_delta_net(g.ctx, *map(g.tensor, inputs[:6]), 1))
    return flat.ravel()[: v.size].reshape(v.shape), flat.ravel()[v.size :].reshape(state.shape)


def net_commit(
    graph: MakeGraph, state: np.ndarray, factors: np.ndarray, path: np.ndarray, threads: int = 2
) -> np.ndarray:
    with graph(threads=threads) as g:
        tensors = map(g.tensor, (state, factors, path.astype(np.int32)))
        return g.run(lib.ggml_gated_delta_net_tree_commit(g.ctx, *tensors))[0]


def along(inputs: tuple[np.ndarray, ...], path: list[int]) -> tuple[np.ndarray, ...]:
    """The inputs of one sequence reduced to a path, as a chain."""
    chain = np.arange(-1, len(path) - 1, dtype=np.int32)[None]
    return *(a[:, path] for a in inputs[:5]), inputs[5], chain


def factors_of(rows: np.ndarray, inputs: tuple[np.ndarray, ...]) -> np.ndarray:
    return rows[..., inputs[2][0, 0].size :]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "size, n_key, n_value, n, seqs",
    [
        (16, 1, 4, 96, 1),
        (32, 2, 6, 33, 2),
        (64, 2, 8, 32, 1),
        (64, 4, 4, 1, 3),
        (128, 1, 3, 48, 1),
        (128, 2, 2, 17, 2),
    ],
)
def test_net_equals_the_oracle(
    graph: MakeGraph, kind: str, size: int, n_key: int, n_value: int, n: int, seqs: int
) -> None:
    inputs = net_inputs(np.random.default_rng(n), size, n_key, n_value, n, seqs, kind)
    expected = oracle(inputs)
    o, u, k, g_sum = split(net_tree(graph, inputs), inputs)
    assert_close(o, expected.o)
    assert_close(u, expected.u)
    assert_close(g_sum, expected.g_sum)
    np.testing.assert_array_equal(k, inputs[1])


def test_net_of_any_size_on_the_cpu() -> None:
    inputs = net_inputs(np.random.default_rng(5), 24, 1, 3, 20)
    o, u, _, _ = split(net_tree(OpGraph, inputs), inputs)
    assert_close(o, oracle(inputs).o)
    assert_close(u, oracle(inputs).u)


@pytest.mark.parametrize("decay", [20.0, 300.0])
def test_net_survives_strong_decay(graph: MakeGraph, decay: float) -> None:
    inputs = net_inputs(np.random.default_rng(6), 32, 2, 4, 40, kind="deep", decay=decay)
    expected = oracle(inputs)
    rows = net_tree(graph, inputs)
    o, u, _, g_sum = split(rows, inputs)
    assert_close(o, expected.o)
    assert_close(u, expected.u)
    assert_close(g_sum, expected.g_sum)
    path = ref.path_to(inputs[6][0], 39)
    # a difference of sums near -1e4 has lost up to 1e-3 of its digits' worth
    assert_close(
        net_commit(graph, inputs[5], factors_of(rows, inputs), np.array([path])), expected.states[:, 39], 1e-3
    )


@pytest.mark.parametrize("size", [16, 64, 128])
def test_net_of_a_chain_is_the_stock_op(graph: MakeGraph, size: int) -> None:
    inputs = net_inputs(np.random.default_rng(7), size, 2, 4, 40, 2, "chain")
    rows = net_tree(graph, inputs)
    o, state = net_stock(graph, inputs)
    assert_close(split(rows, inputs)[0], o)
    path = np.tile(np.arange(40), (2, 1))
    assert_close(net_commit(graph, inputs[5], factors_of(rows, inputs), path), state)


def test_net_of_every_path_is_the_stock_op(graph: MakeGraph) -> None:
    inputs = net_inputs(np.random.default_rng(8), 64, 2, 4, 32)
    rows = net_tree(graph, inputs)
    o = split(rows, inputs)[0]
    for leaf in set(range(32)) - set(inputs[6][0]):
        path = ref.path_to(inputs[6][0], leaf)
        o_path, state = net_stock(graph, along(inputs, path))
        assert_close(o[:, path], o_path)
        assert_close(net_commit(graph, inputs[5], factors_of(rows, inputs), np.array([path])), state)


def test_net_of_a_node_depends_on_its_path_alone_on_the_cpu() -> None:
    inputs = net_inputs(np.random.default_rng(9), 64, 2, 8, 70, kind="forest")
    rows = net_tree(OpGraph, inputs)
    for node in (0, 5, 33, 69):
        path = ref.path_to(inputs[6][0], node)
        np.testing.assert_array_equal(rows[:, path], net_tree(OpGraph, along(inputs, path)))


@pytest.mark.parametrize("size, n_key, n_value, n", [(64, 2, 8, 32), (128, 3, 3, 19), (24, 1, 5, 1)])
def test_bits_do_not_depend_on_the_number_of_threads(size: int, n_key: int, n_value: int, n: int) -> None:
    rng = np.random.default_rng(10)
    inputs = net_inputs(rng, size, n_key, n_value, n)
    conv = conv_inputs(rng, 200, 4, n, 1, "tree")
    path = np.array([random_walk(rng, inputs[6][0])], np.int32)
    rows, out = net_tree(OpGraph, inputs, 1), conv_tree(OpGraph, *conv, threads=1)
    state = net_commit(OpGraph, inputs[5], factors_of(rows, inputs), path, 1)
    window = conv_commit(OpGraph, conv[0], conv[1], path, threads=1)
    for threads in (2, 3, 7):
        np.testing.assert_array_equal(rows, net_tree(OpGraph, inputs, threads))
        np.testing.assert_array_equal(out, conv_tree(OpGraph, *conv, threads=threads))
        np.testing.assert_array_equal(
            state, net_commit(OpGraph, inputs[5], factors_of(rows, inputs), path, threads)
        )
        np.testing.assert_array_equal(window, conv_commit(OpGraph, conv[0], conv[1], path, threads=threads))


def test_net_reads_heads_out_of_a_joint_projection(graph: MakeGraph) -> None:
    """q, k and v as views of one convolution output; the commit as a view of the result rows."""
    size, n_key, n_value, n, seqs = 32, 2, 4, 13, 2
    inputs = net_inputs(np.random.default_rng(11), size, n_key, n_value, n, seqs)
    joint = np.concatenate([a.reshape(seqs, n, -1) for a in inputs[:3]], axis=-1)
    path = np.array([(ref.path_to(p, n - 1) + [-1] * n)[:n] for p in inputs[6]], np.int32)
    with graph(threads=2) as g:
        qkv = g.tensor(joint)
        heads = [
            g.columns(qkv, first * size, size, count)
            for first, count in ((0, n_key), (n_key, n_key), (2 * n_key, n_value))
        ]
        rest = [g.tensor(a) for a in inputs[3:]]
        rows = lib.ggml_gated_delta_net_tree_persist(g.ctx, *heads, *rest)
        n_o = size * n_value
        state = lib.ggml_gated_delta_net_tree_commit(
            g.ctx, rest[2], g.columns(rows, n_o, rows.ne[0] - n_o), g.tensor(path)
        )
        found, moved = g.run(rows, state)
    expected = net_tree(graph, inputs)
    np.testing.assert_array_equal(found[0], expected)
    np.testing.assert_array_equal(moved, net_commit(graph, inputs[5], factors_of(expected, inputs), path))


def test_net_commit_of_nothing_and_of_padded_paths(graph: MakeGraph) -> None:
    inputs = net_inputs(np.random.default_rng(12), 32, 2, 6, 20, 3)
    factors = factors_of(net_tree(graph, inputs), inputs)
    nothing = np.full((3, 5), -1)
    np.testing.assert_array_equal(net_commit(graph, inputs[5], factors, nothing), inputs[5])
    path = np.array([[0, 1, 2], [0, 1, 2], [0, 1, 2]])
    exact = net_commit(graph, inputs[5], factors, path)
    for n_pad in (1, 9):
        padded = np.pad(path, ((0, 0), (0, n_pad)), constant_values=-1)
        np.testing.assert_array_equal(net_commit(graph, inputs[5], factors, padded), exact)
        np.testing.assert_array_equal(net_commit(graph, inputs[5], factors, padded[:1]), exact)
    mixed = np.array([[0, 1, 2], [-1, -1, -1], [0, -1, -1]])
    found = net_commit(graph, inputs[5], factors, mixed)
    np.testing.assert_array_equal(found[0], exact[0])
    np.testing.assert_array_equal(found[1], inputs[5][1])


@pytest.mark.parametrize("size, n_key, n_value", [(16, 1, 3), (64, 2, 8), (128, 1, 1)])
def test_successive_net_commits_follow_the_accepted_path(
    graph: MakeGraph, size: int, n_key: int, n_value: int
) -> None:
    """12 trees, each committed along a random path: the state of the stock op over the accepted tokens."""
    rng = np.random.default_rng(13)
    state = start = None
    accepted: list[tuple[np.ndarray, ...]] = []
    for _ in range(12):
        inputs = net_inputs(rng, size, n_key, n_value, 24)
        if state is None:
            state = start = inputs[5]
        inputs = (*inputs[:5], state, inputs[6])
        path = random_walk(rng, inputs[6][0])
        factors = factors_of(net_tree(graph, inputs), inputs)
        state = net_commit(graph, state, factors, np.array([path + [-1] * (25 - len(path))]))
        accepted.append(along(inputs, path))
    text = [np.concatenate(parts, axis=1) for parts in zip(*(a[:5] for a in accepted))]
    whole = (*text, start, np.arange(-1, text[0].shape[1] - 1, dtype=np.int32)[None])
    assert_close(state, net_stock(graph, whole)[1])
    assert_close(state, oracle(whole).states[:, -1])
