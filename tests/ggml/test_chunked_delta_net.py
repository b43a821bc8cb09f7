"""Tests of the gated delta rule in chunks against the float64 recurrence and against ggml's token-by-token operation.

Every test runs on the CPU and on each GPU that is present. TOL is relative to the largest magnitude; measured on the CPU:
7e-7, the plain operation's own error. Runs in about 6 s on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from dflash_ggml.ggml.bindings import lib
from reference import tree_ops as ref
from reference.graph import OpGraph

TOL = 5e-6

Array = np.ndarray
MakeGraph = Callable[..., OpGraph]


def inputs_of(
    n: int, size: int, n_key: int, n_value: int, decay: float = 0.5, seqs: int = 1, seed: int = 0
) -> list[Array]:
    """q, k, v, g, beta, state in the operation's shapes; each head decays at a pace of its own, up to `decay` per token."""
    rng = np.random.default_rng([n, size, n_value, seed])
    q, k = (rng.standard_normal((seqs, n, n_key, size)) + 0.3 for _ in range(2))
    q, k = (a / np.linalg.norm(a, axis=-1, keepdims=True) for a in (q, k))
    v, state = rng.standard_normal((seqs, n, n_value, size)), rng.standard_normal((seqs, n_value, size, size))
    pace = decay * 0.01 ** rng.uniform(0, 1, (n_value, 1))
    g = -pace * rng.uniform(0, 1, (seqs, n, n_value, 1))
    beta = rng.uniform(0, 1, (seqs, n, n_value, 1))
    return [a.astype(np.float32) for a in (q, k, v, g, beta, state)]


def run(graph: MakeGraph, inputs: list[Array], chunked: bool = True, threads: int = 2) -> tuple[Array, Array]:
    """Outputs like v, and the state after the last token."""
    v, state = inputs[2], inputs[5]
    with graph(threads=threads) as g:
        tensors = [g.tensor(a) for a in inputs]
        if chunked:
            out = lib.ggml_gated_delta_net_chunked(g.ctx, *tensors)
        else:
            out = lib.ggml_gated_delta_net(g.ctx, *tensors, 1)
        flat = g.run(out)[0].ravel()
    return flat[: v.size].reshape(v.shape), flat[v.size :].reshape(state.shape)


def oracle(inputs: list[Array]) -> tuple[Array, Array]:
    q, k, v, g, beta, state = inputs
    return ref.delta_net_chain(q, k, v, g[..., 0], beta[..., 0], state)


def worst(found: tuple[Array, Array], expected: tuple[Array, Array]) -> float:
    """The largest difference of outputs or state, relative to the largest magnitude there."""
    errors = []
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape and np.isfinite(a).all()
        errors.append(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)))
    return max(errors)


@pytest.mark.parametrize("n", [1, 15, 16, 17, 63, 64, 65, 128, 200])
@pytest.mark.parametrize(
    "size, n_key, n_value", [(128, 2, 2), (128, 1, 2), (64, 2, 6), (32, 3, 3), (16, 1, 4)]
)
def test_outputs_and_state_equal_the_oracle(
    graph: MakeGraph, size: int, n_key: int, n_value: int, n: int
) -> None:
    inputs = inputs_of(n, size, n_key, n_value)
    assert worst(run(graph, inputs), oracle(inputs)) <= TOL


def test_a_long_batch_equals_the_oracle(graph: MakeGraph) -> None:
    """More chunks than the GPU prepares at a time."""
    inputs = inputs_of(2048, 128, 1, 3)
    assert worst(run(graph, inputs), oracle(inputs)) <= TOL


@pytest.mark.parametrize("size, n_key, n_value, n", [(24, 1, 3, 90), (100, 2, 2, 70)])
def test_any_head_size_on_the_cpu(size: int, n_key: int, n_value: int, n: int) -> None:
    inputs = inputs_of(n, size, n_key, n_value)
    assert worst(run(OpGraph, inputs), oracle(inputs)) <= TOL


def test_several_sequences(graph: MakeGraph) -> None:
    inputs = inputs_of(150, 64, 2, 4, seqs=3)
    assert worst(run(graph, inputs), oracle(inputs)) <= TOL


@pytest.mark.parametrize("kind", ["every token", "now and then", "at first", "none"])
def test_strong_decay_neither_overflows_nor_loses_what_follows(graph: MakeGraph, kind: str) -> None:
    """Up to -50 a token and sums below -3,000, between which weak decays count to the last digit."""
    inputs = inputs_of(200, 64, 1, 2, decay=0.01)
    g, rng = inputs[3], np.random.default_rng(1)
    strong = -50 * rng.uniform(0.5, 1, g.shape).astype(np.float32)
    if kind == "every token":
        g[:] = strong
    elif kind == "now and then":
        g[:] = np.where(rng.uniform(size=g.shape) < 0.1, strong, g)
    elif kind == "at first":
        g[:, :70] = -50.0
    else:
        g[:] = 0.0
    assert worst(run(graph, inputs), oracle(inputs)) <= TOL


@pytest.mark.parametrize("size", [1e-6, 1e6])
def test_values_of_any_size(graph: MakeGraph, size: float) -> None:
    inputs = inputs_of(130, 64, 1, 2)
    inputs[2] *= np.float32(size)
    inputs[5] *= np.float32(size)
    assert worst(run(graph, inputs), oracle(inputs)) <= TOL


def test_a_batch_in_parts_is_the_batch(graph: MakeGraph) -> None:
    inputs = inputs_of(330, 64, 2, 4)
    whole = run(graph, inputs)
    outputs, state = [], inputs[5]
    for begin, end in ((0, 64), (64, 65), (65, 235), (235, 330)):
        part, state = run(graph, [*(a[:, begin:end] for a in inputs[:5]), state])
        outputs.append(part)
    assert worst((np.concatenate(outputs, axis=1), state), whole) <= TOL


def test_few_tokens_are_the_plain_operation_bit_for_bit(graph: MakeGraph) -> None:
    for n in (1, 2, 8):
        inputs = inputs_of(n, 64, 2, 4)
        for found, expected in zip(run(graph, inputs), run(graph, inputs, chunked=False), strict=True):
            np.testing.assert_array_equal(found, expected)


def test_reference_mode_is_the_plain_operation_bit_for_bit() -> None:
    inputs = inputs_of(100, 64, 2, 4)
    backend = lib.ggml_backend_cpu_init()
    lib.ggml_backend_cpu_set_use_ref(backend, True)
    found = run(lambda threads: OpGraph(backend=backend), inputs)
    lib.ggml_backend_free(backend)
    for a, b in zip(found, run(OpGraph, inputs, chunked=False), strict=True):
        np.testing.assert_array_equal(a, b)
    assert worst(found, run(OpGraph, inputs)) > 0.0  # or this shows nothing


@pytest.mark.parametrize("size, n_key, n_value", [(128, 2, 6), (40, 3, 3)])
def test_bits_do_not_depend_on_the_number_of_threads(size: int, n_key: int, n_value: int) -> None:
    inputs = inputs_of(100, size, n_key, n_value)
    expected = run(OpGraph, inputs, threads=1)
    for threads in (2, 3, 7):
        for a, b in zip(run(OpGraph, inputs, threads=threads), expected, strict=True):
            np.testing.assert_array_equal(a, b)


def test_heads_out_of_a_joint_projection_and_the_state_where_it_lives(graph: MakeGraph) -> None:
    """As in a model: q, k and v are views of one tensor, and the new state is copied over the old one."""
    size, n_key, n_value, n = 64, 2, 6, 140
    inputs = inputs_of(n, size, n_key, n_value)
    expected = run(graph, inputs)
    joint = np.concatenate([a.reshape(1, n, -1) for a in inputs[:3]], axis=-1)
    with graph(threads=2) as g:
        qkv = g.tensor(joint)
        counts, starts = (n_key, n_key, n_value), (0, n_key, 2 * n_key)
        heads = [g.columns(qkv, at * size, size, count) for at, count in zip(starts, counts, strict=True)]
        rest = [g.tensor(a) for a in inputs[3:]]
        out = lib.ggml_gated_delta_net_chunked(g.ctx, *heads, *rest)
        count = size * size * n_value
        copy = lib.ggml_cpy(g.ctx, g.flat(out, count, size * n_value * n), g.flat(rest[2], count))
        g.run(lib.ggml_cont(g.ctx, copy))
        outputs = g.read(out).ravel()[: inputs[2].size].reshape(inputs[2].shape)
        state = g.read(rest[2])
    np.testing.assert_array_equal(outputs, expected[0])
    np.testing.assert_array_equal(state, expected[1])
