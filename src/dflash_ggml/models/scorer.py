"""The model of a prompt scorer: the first blocks of a small `qwen35` model, and the attention mass of each token.

Hidden states h come from the blocks before one attention block, of which only queries and keys are computed, without rotation,
since a question and its answer may be any distance apart:

    q[t, a] = norm(Wq h_t)    k[j, g] = norm(Wk h_j)    mass_j = mean over t, a of softmax_j(q[t, a] . k[j, g(a)] / sqrt(d))

with t in the window (the last tokens) and j before it. Shapes are in ggml's order; D = embedding length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ..files.gguf import GGUFFile
from ..ggml.bindings import Tensor
from ..ggml.device import I32, Device
from ..ggml.graph import Graph
from ..ggml.weights import Source
from .feed_forward import matmul
from .qwen35 import Qwen35
from .registry import read_target
from .target import sources_of

BLOCK = 15  # of 24, from 0: it ranks as well as all attention blocks combined (12 of 12 questions; published figures)
AT_ONCE = 8  # window tokens processed at once


@dataclass(frozen=True, slots=True)
class ScorerModel:
    """The blocks that run (`trunk`), and the next one, `block`, of which only queries and keys are computed."""

    trunk: Qwen35
    block: int

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> ScorerModel:
        """Read and check an open file.

        Raises:
            ModelFileError: The model has another architecture or no such block.
        """
        model = read_target(file)
        if type(model) is not Qwen35:
            raise file.error(
                f"key 'general.architecture': {file.arch!r} scores no prompts (expected 'qwen35')"
            )
        full = [i for i, recurrent in enumerate(model.recurrent) if 0 < i <= BLOCK and not recurrent]
        if not full:
            raise file.error(f"no attention layer up to number {BLOCK}, behind others, to score prompts with")
        block, scales = full[-1], []
        for name in model.scales:
            number = int(name.split(".")[1])
            if number < block or (number == block and name.endswith(("attn_q.scale", "attn_k.scale"))):
                scales.append(name)
        recurrent = model.recurrent[:block]
        # the output matrix is not used
        trunk = replace(model, n_layers=block, recurrent=recurrent, scales=tuple(scales), tied_head=True)
        return cls(trunk, block)

    @property
    def taps(self) -> tuple[int, ...]:
        """The layer whose output is the block's input."""
        return (self.block - 1,)

    @property
    def key_row(self) -> int:
        """Elements of a token's keys."""
        return self.trunk.n_kv_heads * self.trunk.head_dim

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape (ggml order) of every tensor that the graphs use."""
        t, b = self.trunk, f"blk.{self.block}.attn_"
        return t.tensors() | {
            f"{b}norm.weight": (t.n_embd,),
            f"{b}q.weight": (t.n_embd, 2 * t.n_heads * t.head_dim),
            f"{b}k.weight": (t.n_embd, self.key_row),
            f"{b}q_norm.weight": (t.head_dim,),
            f"{b}k_norm.weight": (t.head_dim,),
        }

    def sources(self, file: GGUFFile) -> dict[str, Source]:
        """Name -> bytes of every one of `tensors` in an open file."""
        return sources_of(file, self.tensors())

    def scratch_bytes(self, columns: int, rows: int) -> int:
        """Estimated scratch memory of a pass over `columns` tokens, or of the masses of `rows`."""
        logits = 4 * rows * AT_ONCE * self.trunk.n_heads
        return max(self.trunk.scratch_bytes(columns, rows, 1), 3 * logits)

    def append(self, g: Graph, w: Mapping[str, Tensor], memory: Memory, x: Tensor, positions: Tensor) -> None:
        """Store the keys of columns x [D, n] (outputs of the trunk), and the columns in the window; positions int32 [n]."""
        t, b, n = self.trunk, f"blk.{self.block}.attn_", x.ne[1]
        y = g.rms_norm(x, t.rms_eps, w[f"{b}norm.weight"])
        k = g.reshape(matmul(g, w, f"{b}k", y), t.head_dim, t.n_kv_heads, n)
        k = g.reshape(g.rms_norm(k, t.rms_eps, w[f"{b}k_norm.weight"]), self.key_row, n)
        g.expand(g.set_rows(memory.keys, k, positions))
        (rows,) = g.derive("window", [(I32, (n,))], memory.window_rows, positions)
        g.expand(g.set_rows(memory.window, x, rows))

    def masses(
        self, device: Device, w: Mapping[str, Tensor], memory: Memory, tokens: int, window: int
    ) -> Graph:
        """Graph of the masses of `tokens` tokens, output `mass` float32 [tokens]: sums over the window and the heads."""
        t, b, d = self.trunk, f"blk.{self.block}.attn_", self.trunk.head_dim
        g = Graph(device, 256 + 16 * window)
        h = g.view(memory.window, (t.n_embd, window), (memory.window.nb[1],))
        q_gate = matmul(g, w, f"{b}q", g.rms_norm(h, t.rms_eps, w[f"{b}norm.weight"]))
        # per head d query rows, then d rows of a gate that is not used
        q = g.view(q_gate, (d, t.n_heads, window), (2 * d * 4, 2 * d * t.n_heads * 4))
        q = g.scale(g.rms_norm(q, t.rms_eps, w[f"{b}q_norm.weight"]), d**-0.5)
        keys, per, total = g.heads(memory.keys, d, tokens), t.n_heads // t.n_kv_heads, None
        for first in range(0, window, AT_ONCE):
            n = min(AT_ONCE, window - first)
            part = g.view(q, (d, per, t.n_kv_heads, n), (q.nb[1], per * q.nb[1], q.nb[2]), first * q.nb[2])
            part = g.cont(g.permute(part, 0, 1, 3, 2), d, per * n, t.n_kv_heads)
            p = g.softmax(g.mul_mat(keys, part, exact=True))  # [tokens, per * n, kv_heads]
            p = g.transpose(g.reshape(p, tokens, n * t.n_heads))
            sums = g.sum_rows(g.cont(p))
            total = sums if total is None else g.add(total, sums)
        g.output(g.reshape(total, tokens), "mass")
        return g


class Memory:
    """A scorer's memory besides its trunk's state: keys [row, rows] of all tokens, and the trunk's outputs [D, n + 1] of the
    window's n tokens from position `first` on; the last row takes earlier positions."""

    def __init__(self, keys, window) -> None:
        self.keys, self.window, self.first = keys, window, 0

    def window_rows(self, outs: list[np.ndarray], positions: np.ndarray) -> None:
        """The window row of each position."""
        last = self.window.ne[1] - 1
        at = positions - self.first
        outs[0][:] = np.where((at >= 0) & (at < last), at, last)
