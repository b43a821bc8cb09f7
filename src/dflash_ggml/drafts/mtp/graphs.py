"""Graphs of a prediction head. D = embedding length, R = capacity for unseen tokens, n = columns.

The input is a token x at position p + 1 with the target's hidden state h of position p, after the output norm; the output
predicts the token at p + 2 and, normed, is the h of the head's next pass. There is only one block, so keys and values need
neither attention nor feed-forward layer: those run for the drafting columns alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...ggml.bindings import Tensor
from ...ggml.device import I32, Device
from ...ggml.graph import Graph, packed
from ...models.feed_forward import matmul, matmuls
from ...models.prediction import NORM, Head
from ...state.kv import KvCache, LayerCache, under

STATE_INDEX = "state_index"


@dataclass(frozen=True, slots=True)
class Parts:
    """Tensors and sizes that the graphs are built from.

    Attributes:
        w: The head's and the target's weights.
        last: The h of the last token seen, [D, n_states], and for several sequences one more, never read.
        features: The target's tensor [D, columns].
        room: R.
        candidates: Tokens per depth.
        embedding, output: Names of the matrices in `w`.
    """

    head: Head
    device: Device
    w: Mapping[str, Tensor]
    kv: KvCache
    last: Tensor
    features: Tensor
    room: int
    candidates: int
    embedding: str
    output: str

    def read_last(self, g: Graph) -> Tensor:
        """The h of the sequence's last token, [D, 1]."""
        return g.get_rows(self.last, self._state_index(g))

    def write_last(self, g: Graph, h: Tensor) -> None:
        """Store h [D, 1] as the sequence's last token's."""
        g.expand(g.set_rows(self.last, h, self._state_index(g)))

    def _state_index(self, g: Graph) -> Tensor:
        """The sequence's state index, int32 [1], an input set by the graph's fillers."""
        if STATE_INDEX not in g.inputs:
            g.input(STATE_INDEX, I32, 1)
            g.fillers.append(lambda sequence: g.inputs[STATE_INDEX].array.fill(sequence.state_index))
        return g.inputs[STATE_INDEX].tensor


def take_in(
    g: Graph, m: Parts, h: Tensor, ids: Tensor, positions: Tensor, rows: Tensor, pick: Tensor | None = None
) -> None:
    """Write keys and values of n tokens, each with the h of the one before it, the first with `last`.

    `last` becomes the h of the last token, or with `pick` that of token pick - 1.

    Args:
        h: [D, n], the target's hidden states of the tokens themselves.
        ids, positions, rows: int32 [n]; rows are cache rows.
        pick: int32 [1].
    """
    d, n = h.ne[0], h.ne[1]
    before = g.expand(g.concat(m.read_last(g), h, 1))
    if pick is None:
        newest = g.view(h, (d, 1), offset=(n - 1) * h.nb[1])
    else:
        newest = g.get_rows(before, pick)
    keys_values(g, m, joined(g, m, ids, g.view(before, (d, n), (before.nb[1],))), positions, rows)
    m.write_last(g, newest)


def joined(g: Graph, m: Parts, ids: Tensor, h: Tensor) -> Tensor:
    """The block's input [D, n] for tokens int32 [n] with the hidden states h [D, n] of the tokens before them."""
    p, name = m.head, m.head.prefix + "nextn."
    e = g.rms_norm(g.get_rows(m.w[m.embedding], ids), p.rms_eps, m.w[name + "enorm.weight"])
    h = g.rms_norm(h, p.rms_eps, m.w[name + "hnorm.weight"])
    return matmul(g, m.w, name + "eh_proj", g.concat(e, h, 0))


def keys_values(g: Graph, m: Parts, x: Tensor, positions: Tensor, rows: Tensor) -> LayerCache:
    """The cache after writing keys and values of the block's inputs x [D, n] to `rows`."""
    p, name, n = m.head, m.head.prefix + "attn_", x.ne[1]
    y = g.rms_norm(x, p.rms_eps, m.w[m.head.prefix + "attn_norm.weight"])
    k, v = matmuls(g, m.w, [name + "k", name + "v"], y)
    k = g.rms_norm(g.reshape(k, p.head_dim, p.n_kv_heads, n), p.rms_eps, m.w[name + "k_norm.weight"])
    k = g.rope(k, positions, p.n_rot, p.rope_theta)
    return m.kv.layer(0).write(g, k, v, rows)


def block(
    g: Graph, m: Parts, x: Tensor, position: Tensor, cache: LayerCache, mask: Tensor, n_kv: int
) -> Tensor:
    """The normed output [D, n] for the block's inputs x [D, n], with keys and values in the cache; mask [n_kv, n]."""
    p, w, name, d, n = m.head, m.w, m.head.prefix, m.head.head_dim, x.ne[1]
    q_gate = matmul(g, w, name + "attn_q", g.rms_norm(x, p.rms_eps, w[name + "attn_norm.weight"]))
    strides = (2 * d * 4, 2 * d * p.n_heads * 4)
    q = g.rms_norm(g.view(q_gate, (d, p.n_heads, n), strides), p.rms_eps, w[name + "attn_q_norm.weight"])
    q = cache.queries(g, g.rope(q, position, p.n_rot, p.rope_theta))
    o = cache.attend(g, q, under(mask), n_kv)
    gate = g.cont(g.view(q_gate, (d, p.n_heads, n), strides, offset=d * 4), d * p.n_heads, n)
    x = g.add(matmul(g, w, name + "attn_output", g.mul(g.reshape(o, d * p.n_heads, n), g.sigmoid(gate))), x)
    x = g.add(p.ffn.build(g, w, name, g.rms_norm(x, p.rms_eps, w[name + "post_attention_norm.weight"])), x)
    return g.rms_norm(x, p.rms_eps, w[p.own(NORM, "output_norm.weight")])


def normed(g: Graph, m: Parts, features: Tensor) -> Tensor:
    """The head's inputs h from the outputs [D, n] of the target's last layer."""
    return g.rms_norm(features, m.head.rms_eps, m.w["output_norm.weight"])


def context_graph(m: Parts) -> Graph:
    """Graph that takes in up to R = `room` tokens and drafts nothing.

    Input: ints = ids | columns of the features | positions | cache rows, each R, and their number, 1.
    """
    g, room = Graph(m.device, 256), m.room
    ids, columns, positions, rows, pick = packed(g, "ints", *[room] * 4, 1)
    take_in(g, m, normed(g, m, g.get_rows(m.features, columns)), ids, positions, rows, pick)
    return g


def draft_graph(m: Parts, n_kv: int, depth: int, batch: int) -> Graph:
    """Graph that takes in up to R = `room` tokens of each sequence of a batch, then drafts `depth` tokens greedily after each
    pending one.

    Inputs: ints = columns of the features [R] per sequence | ids | positions | cache rows, each R + 1 per sequence | index of
    each pending token among these | state indices | positions and cache rows of the drafting columns, by depth; `ranges` of
    rows that those see, int32 [depth * batch, 2].
    Output: best float32 [candidates, 2, depth * batch], token ids and log-probabilities, best first, depth by depth.
    """
    g, room, k = Graph(m.device, 256 + depth * (96 + m.head.ffn.nodes)), m.room, batch
    c = room + 1
    lengths = (room * k, *[c * k] * 3, k, k, depth * k, depth * k)
    columns, ids, positions, rows, picks, indices, at, into = packed(g, "ints", *lengths)
    masks = g.range_mask(g.input("ranges", I32, depth * k, 2), n_kv)
    h = normed(g, m, g.get_rows(m.features, columns))
    d, name = h.ne[0], m.output.removesuffix(".weight")
    last = g.reshape(g.get_rows(m.last, indices), d, 1, k)
    before = g.expand(g.reshape(g.concat(last, g.reshape(h, d, room, k), 1), d, c * k))
    newest = g.get_rows(before, picks)
    inputs = joined(g, m, ids, before)
    cache = keys_values(g, m, inputs, positions, rows)
    g.expand(g.set_rows(m.last, newest, indices))
    x, whole = g.get_rows(inputs, picks), None
    for i in range(depth):
        position, into_row = (g.view(t, (k,), offset=4 * i * k) for t in (at, into))
        if i:
            cache = keys_values(g, m, x, position, into_row)
        seen = g.view(masks, (n_kv, k), (masks.nb[1],), offset=i * k * masks.nb[1])
        h = block(g, m, x, position, cache, seen, n_kv)
        one = g.top_k_log_probs(matmul(g, m.w, name, h), min(m.candidates, m.head.n_vocab))
        whole = one if whole is None else g.concat(whole, one, 2)
        if i + 1 < depth:
            x = joined(g, m, g.reshape(g.cast(g.view(one, (1, k), (one.nb[2],)), I32), k), h)
    g.output(whole, "best")
    return g
