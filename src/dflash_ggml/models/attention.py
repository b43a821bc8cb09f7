"""Softmax attention over a whole cache or a window, optionally with normalised heads and a gated output. n = columns,
D = embedding length."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from ..ggml.bindings import Tensor
from ..ggml.graph import Graph
from ..state.kv import LayerCache
from ..state.ring import RingView
from .feed_forward import matmul, matmuls
from .layers import Columns
from .rope import Rope


def attention(
    g: Graph,
    w: Mapping[str, Tensor],
    name: str,
    y: Tensor,
    columns: Columns | RingView,
    cache: LayerCache,
    rope: Rope,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    eps: float,
    scale: float | None = None,
) -> Tensor:
    """Write the columns' rows to the cache and attend over it; y [D, n] -> [D, n].

    With a matrix `gate` [D, heads] or [D, heads * head_dim] the output is multiplied by softplus(gate y), per head or
    element; with a matrix `q` that has each head's gate behind its queries, by sigmoid(gate), per element.
    `sinks` [heads] only enter the softmax of each head.

    Args:
        name: Start of the layer's tensor names, up to `attn_`.
        y: The normed input.
        columns: Positions and visibility of the columns.
        cache: This layer's keys and values.
        rope: Rotation of queries and keys.
        heads, kv_heads: Heads of queries, and of keys and values.
        head_dim: Elements of a head.
        eps: Epsilon of the norms of queries and keys, if the layer has them.
        scale: Scale of the scores, 1 / sqrt(head_dim) unless given.
    """
    d, n = head_dim, columns.n
    gated = f"{name}gate.weight" in w
    # directly after the norm of their input
    found = matmuls(g, w, [name + x for x in ("q", "k", "v", *(("gate",) if gated else ()))], y)
    whole, k, v, *gate = (g.expand(x) for x in found)
    has_gates, strides = whole.ne[0] == 2 * d * heads, (2 * d * 4, 2 * d * heads * 4)
    q = g.view(whole, (d, heads, n), strides) if has_gates else g.reshape(whole, d, heads, n)
    k = g.reshape(k, d, kv_heads, n)
    normed = f"{name}q_norm.weight" in w
    if normed:
        q = g.rms_norm(q, eps, w[name + "q_norm.weight"])
    q = cache.queries(g, rope.rotate(g, q, columns.positions))
    if normed:
        k = g.rms_norm(k, eps, w[name + "k_norm.weight"])
    k = rope.rotate(g, k, columns.positions)
    attend = partial(columns.attend, sinks=w.get(f"{name}sinks.weight"))
    o = cache.write(g, k, v, columns.rows).attend(g, q, attend, columns.n_kv, columns.gathered, scale)
    if gated:
        factor = g.softplus(gate[0])
        o = g.mul(g.reshape(o, d, heads, n), g.reshape(factor, factor.ne[0] // heads, heads, n))
    o = g.reshape(o, d * heads, n)
    if has_gates:
        o = g.mul(o, g.sigmoid(g.cont(g.view(whole, (d, heads, n), strides, offset=d * 4), d * heads, n)))
    return matmul(g, w, name + "output", o)
