"""Graphs of a block draft: masked tokens denoised in one pass over the target's features.

Reference: arXiv 2602.06036. Context rows come only from features of committed tokens (`append_context`); the block's own K/V
are scratch, overwritten by the next step. B = block size, D = embedding length, n_tap = tapped layers. The additions of DFlash2
and DSpark are in their own folders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...ggml.bindings import Tensor
from ...ggml.device import I32, Device
from ...ggml.graph import Graph, packed
from ...models.feed_forward import gated_layer
from ...state import range_mask
from ...state.context import Context
from ...state.kv import LayerCache
from ..dflash2 import ZERO, Convolution, selector_lattice
from ..dspark import markov_lattice
from .params import MASK, OUTPUT_GATE, TAP_NORMS, DraftParams


@dataclass(frozen=True, slots=True)
class Parts:
    """What the graphs are made of.

    Attributes:
        w: The draft's weights.
        features: The target's tensor [n_tap*D, columns].
        embedding, head: The target's matrices [D, n_vocab] or the draft's own.
        head_scale: Scale of the target's head, [1], or None.
        candidates: Tokens per depth.
    """

    device: Device
    w: Mapping[str, Tensor]
    p: DraftParams
    context: Context
    features: Tensor
    embedding: Tensor
    head: Tensor
    head_scale: Tensor | None
    candidates: int


def append_context(
    g: Graph, m: Parts, features: Tensor, positions: Tensor, rows: Sequence[Tensor]
) -> list[LayerCache]:
    """Write K/V of committed tokens to the draft's context.

    Args:
        features: [n_tap*D, n].
        positions: Absolute positions, int32 [n].
        rows: Cache rows per group of the context, int32 [n]; a ring uses only the last ones, up to its size.

    Returns:
        The caches per layer; readers of them run after the write.
    """
    w, p, context = m.w, m.p, m.context
    d, kv_heads = p.head_dim, p.n_kv_heads
    if p.normed_taps:
        n, width = features.ne[1], features.ne[0]
        features = g.reshape(features, p.n_embd, len(p.taps), n)
        features = g.reshape(g.rms_norm(features, p.rms_eps, w[TAP_NORMS]), width, n)
    c = g.rms_norm(g.mul_mat(w["fc.weight"], features), p.rms_eps, w["enc.output_norm.weight"])
    caches = []
    # matmuls of one input are adjacent, right after its norm: the GPU converts it once for all of them
    taken = [_last(g, group.n_rows, c, positions, of) for group, of in zip(context.groups, rows)]
    matmuls = []
    for i in range(p.n_layers):
        y = taken[context.group(i)][0]
        if p.normed_taps:
            y = g.rms_norm(y, p.rms_eps, w[f"blk.{i}.attn_norm.weight"])
        matmuls.append([g.expand(g.mul_mat(w[f"blk.{i}.attn_{x}.weight"], y)) for x in "kv"])
    for i, (k, v) in enumerate(matmuls):
        name = f"blk.{i}.attn_"
        _, at, to = taken[context.group(i)]
        k = g.reshape(k, d, kv_heads, k.ne[1])
        k = _rope(g, p, g.rms_norm(k, p.rms_eps, w[name + "k_norm.weight"]), at)
        caches.append(context.layer(i).write(g, k, v, to))
    return caches


def _last(g: Graph, n: int, c, positions, rows) -> tuple:
    """The last n columns of c [D, columns] and of the others [columns], or all if there are fewer: no row is written twice."""
    skipped = c.ne[1] - n
    if skipped <= 0:
        return c, positions, rows
    c = g.view(c, (c.ne[0], n), (c.nb[1],), offset=skipped * c.nb[1])
    return c, *(g.view(x, (n,), offset=skipped * x.nb[0]) for x in (positions, rows))


def context_graph(m: Parts) -> Graph:
    """Graph that takes in features of committed tokens and drafts nothing.

    Input: ints = columns of the features | positions | cache rows of each group, each B.
    """
    g = Graph(m.device, 512)
    columns, positions, *rows = packed(g, "ints", *[m.p.block_size] * (2 + len(m.context.groups)))
    append_context(g, m, g.get_rows(m.features, columns), positions, rows)
    return g


def draft_graph(m: Parts, n_kv: Sequence[int], block: int, seqs: int) -> Graph:
    """Graph of one drafting step of a batch: take in the last accepted paths, then denoise a block of B = `block` columns for
    each sequence.

    Inputs, each with B columns per sequence: ints = columns of the features | their positions | block ids | block positions |
    for each group of the context cache rows of the features | and of the block (unused columns go to spare rows). Beside them
    roots = pending tokens | their columns | zeros, and the ranges of rows that columns see (see range_mask), over `n_kv` rows.
    Outputs, by sequence: best float32 [candidates, 2, B-1], token ids and log-probabilities of rows 1..B-1, best first; or,
    with pair scores, `lattice` (see lattice.pack); hidden [D, B-1], the rows in front of the head. A draft whose row 0 drafts
    has B rows.

    Args:
        n_kv: Cache rows that attention reads, per group.
        block: Columns of a block.
        seqs: Sequences.
    """
    w, p, context = m.w, m.p, m.context
    g, n = Graph(m.device), block * seqs
    parts = packed(g, "ints", *[n] * (4 + 2 * len(context.groups)))
    columns, seen_at, ids, positions, *rows = parts
    seen = range_mask.of_blocks(g, n_kv, block, seqs, [group.pieces for group in context.groups])
    caches = append_context(g, m, g.get_rows(m.features, columns), seen_at, rows[::2])
    d, heads, kv_heads = p.head_dim, p.n_heads, p.n_kv_heads
    roots = g.input("roots", I32, seqs, 3)
    pending, at, none = (g.view(roots, (seqs,), offset=i * roots.nb[1]) for i in range(3))
    x = g.get_rows(m.embedding, pending if p.has_mask_vector else ids)
    if p.has_mask_vector:
        x = g.set_rows(g.get_rows(w[MASK], ids), x, at)
    zeros: Any = w.get(ZERO)
    if p.selector is not None and seqs > 1:
        zeros = g.reshape(g.get_rows(zeros, none), zeros.ne[0], 1, seqs)
    for i in range(p.n_layers):
        name = f"blk.{i}."
        y = g.rms_norm(x, p.rms_eps, w[name + "attn_norm.weight"])
        around = Convolution(g, w, p.selector, name + "attn", y, zeros) if p.selector else _identity
        y = around(y, 0)
        q, k, v = (g.expand(g.mul_mat(w[f"{name}attn_{x}.weight"], y)) for x in "qkv")
        q = g.rms_norm(g.reshape(q, d, heads, n), p.rms_eps, w[name + "attn_q_norm.weight"])
        k = g.rms_norm(g.reshape(k, d, kv_heads, n), p.rms_eps, w[name + "attn_k_norm.weight"])
        q, k = (_rope(g, p, x, positions) for x in (q, k))
        q = caches[i].queries(g, q)
        group = context.group(i)
        o = caches[i].write(g, k, v, rows[2 * group + 1]).attend(g, q, seen[group], n_kv[group])
        if p.gated:
            gate = g.softplus(g.mul_mat(w[f"{name}{OUTPUT_GATE}.weight"], y))
            o = g.mul(g.reshape(o, d, heads, n), g.reshape(gate, 1, heads, n))
        x = g.add(around(g.mul_mat(w[name + "attn_output.weight"], g.reshape(o, d * heads, n)), 1), x)
        y = g.rms_norm(x, p.rms_eps, w[name + "ffn_norm.weight"])
        around = Convolution(g, w, p.selector, name + "ffn", y, zeros) if p.selector else _identity
        x = g.add(around(gated_layer(g, w, name, around(y, 0)), 1), x)
    if p.first_row:  # row 0 is the known pending token: only the masked rows need the head
        width, step = x.ne[0], x.nb[1]
        if seqs > 1:
            x = g.cont(
                g.view(x, (width, block - 1, seqs), (step, block * step), offset=step), width, n - seqs
            )
        else:
            x = g.view(x, (width, block - 1), (step,), offset=step)
    hidden = g.output(g.rms_norm(x, p.rms_eps, w["output_norm.weight"]), "hidden")
    logits = g.mul_mat(m.head, hidden)
    if m.head_scale is not None:
        logits = g.mul(logits, m.head_scale)
    if p.selector is None and p.markov is None:
        g.output(g.top_k_log_probs(logits, min(m.candidates, logits.ne[0])), "best")
        return g
    whole, depths = None, logits.ne[1] // seqs
    for i in range(seqs):  # concatenated, block by block
        own, seen_by_head, before = logits, hidden, pending
        if seqs > 1:
            at = i * depths
            own, seen_by_head = (
                g.view(t, (t.ne[0], depths), (t.nb[1],), offset=at * t.nb[1]) for t in (logits, hidden)
            )
            before = g.view(roots, (1,), offset=4 * i)
        if p.selector is not None:
            one = selector_lattice(g, w, p.selector, own, seen_by_head, before)
        else:
            assert p.markov is not None
            one = markov_lattice(g, w, p.markov, own, seen_by_head, before, m.candidates)
        whole = one if whole is None else g.concat(whole, one, 0)
    g.output(whole, "lattice")
    return g


def _rope(g: Graph, p: DraftParams, x, positions):
    return g.rope(x, positions, p.n_rot or p.head_dim, p.rope_theta, p.yarn)


def _identity(x, side: int):
    """Identity, for drafts without convolutions."""
    return x
