"""Softmax attention with normalised heads, as `qwen3` and `laguna` have it. n = columns, D = embedding length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..ggml.graph import Graph
from ..state.kv import LayerCache
from .layers import Columns, product, products
from .rope import Rope


def attention(
    g: Graph,
    w: Mapping[str, Any],
    name: str,
    y,
    columns: Columns,
    cache: LayerCache,
    rope: Rope,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    eps: float,
):
    """Attention over the cache, to which the columns' rows are written first; y [D, n] -> [D, n]. name: of the layer's tensors,
    up to `attn_`."""
    d, n = head_dim, columns.n
    q, k, v = (g.expand(x) for x in products(g, w, [name + x for x in "qkv"], y))
    q = g.rms_norm(g.reshape(q, d, heads, n), eps, w[name + "q_norm.weight"])
    q = cache.queries(g, rope.turn(g, q, columns.positions))
    k = g.rms_norm(g.reshape(k, d, kv_heads, n), eps, w[name + "k_norm.weight"])
    k = rope.turn(g, k, columns.positions)
    o = cache.write(g, k, v, columns.rows).attend(g, q, columns.attend, columns.n_kv, columns.gathered)
    return product(g, w, name + "output", g.reshape(o, d * heads, n))
