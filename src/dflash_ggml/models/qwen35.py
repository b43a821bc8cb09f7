"""Forward graphs of the target, arch `qwen35`: gated delta-net layers with an attention layer every few.

Two graphs: `linear_graph` runs tokens that follow the committed ones and advances the state in place (prefill, plain
decoding); `tree_graph` runs a token tree, leaves the state alone and keeps what a commit needs.
Shapes are in ggml's order. n = tokens of the batch, D = embedding length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..ggml.device import F16, Device
from ..ggml.graph import Graph, packed
from ..ggml.weights import Weights
from ..state.caches import TargetState
from ..state.mask import SlotMask
from .qwen35_params import TargetParams


class _Builder:
    """The layers of one graph over one batch. With a `mask` the batch is a tree and the state is only read."""

    def __init__(
        self,
        g: Graph,
        w: Weights,
        p: TargetParams,
        state: TargetState,
        n: int,
        n_kv: int,
        mask: SlotMask | None,
    ) -> None:
        self.g, self.w, self.p, self.state, self.n, self.n_kv, self.tree = (
            g,
            w,
            p,
            state,
            n,
            n_kv,
            mask is not None,
        )
        lengths = [n] * (4 if self.tree else 5)
        self.ids, self.positions, self.rows, self.parents, *rest = packed(g, "ints", *lengths)
        self.path = rest[0] if rest else None
        self.mask = mask.build(g, "mask", n_kv, n) if mask else g.input("mask", F16, n_kv, n)

    def trunk(self, taps: Sequence[int], on_tap: Callable[[int, object], None]):
        """Residual stream [D, n] after the last layer; `on_tap(i, x)` sees the output of each layer in `taps`."""
        g, w, p = self.g, self.w, self.p
        x = g.get_rows(w["token_embd.weight"], self.ids)
        attention_index = delta_index = 0
        tapped = None
        for i in range(p.n_layers):
            y = g.expand(g.rms_norm(x, p.rms_eps, w[f"blk.{i}.attn_norm.weight"]))
            if p.recurrent[i]:
                y = self._delta_net(y, i, delta_index)
                delta_index += 1
            else:
                y = self._attention(y, i, attention_index)
                attention_index += 1
            if tapped is not None:
                on_tap(*tapped)
                tapped = None
            x = g.add(y, x)
            y = g.rms_norm(x, p.rms_eps, w[f"blk.{i}.post_attention_norm.weight"])
            y = g.swiglu(
                g.mul_mat(w[f"blk.{i}.ffn_gate.weight"], y), g.mul_mat(w[f"blk.{i}.ffn_up.weight"], y)
            )
            x = g.add(g.mul_mat(w[f"blk.{i}.ffn_down.weight"], y), x)
            if i in taps:
                # seen once the next layer's products stand: the GPU adds, normalises and converts for them in one go
                tapped = (taps.index(i), x)
        if tapped is not None:
            on_tap(*tapped)
        return x

    def head(self, x):
        """Logits [n_vocab, columns of x]."""
        x = self.g.rms_norm(x, self.p.rms_eps, self.w["output_norm.weight"])
        return self.g.mul_mat(self.w["token_embd.weight" if self.p.tied_head else "output.weight"], x)

    def _attention(self, y, layer: int, index: int):
        """Gated softmax attention over the cache; y [D, n] -> [D, n]."""
        g, w, p, n = self.g, self.w, self.p, self.n
        d, heads, kv_heads = p.head_dim, p.n_heads, p.n_kv_heads
        name = f"blk.{layer}.attn_"
        # products of one input stand together, right after its norm: the GPU converts it once for all of them
        q_gate, k, v = (g.expand(g.mul_mat(w[f"{name}{x}.weight"], y)) for x in "qkv")
        # attn_q interleaves per head: d query rows, then d gate rows
        strides = (2 * d * 4, 2 * d * heads * 4)
        q = g.rms_norm(g.view(q_gate, (d, heads, n), strides), p.rms_eps, w[name + "q_norm.weight"])
        q = g.expand(g.rope(q, self.positions, p.n_rot, p.rope_theta))
        k = g.rms_norm(g.reshape(k, d, kv_heads, n), p.rms_eps, w[name + "k_norm.weight"])
        k = g.rope(k, self.positions, p.n_rot, p.rope_theta)
        keys = g.expand(g.set_rows(self.state.keys(index), g.reshape(k, d * kv_heads, n), self.rows))
        values = g.expand(g.set_rows(self.state.values(index), v, self.rows))
        row = keys.nb[1]
        element = row // (d * kv_heads)
        keys, values = (g.view(t, (d, self.n_kv, kv_heads), (row, d * element)) for t in (keys, values))
        o = g.attention(g.permute(q, 0, 2, 1, 3), keys, values, self.mask, d**-0.5)
        gate = g.cont(g.view(q_gate, (d, heads, n), strides, offset=d * 4), d * heads, n)
        return g.mul_mat(w[name + "output.weight"], g.mul(g.reshape(o, d * heads, n), g.sigmoid(gate)))

    def _delta_net(self, y, layer: int, index: int):
        """Gated delta net; y [D, n] -> [D, n]."""
        g, w, p, n = self.g, self.w, self.p, self.n
        s, h_k, h_v = p.ssm_state, p.ssm_k_heads, p.ssm_v_heads
        name = f"blk.{layer}."
        # products of one input stand together: the GPU converts it once for all of them
        products = ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta")
        qkv, z, alpha, beta = (g.mul_mat(w[f"{name}{x}.weight"], y) for x in products)
        if self.tree:
            qkv = g.land(qkv, self.state.conv_inputs, index)
        for product in (qkv, z, alpha, beta):
            g.expand(product)
        # in this order a GPU does all up to `beta` (and the commit of a single token) in one kernel
        window = self.state.window(index)
        c = g.expand(g.silu(g.ssm_conv_tree(window, qkv, w[name + "ssm_conv1d.weight"], self.parents)))
        # q and k heads lie side by side: one norm for both
        qk = g.expand(g.l2_norm(g.view(c, (s, 2 * h_k, n), (s * 4, c.nb[1])), p.rms_eps))
        alpha = g.softplus(g.add(alpha, w[name + "ssm_dt.bias"]))
        decay = g.expand(g.mul(alpha, w[name + "ssm_a"]))
        beta = g.expand(g.sigmoid(beta))
        if not self.tree:
            g.expand(g.ssm_conv_tree_commit(window, qkv, self.path))
        q, k = (g.view(qk, (s, h_k, n), (s * 4, qk.nb[2]), offset=i * s * h_k * 4) for i in (0, 1))
        v = g.view(c, (s, h_v, n), (s * 4, c.nb[1]), offset=2 * s * h_k * 4)
        decay, beta = (g.reshape(t, 1, h_v, n) for t in (decay, beta))
        live = self.state.delta(index)
        if self.tree:
            rows = g.gated_delta_net_tree_persist(q, k, v, decay, beta, live, self.parents)
            tail = g.view(rows, (rows.ne[0] - s * h_v, n), (rows.nb[1],), offset=s * h_v * 4)
            g.expand(g.copy(tail, g.slice(self.state.all_factors, index, n)))
            o = g.view(rows, (s, h_v, n), (s * 4, rows.nb[1]))
        else:
            out = g.gated_delta_net(q, k, v, decay, beta, live)
            # flat, so that a GPU writes the state right there instead of copying it
            size = s * s * h_v
            g.expand(g.copy(g.view(out, (size,), offset=s * h_v * n * 4), g.view(live, (size,))))
            o = g.view(out, (s, h_v, n))
        o = g.rms_norm(o, p.rms_eps, w[name + "ssm_norm.weight"])
        z = g.silu(g.reshape(z, s, h_v, n))
        return g.mul_mat(w[name + "ssm_out.weight"], g.reshape(g.mul(o, z), s * h_v, n))


def _tap_columns(g: Graph, state: TargetState, tap: int, n: int):
    """Where the features of tap number `tap` belong: rows of D values with the stride of all taps, [D, n]."""
    d = state.p.n_embd
    return g.view(state.features, (d, n), (state.features.nb[1],), offset=tap * d * 4)


def linear_graph(
    device: Device,
    w: Weights,
    p: TargetParams,
    state: TargetState,
    n: int,
    n_kv: int,
    taps: Sequence[int] = (),
    append: Callable[[Graph, object, object, object], None] | None = None,
) -> Graph:
    """Graph for n tokens after the committed ones; advances K/V, conv windows and delta-net states in place.

    `append(graph, features [len(taps)*D, n], positions, rows)` adds the draft's context for these tokens.
    Inputs: ints = ids | positions | cache rows | parents (-1, 0, 1, ...) | path (0, 1, ...), each n; mask [n_kv, n].
    Outputs: logits [n_vocab] of the last token, argmax [1].
    """
    g = Graph(device)
    b = _Builder(g, w, p, state, n, n_kv, None)
    tapped: list = []
    x = b.trunk(taps if append else (), lambda _, t: tapped.append(t))
    if append:
        features = tapped[0]
        for t in tapped[1:]:
            features = g.concat(features, t, 0)
        append(g, features, b.positions, b.rows)
    if n > 1:
        x = g.view(x, (x.ne[0], 1), offset=(n - 1) * x.nb[1])
    g.logits = g.output(b.head(x), "logits")
    g.choice = g.output(g.argmax(g.logits), "argmax")
    return g


def tree_graph(
    device: Device,
    w: Weights,
    p: TargetParams,
    state: TargetState,
    mask: SlotMask,
    width: int,
    n_kv: int,
    taps: Sequence[int],
) -> Graph:
    """Graph for a token tree of `width` nodes (root included); the committed state is read, never written.

    K/V rows of the nodes, conv inputs, delta-net factors and tapped features go to `state` for the commit.
    Inputs: ints = ids | positions | cache rows | parents, each `width`; those of `mask`.
    Outputs: logits [n_vocab, width], argmax [width].
    """
    g = Graph(device)
    b = _Builder(g, w, p, state, width, n_kv, mask)
    x = b.trunk(taps, lambda i, t: g.expand(g.copy(t, _tap_columns(g, state, i, width))))
    g.logits = g.output(b.head(x), "logits")
    g.choice = g.output(g.argmax(g.logits), "argmax")
    return g
