"""Numpy oracle of the tree operations, written from the recurrences alone; float64 by default.

It keeps one full state per node and walks the tree token by token, so it shares no algebra with the factor
form that the operations use. Arrays have numpy's order (the reverse of ggml's): state [seqs, value heads,
value dim, key dim]. Source of the maths: Gated Delta Networks (arXiv 2412.06464), the gated delta rule,
applied along the parent chain of each node.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Array = np.ndarray


def path_to(parents: Array, node: int) -> list[int]:
    """Nodes from a root down to `node`; parents [n] of one sequence, -1 = child of the committed prefix."""
    path = []
    while node >= 0:
        path.append(int(node))
        node = parents[node]
    return path[::-1]


def random_parents(rng: np.random.Generator, n: int, kind: str = "tree") -> Array:
    """int32 [n], parents[i] < i.

    Kinds: chain, fan, tree (one root), forest (many), deep (nearly a chain), near (of the last 8, a few roots).
    """
    if kind == "chain":
        return np.arange(-1, n - 1, dtype=np.int32)
    if kind == "fan":
        return np.array([-1] + [0] * (n - 1), np.int32)
    low = {
        "tree": lambda i: 0,
        "forest": lambda i: -1,
        "deep": lambda i: max(0, i - 3),
        "near": lambda i: max(-1, i - 8),
    }[kind]
    return np.array([-1] + [int(rng.integers(low(i), i)) for i in range(1, n)], np.int32)


def conv_tree(state: Array, x: Array, c: Array, parents: Array, dtype: type = np.float64) -> Array:
    """Depthwise causal convolution along each node's path; every term rounded, oldest tap first.

    state [seqs, channels, taps-1] oldest first, x [seqs, n, channels], c [channels, taps], parents [seqs, n].
    Returns [seqs, n, channels] of `dtype`, in which it is computed.
    """
    out = np.zeros(x.shape, dtype)
    taps = c.shape[1]
    for s in range(x.shape[0]):
        for i in range(x.shape[1]):
            inputs = np.concatenate([state[s].T, x[s][path_to(parents[s], i)]]).astype(dtype)
            for product in inputs[-taps:] * c.T.astype(dtype):
                out[s, i] += product
    return out


def conv_commit(state: Array, x: Array, path: Array) -> Array:
    """The window after the accepted nodes, like `state`; path [seqs or 1, any length], negative = end."""
    out = state.copy()
    for s in range(state.shape[0]):
        nodes = accepted(path[s if path.shape[0] > 1 else 0])
        out[s] = np.concatenate([state[s].T, x[s][nodes]])[-state.shape[2] :].T
    return out


def accepted(path: Array) -> list[int]:
    """The node indices before the first negative entry."""
    nodes = []
    for node in path:
        if node < 0:
            break
        nodes.append(int(node))
    return nodes


@dataclass(frozen=True)
class DeltaNetTree:
    """What the oracle knows of every node: outputs, innovations u, sums of g, and the full state after it."""

    o: Array  # [seqs, n, value heads, size]
    u: Array  # [seqs, n, value heads, size]
    g_sum: Array  # [seqs, n, value heads]
    states: Array  # [seqs, n, value heads, value dim, key dim]; empty if they were not kept


def delta_net_step(
    state: Array, q: Array, k: Array, v: Array, g: Array, beta: Array
) -> tuple[Array, Array, Array]:
    """One token of the gated delta rule for all value heads.

    state [H_v, value dim, key dim], q and k [H_k, size], v [H_v, size], g and beta [H_v]; value head h uses
    key head h % H_k. Returns (new state, output, innovation).
    """
    n_rep = v.shape[0] // k.shape[0]
    q, k = np.tile(q, (n_rep, 1)), np.tile(k, (n_rep, 1))
    state = np.exp(g)[:, None, None] * state
    u = beta[:, None] * (v - np.einsum("hji,hi->hj", state, k))
    state = state + u[:, :, None] * k[:, None, :]
    o = np.einsum("hji,hi->hj", state, q) / np.sqrt(v.shape[1])
    return state, o, u


def delta_net_tree(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    state: Array,
    parents: Array,
    keep_states: bool = True,
) -> DeltaNetTree:
    """The recurrence from each node's parent state.

    q, k [seqs, n, H_k, size], v [seqs, n, H_v, size], g, beta [seqs, n, H_v], state [seqs, H_v, size, size],
    parents [seqs, n]. Without keep_states a state lives only until the last child has used it.
    """
    q, k, v, g, beta, state = (a.astype(np.float64) for a in (q, k, v, g, beta, state))
    n_seqs, n, n_heads, size = v.shape
    o, u = np.zeros_like(v), np.zeros_like(v)
    g_sum = np.zeros_like(g)
    states = np.zeros((n_seqs, n if keep_states else 0, n_heads, size, size))
    for s in range(n_seqs):
        alive = {-1: state[s]}
        last_use = {int(p): i for i, p in enumerate(parents[s])}
        for i in range(n):
            p = int(parents[s, i])
            after, o[s, i], u[s, i] = delta_net_step(alive[p], q[s, i], k[s, i], v[s, i], g[s, i], beta[s, i])
            g_sum[s, i] = g[s, i] + (0.0 if p < 0 else g_sum[s, p])
            if last_use[p] == i:
                del alive[p]
            if i in last_use:
                alive[i] = after
            if keep_states:
                states[s, i] = after
    return DeltaNetTree(o, u, g_sum, states)


def delta_net_chain(q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array) -> tuple[Array, Array]:
    """The recurrence over tokens in order: outputs like v, and the states after the last token. Shapes as for the tree."""
    q, k, v, g, beta, state = (a.astype(np.float64) for a in (q, k, v, g, beta, state))
    o = np.zeros_like(v)
    for s, i in np.ndindex(v.shape[:2]):
        state[s], o[s, i], _ = delta_net_step(state[s], q[s, i], k[s, i], v[s, i], g[s, i], beta[s, i])
    return o, state


def delta_net_commit(state: Array, u: Array, k: Array, g_sum: Array, path: Array) -> Array:
    """The state after the accepted nodes, one after the other: decayed by what g_sum grew, plus u k^T.

    state [seqs, H_v, size, size], u [seqs, n, H_v, size], k [seqs, n, H_k, size], g_sum [seqs, n, H_v] along
    the path, path as in conv_commit.
    """
    out = state.astype(np.float64)
    n_rep = u.shape[2] // k.shape[2]
    for s in range(state.shape[0]):
        before = np.zeros(u.shape[2])
        for node in accepted(path[s if path.shape[0] > 1 else 0]):
            now = g_sum[s, node].astype(np.float64)
            keys = np.tile(k[s, node], (n_rep, 1)).astype(np.float64)
            out[s] = np.exp(now - before)[:, None, None] * out[s] + u[s, node][:, :, None] * keys[:, None, :]
            before = now
    return out


def range_attention(
    q: Array, k: Array, v: Array, ranges: Array, scale: float, sinks: Array | None = None
) -> Array:
    """Softmax attention of q [n, heads, d] over k and v [rows, kv_heads, d], where column i sees the rows from
    ranges[0, i] to before ranges[1, i]; zeros where it sees none. sinks [heads]: one more score each, whose value is 0."""
    out = np.zeros(q.shape)
    gqa = q.shape[1] // k.shape[1]
    sink = np.full(q.shape[1], -np.inf) if sinks is None else sinks.astype(np.float64)
    sink = sink.reshape(k.shape[1], gqa, 1)
    for i, (first, end) in enumerate(ranges.T):
        if first < end:
            queries = q[i].astype(np.float64).reshape(k.shape[1], gqa, -1)
            keys, values = (a[first:end].astype(np.float64).transpose(1, 0, 2) for a in (k, v))
            scores = scale * queries @ keys.transpose(0, 2, 1)
            top = np.maximum(scores.max(-1, keepdims=True), sink)
            weights = np.exp(scores - top)
            total = weights.sum(-1, keepdims=True) + np.exp(sink - top)
            out[i] = (weights / total @ values).reshape(q.shape[1], -1)
    return out


def top_k_log_probs(a: Array, k: int) -> tuple[Array, Array]:
    """Of each row of a [rows, n] the k best, best first, equal ones by index: (indices, log-probabilities)."""
    best = np.argsort(-a, axis=1, kind="stable")[:, :k]
    wide = a.astype(np.float64)
    top = wide.max(axis=1, keepdims=True)
    log_sum = top + np.log(np.exp(wide - top).sum(axis=1, keepdims=True))
    return best, np.take_along_axis(wide, best, axis=1) - log_sum
