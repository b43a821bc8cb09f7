"""DFlash2: dynamic convolutions around attention and FFN of a DFlash draft, and scores of neighbouring candidates.

Sizes, tensors, the reader, and parts of the graph. B = columns of the block, L = drafted depths, D = embedding length; shapes in
ggml's order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..files.keys import KeyedFile
from ..ggml.bindings import Tensor
from ..ggml.device import I32
from ..ggml.graph import Graph
from ..models.checks import positive
from .dflash.fields import count
from .lattice import pack

SELECTOR = "selector_hidden.weight"
ZERO = "zero column"  # [D, 1] of zeros, left of a block
BEFORE, AFTER = "selector_predecessor.weight", "selector_successor.weight"
MAX_KERNEL, MAX_CANDIDATES, MAX_RANK = 64, 64, 1 << 16


@dataclass(frozen=True, slots=True)
class Selector:
    """Sizes of a DFlash2 draft's convolutions and pair scores.

    Attributes:
        kernel: Taps of a convolution.
        group: Channels that share a dynamic weight.
        rank: Rank of the pair scores.
        candidates: Candidates per depth.
        scale, cap: Factor and soft bound of the logits (0: none).
    """

    kernel: int
    group: int
    rank: int
    candidates: int
    scale: float = 1.0
    cap: float = 0.0

    def tensor_shapes(self, n_embd: int, n_layers: int, n_vocab: int) -> dict[str, tuple[int, ...]]:
        """Name -> shape (ggml order) of the tensors beyond those of DFlash."""
        shapes: dict[str, tuple[int, ...]] = {
            SELECTOR: (n_embd, self.rank),
            BEFORE: (self.rank, n_vocab),
            AFTER: (self.rank, n_vocab),
        }
        dynamic = 2 * self.kernel * (n_embd // self.group)
        for i in range(n_layers):
            for part in ("attn", "ffn"):
                shapes[f"blk.{i}.{part}_conv_base"] = (n_embd, self.kernel, 2)
                shapes[f"blk.{i}.{part}_conv_proj.weight"] = (n_embd, dynamic)
        return shapes


def read_selector(file: KeyedFile, prefix: str, scale_key: str, cap_key: str) -> Selector:
    """Read the sizes of a selector and of its convolutions.

    Args:
        file: The draft's open file.
        prefix: Start of the keys of the four sizes.
        scale_key, cap_key: Keys of the form of the logits.

    Raises:
        ModelFileError: A size is missing or out of range.
    """
    scale, cap = file.get(scale_key, float), file.get(cap_key, float)
    return Selector(
        kernel=count(file, prefix + "conv_kernel_size", MAX_KERNEL),
        group=count(file, prefix + "conv_group_size"),
        rank=count(file, prefix + "selector_rank", MAX_RANK),
        candidates=count(file, prefix + "selector_top_k", MAX_CANDIDATES),
        scale=positive(file.error, f"key {scale_key!r}", scale) if scale else 1.0,
        cap=positive(file.error, f"key {cap_key!r}", cap) if cap else 0.0,
    )


class Convolution:
    """Grouped causal convolution over a block, its weights partly computed from the input of the layer that it wraps.

    y_t = sum over tau of (base[tau] + dynamic_t[tau]) * x_(t - tau): channels of a group share a dynamic weight; columns
    before the block count as zero.

    Args:
        name: Name of the layer, "blk.0.attn".
        y: [D, B], the layer's normalised input, from which the dynamic weights come.
        zeros: [D, 1, k], padding before each of the k blocks that are concatenated in B.
    """

    def __init__(self, g: Graph, w: Mapping[str, Tensor], s: Selector, name: str, y, zeros) -> None:
        self.g, self.s, self.zeros, self.base = g, s, zeros, w[f"{name}_conv_base"]
        self.blocks = zeros.ne[2]
        self.dynamic = g.expand(g.mul_mat(w[f"{name}_conv_proj.weight"], y))

    def __call__(self, x, side: int):
        """Side 0, the input of the layer, or side 1, its output; x [D, B] -> [D, B]."""
        g, s, (d, n) = self.g, self.s, (x.ne[0], x.ne[1])
        groups, stride = d // s.group, self.dynamic.nb[1]
        total, shifted = None, x
        for tap in range(min(s.kernel, n // self.blocks)):
            if tap:
                shifted = self._shift(shifted)
            at = (side * s.kernel + tap) * groups * 4
            dynamic = g.view(self.dynamic, (1, groups, n), (4, stride), offset=at)
            base = g.view(self.base, (d,), offset=(side * s.kernel + tap) * self.base.nb[1])
            varying = g.reshape(g.mul(g.reshape(shifted, s.group, groups, n), dynamic), d, n)
            term = g.add(g.mul(shifted, base), varying)
            total = term if total is None else g.add(total, term)
        return total

    def _shift(self, x):
        """The columns x [D, B] one to the right, zeros at the left of each block."""
        g, d, n, k = self.g, x.ne[0], x.ne[1], self.blocks
        if k == 1:
            return g.concat(self.zeros, g.view(x, (d, n - 1), (d * 4,)), 1)
        size = n // k
        return g.reshape(g.concat(self.zeros, g.view(x, (d, size - 1, k), (d * 4, size * d * 4)), 1), d, n)


def selector_lattice(
    g: Graph, w: Mapping[str, Tensor], s: Selector, logits: Tensor, hidden: Tensor, pending: Tensor
) -> Tensor:
    """Candidates and pair scores as `pack` gives them: M_i(a, b) = (P[a] * (W h_i)) . S[b].

    Args:
        logits: [n_vocab, L].
        hidden: [D, L], the head's input.
        pending: int32 [1].
    """
    if s.scale != 1:
        logits = g.scale(logits, s.scale)
    if s.cap:  # cap * tanh(x / cap) up to a constant, which probabilities do not depend on
        logits = g.scale(g.sigmoid(g.scale(logits, 2 / s.cap)), 2 * s.cap)
    depths, k = logits.ne[1], min(s.candidates, logits.ne[0])
    best = g.top_k_log_probs(logits, k)
    ids = g.reshape(g.cast(g.view(best, (k, depths), (best.nb[2],)), I32), k * depths)
    gate = g.mul_mat(w[SELECTOR], hidden)

    def gated(rows, first: int):
        n = rows.ne[2]
        return g.mul(rows, g.view(gate, (s.rank, 1, n), (gate.nb[1], gate.nb[1]), offset=first * gate.nb[1]))

    return pack(g, best, ids, ids, pending, w[BEFORE], w[AFTER], gated)
