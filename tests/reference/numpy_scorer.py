"""Reference of a prompt scorer: the blocks of a `qwen35` file token by token in float64, then masses of one block."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


class Model:
    """A file's float weights and sizes."""

    def __init__(self, path: Path) -> None:
        reader = GGUFReader(path)
        self.keys = {name: field.contents() for name, field in reader.fields.items()}
        self.w = {
            t.name: np.array(dequantize(t.data, t.tensor_type), np.float64).reshape(t.shape[::-1].tolist())
            for t in reader.tensors
        }

    def key(self, name: str):
        return self.keys[f"qwen35.{name}"]

    def hidden(self, ids: Sequence[int], blocks: int) -> np.ndarray:
        """Rows behind so many blocks, [tokens, D]."""
        w, eps = self.w, self.key("attention.layer_norm_rms_epsilon")
        recurrent = self.key("attention.recurrent_layers")
        x = w["token_embd.weight"][list(ids)]
        for i in range(blocks):
            b = f"blk.{i}."
            y = norm(x, w[b + "attn_norm.weight"], eps)
            x = x + (self._delta_net(b, y, eps) if recurrent[i] else self._attention(b, y, eps))
            y = norm(x, w[b + "post_attention_norm.weight"], eps)
            gate = y @ w[b + "ffn_gate.weight"].T
            x = x + (gate * sigmoid(gate) * (y @ w[b + "ffn_up.weight"].T)) @ w[b + "ffn_down.weight"].T
        return x

    def heads(self, b: str, y: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Normalised queries [tokens, heads, d], gates alike, normalised keys [tokens, kv_heads, d], not rotated."""
        w, d = self.w, self.key("attention.key_length")
        q = (y @ w[b + "attn_q.weight"].T).reshape(len(y), self.key("attention.head_count"), 2, d)
        k = (y @ w[b + "attn_k.weight"].T).reshape(len(y), self.key("attention.head_count_kv"), d)
        queries = norm(q[:, :, 0], w[b + "attn_q_norm.weight"], eps)
        return queries, q[:, :, 1], norm(k, w[b + "attn_k_norm.weight"], eps)

    def _attention(self, b: str, y: np.ndarray, eps: float) -> np.ndarray:
        n, d, rot = len(y), self.key("attention.key_length"), self.key("rope.dimension_count")
        q, gate, k = self.heads(b, y, eps)
        v = (y @ self.w[b + "attn_v.weight"].T).reshape(k.shape)
        angle = np.arange(n)[:, None] * self.key("rope.freq_base") ** (-2.0 * np.arange(rot // 2) / rot)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]

        def turned(x: np.ndarray) -> np.ndarray:
            left, right, rest = np.split(x, [rot // 2, rot], -1)
            return np.concatenate([left * cos - right * sin, right * cos + left * sin, rest], -1)

        q, k, per = turned(q), turned(k), q.shape[1] // k.shape[1]
        out = np.empty_like(q)
        hidden = np.triu(np.full((n, n), -np.inf), 1)
        for a in range(q.shape[1]):
            out[:, a] = softmax(q[:, a] @ k[:, a // per].T / np.sqrt(d) + hidden) @ v[:, a // per]
        return (out * sigmoid(gate)).reshape(n, -1) @ self.w[b + "attn_output.weight"].T

    def _delta_net(self, b: str, y: np.ndarray, eps: float) -> np.ndarray:
        w, n, s = self.w, len(y), self.key("ssm.state_size")
        h_k, h_v = self.key("ssm.group_count"), self.key("ssm.time_step_rank")
        x = y @ w[b + "attn_qkv.weight"].T
        taps = w[b + "ssm_conv1d.weight"]  # [channels, K]
        before = np.concatenate([np.zeros((taps.shape[1] - 1, x.shape[1])), x])
        x = sum(before[i : i + n] * taps[:, i] for i in range(taps.shape[1]))
        x = x * sigmoid(x)
        q, k, v = np.split(x, [h_k * s, 2 * h_k * s], -1)
        q, k = (z.reshape(n, h_k, s) for z in (q, k))
        q, k = (z / np.maximum(np.linalg.norm(z, axis=-1, keepdims=True), eps) for z in (q, k))
        v = v.reshape(n, h_v, s)
        decay = np.exp(
            np.logaddexp(0, y @ w[b + "ssm_alpha.weight"].T + w[b + "ssm_dt.bias"]) * w[b + "ssm_a"]
        )
        beta = sigmoid(y @ w[b + "ssm_beta.weight"].T)
        state, out = np.zeros((h_v, s, s)), np.empty((n, h_v, s))
        for t in range(n):
            for h in range(h_v):
                key = k[t, h % h_k]
                state[h] *= decay[t, h]
                state[h] += beta[t, h] * np.outer(key, v[t, h] - key @ state[h])
                out[t, h] = q[t, h % h_k] @ state[h] / np.sqrt(s)
        z = (y @ w[b + "attn_gate.weight"].T).reshape(out.shape)
        out = norm(out, w[b + "ssm_norm.weight"], eps) * (z * sigmoid(z))
        return out.reshape(n, -1) @ w[b + "ssm_out.weight"].T

    def masses(self, ids: Sequence[int], window: int, block: int) -> np.ndarray:
        """How much of the last `window` tokens' attention in a block each token before them gets, without positions."""
        eps = self.key("attention.layer_norm_rms_epsilon")
        b = f"blk.{block}."
        y = norm(self.hidden(ids, block), self.w[b + "attn_norm.weight"], eps)
        q, _, k = self.heads(b, y, eps)
        found, per = np.zeros(len(ids) - window), q.shape[1] // k.shape[1]
        for t in range(len(ids) - window, len(ids)):
            for a in range(q.shape[1]):
                logits = k[: len(found), a // per] @ q[t, a] / np.sqrt(q.shape[-1])
                found += softmax(logits) / (window * q.shape[1])
        return found
