"""Reference of block drafts and prediction heads in numpy, float64, written from their description: one loop per thing, no
cache, no graph.

Shapes are row-major: T tokens, D width, H query heads, G key/value heads, d head size, B columns of a block.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

from reference.expert_files import mixture

Array = np.ndarray


def read(path: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """Metadata, and tensors as float64 (integers as they are), row-major, of a GGUF file."""
    reader = GGUFReader(path)
    keys = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    tensors = {}
    for t in reader.tensors:
        shape = t.shape[::-1].tolist()
        is_integer = t.tensor_type.name.startswith("I6")
        x = t.data.view(np.int64) if is_integer else dequantize(t.data, t.tensor_type).astype(np.float64)
        tensors[t.name] = np.array(x).reshape(shape)
    return keys, tensors


def norm(x: Array, weight: Array, eps: float = 1e-6) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def rope(
    x: Array, positions: Array, n_rot: int, theta: float, yarn: tuple[float, int] | None = None
) -> Array:
    """x [T, heads, d]; pairs (j, j + n_rot/2). yarn: factor and first context, as in arXiv 2309.00071."""
    half = n_rot // 2
    frequency = theta ** (-np.arange(half) / half)
    scale = 1.0
    if yarn:
        factor, n_ctx = yarn

        def pair_of(turns: float) -> float:
            return n_rot * np.log(n_ctx / (turns * 2 * np.pi)) / (2 * np.log(theta))

        low, high = max(np.floor(pair_of(32)), 0), min(np.ceil(pair_of(1)), n_rot - 1)
        kept = 1 - np.clip((np.arange(half) - low) / max(high - low, 0.001), 0, 1)
        frequency = frequency * kept + frequency / factor * (1 - kept)
        scale = 0.1 * np.log(factor) + 1
    angle = np.asarray(positions)[:, None, None] * frequency
    a, b, rest = x[..., :half], x[..., half:n_rot], x[..., n_rot:]
    cos, sin = scale * np.cos(angle), scale * np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)


def attention(q: Array, k: Array, v: Array, visible: Array) -> Array:
    """q [T, H, d], k and v [S, G, d], visible [T, S] -> [T, H * d]."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat(repeat, 1), v.repeat(repeat, 1)
    scores = np.einsum("thd,shd->hts", q, k) * q.shape[2] ** -0.5
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hts,shd->thd", weights, v).reshape(len(q), -1)


def log_softmax(x: Array) -> Array:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


class BlockDraft:
    """A draft of llama.cpp's architecture `dflash`."""

    def __init__(self, path: Path, target: Path) -> None:
        self.keys, self.w = read(path)
        _, borrowed = read(target)
        get = self.keys.get
        self.embedding = self.w.get("token_embd.weight", borrowed["token_embd.weight"])
        self.head = self.w.get("output.weight", borrowed.get("output.weight", borrowed["token_embd.weight"]))
        self.layers, self.block_size = get("dflash.block_count"), get("dflash.block_size")
        self.heads, self.kv_heads = get("dflash.attention.head_count"), get("dflash.attention.head_count_kv")
        self.d, self.theta = get("dflash.attention.key_length"), get("dflash.rope.freq_base")
        self.n_rot = get("dflash.rope.dimension_count", self.d)
        factor = get("dflash.rope.scaling.factor")
        self.yarn = (factor, get("dflash.rope.scaling.original_context_length")) if factor else None
        self.mask_id = get("tokenizer.ggml.mask_token_id")
        self.window = get("dflash.attention.sliding_window")
        self.windowed = get("dflash.attention.sliding_window_pattern") or [False] * self.layers
        self.causal = get("dflash.attention.causal")
        self.kernel, self.group = get("dflash.conv_kernel_size"), get("dflash.conv_group_size")
        self.from_anchor = "markov_w1.weight" in self.w and get("dflash.sample_from_anchor", True)
        self.to_target = self.w.get("d2t", np.arange(len(self.head)))

    def hidden(self, features: Array, pending: int) -> Array:
        """The states [B, D] that the head sees, after a context whose features are [T, n_taps * D]."""
        w, start = self.w, len(features)
        taps = w.get("enc.aux_norm.weight")  # [n_taps, D]
        if taps is not None:
            features = norm(features.reshape(len(features), *taps.shape), taps).reshape(features.shape)
        fused = norm(features @ w["fc.weight"].T, w["enc.output_norm.weight"])
        ids = [pending] + [self.mask_id] * (self.block_size - 1)
        positions, before = np.arange(start, start + len(ids)), np.arange(start)
        x = self.embedding[ids]
        for i in range(self.layers):
            name = f"blk.{i}."
            n = norm(x, w[name + "attn_norm.weight"])
            context = fused if taps is None else norm(fused, w[name + "attn_norm.weight"])
            around = self._convolution(name + "attn", n)
            n = around(n, 0)
            q = self._heads(n, name + "attn_q", self.heads, positions)
            k = np.concatenate(
                [
                    self._heads(y, name + "attn_k", self.kv_heads, at)
                    for y, at in ((context, before), (n, positions))
                ]
            )
            v = np.concatenate([context, n]) @ w[name + "attn_v.weight"].T
            visible = np.ones((len(ids), start + len(ids)), bool)
            causal = self.causal if self.causal is not None else self.windowed[i] or taps is not None
            if causal:
                visible[:, start:] = np.tri(len(ids), dtype=bool)
            if self.windowed[i]:
                visible &= positions[:, None] - np.concatenate([before, positions]) < self.window
            o = attention(q, k, v.reshape(-1, self.kv_heads, self.d), visible)
            if (gate := w.get(name + "attn_gate.weight")) is not None:
                o = (o.reshape(-1, self.heads, self.d) * np.log1p(np.exp(n @ gate.T))[..., None]).reshape(
                    o.shape
                )
            x = x + around(o @ w[name + "attn_output.weight"].T, 1)
            n = norm(x, w[name + "ffn_norm.weight"])
            around = self._convolution(name + "ffn", n)
            n = around(n, 0)
            gate = n @ w[name + "ffn_gate.weight"].T
            n = gate * sigmoid(gate) * (n @ w[name + "ffn_up.weight"].T)
            x = x + around(n @ w[name + "ffn_down.weight"].T, 1)
        return norm(x, w["output_norm.weight"])[0 if self.from_anchor else 1 :]

    def _heads(self, x: Array, name: str, heads: int, positions: Array) -> Array:
        x = norm(
            (x @ self.w[name + ".weight"].T).reshape(len(x), heads, self.d), self.w[name + "_norm.weight"]
        )
        return rope(x, positions, self.n_rot, self.theta, self.yarn)

    def _convolution(self, name: str, n: Array):
        base = self.w.get(f"{name}_conv_base")  # [side, kernel, D]
        if base is None:
            return lambda x, side: x
        tokens, width = n.shape
        dynamic = n @ self.w[f"{name}_conv_proj.weight"].T
        dynamic = dynamic.reshape(tokens, 2, self.kernel, width // self.group)

        def around(x: Array, side: int) -> Array:
            y = np.zeros_like(x)
            for t in range(tokens):
                for tau in range(min(self.kernel, t + 1)):
                    weight = base[side, tau] + dynamic[t, side, tau].repeat(self.group)
                    y[t] += weight * x[t - tau]
            return y

        return around

    def pair(self, hidden: Array, a: int) -> Array:
        """M(a, b) for all b of the draft's vocabulary, a a token of the target's; zeros for a draft that has none."""
        w = self.w
        if "selector_hidden.weight" in w:
            row = w["selector_predecessor.weight"][a] * (w["selector_hidden.weight"] @ hidden)
            return w["selector_successor.weight"] @ row
        if "markov_w1.weight" in w:
            row = w["markov_w1.weight"][a]
            if "markov_gate.weight" in w:
                row = row * sigmoid(
                    w["markov_gate.weight"] @ np.concatenate([hidden, row]) + w["markov_gate.bias"]
                )
            return w["markov_w2.weight"] @ row
        return np.zeros(len(self.head))

    def candidates(self, features: Array, pending: int, k: int) -> tuple[Array, Array, Array]:
        """Target ids [L, k], log-probabilities [L, k] of the rows, and pair scores [L, k, k] (see lattice.pack)."""
        hidden = self.hidden(features, pending)
        is_markov = "markov_w1.weight" in self.w
        own, scores, pairs, before = [], [], [], [pending]
        for h in hidden:
            logits = self.head @ h
            m = np.array([self.pair(h, a) for a in before])
            row = log_softmax(logits + m[0] if is_markov else logits)
            best = np.argsort(-row, kind="stable")[:k]
            own.append(best)
            scores.append(row[best])
            pairs.append(np.broadcast_to((m - m[0] if is_markov else m)[:, best], (len(m), len(best))))
            before = self.to_target[best].tolist()
        whole = np.zeros((len(own), k, k))
        for i, m in enumerate(pairs):
            whole[i, : len(m)] = m
        return self.to_target[np.array(own)], np.array(scores), whole

    def chain(self, features: Array, pending: int, k: int) -> list[int]:
        """The tokens that a chain of best candidates has."""
        ids, scores, pairs = self.candidates(features, pending, k)
        found, a = [], 0
        for row, u, m in zip(ids, scores, pairs):
            a = int(np.argmax(u + m[a]))
            found.append(int(row[a]))
        return found


class PredictionHead:
    """The `nextn` block of a file of the `qwen35` family with one."""

    def __init__(self, target: Path) -> None:
        self.keys, self.w = read(target)
        arch = self.keys["general.architecture"]
        get = {key.removeprefix(f"{arch}."): value for key, value in self.keys.items()}.get
        self.prefix = f"blk.{get('block_count') - 1}."
        self.heads, self.kv_heads = get("attention.head_count"), get("attention.head_count_kv")
        self.d, self.n_rot = get("attention.key_length"), get("rope.dimension_count")
        self.theta, self.n_used = get("rope.freq_base"), get("expert_used_count")

    def _one(self, name: str, shared: str) -> Array:
        return self.w.get(self.prefix + name, self.w.get(shared, self.w["token_embd.weight"]))

    def hidden(self, tokens: list[int], h: Array) -> Array:
        """Normed outputs [T, D] for tokens at positions 0, 1, .. with the hidden states [T, D] of those before them."""
        w, p = self.w, self.prefix
        e = self._one("nextn.embed_tokens.weight", "token_embd.weight")[tokens]
        both = np.concatenate(
            [norm(e, w[p + "nextn.enorm.weight"]), norm(h, w[p + "nextn.hnorm.weight"])], -1
        )
        x = both @ w[p + "nextn.eh_proj.weight"].T
        n, at = norm(x, w[p + "attn_norm.weight"]), np.arange(len(tokens))
        q_gate = (n @ w[p + "attn_q.weight"].T).reshape(len(n), self.heads, 2, self.d)
        q = rope(norm(q_gate[:, :, 0], w[p + "attn_q_norm.weight"]), at, self.n_rot, self.theta)
        k = (n @ w[p + "attn_k.weight"].T).reshape(len(n), self.kv_heads, self.d)
        k = rope(norm(k, w[p + "attn_k_norm.weight"]), at, self.n_rot, self.theta)
        v = (n @ w[p + "attn_v.weight"].T).reshape(len(n), self.kv_heads, self.d)
        o = attention(q, k, v, np.tri(len(n), dtype=bool))
        o = o * sigmoid(q_gate[:, :, 1].reshape(len(n), -1))
        x = x + o @ w[p + "attn_output.weight"].T
        n = norm(x, w[p + "post_attention_norm.weight"])
        if self.n_used:
            x = x + mixture(
                {name.removeprefix(p): a for name, a in w.items() if name.startswith(p)}, n, self.n_used
            )
        else:
            gate = n @ w[p + "ffn_gate.weight"].T
            x = x + (gate * sigmoid(gate) * (n @ w[p + "ffn_up.weight"].T)) @ w[p + "ffn_down.weight"].T
        return norm(x, self._one("nextn.shared_head_norm.weight", "output_norm.weight"))

    def rows(self, tokens: list[int], features: Array, depth: int) -> Array:
        """Log-probabilities [depth, V] along the chain of the best, after tokens of which the last is pending.

        features: outputs [T - 1, D] of the target's last layer, of the tokens before it.
        """
        h = norm(features, self.w["output_norm.weight"])
        h = np.concatenate([np.zeros((1, h.shape[1])), h])
        head, found, tokens = self._one("nextn.shared_head_head.weight", "output.weight"), [], list(tokens)
        for _ in range(depth):
            newest = self.hidden(tokens, h)[-1]
            found.append(log_softmax(head @ newest))
            tokens.append(int(found[-1].argmax()))
            h = np.concatenate([h, newest[None]])
        return np.array(found)
