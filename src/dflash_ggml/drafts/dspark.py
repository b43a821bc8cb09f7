"""DSpark: a DFlash draft whose logits depend on the previous token through a low-rank Markov head: sizes, tensors, graph.

L = drafted depths, D = embedding length, R = rank; shapes in ggml's order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..ggml.bindings import Tensor
from ..ggml.device import I32
from ..ggml.graph import Graph
from .lattice import pack

BEFORE, AFTER = "markov_w1.weight", "markov_w2.weight"
GATE, GATE_BIAS = "markov_gate.weight", "markov_gate.bias"
CONFIDENCE, CONFIDENCE_BIAS = "conf_proj.weight", "conf_proj.bias"
TO_TARGET = "d2t"  # target ids of a reduced vocabulary
# the halves of the gate's matrix: for the hidden state, and for the row of the previous token
GATE_HIDDEN, GATE_TOKEN = "markov_gate_hidden.weight", "markov_gate_token.weight"
MAX_RANK = 1 << 16


@dataclass(frozen=True, slots=True)
class Markov:
    """The Markov head: its rank, and whether rows of its first table are gated by hidden state and previous token.

    Attributes:
        from_anchor: Column 0 of a block, the pending token's, drafts too; else only the columns after it.
    """

    rank: int
    is_gated: bool = False
    from_anchor: bool = True

    def tensor_shapes(self, n_embd: int, n_vocab: int, n_draft_vocab: int) -> dict[str, tuple[int, ...]]:
        """Name -> shape (ggml order) of the tensors beyond those of DFlash."""
        shapes: dict[str, tuple[int, ...]] = {BEFORE: (self.rank, n_vocab), AFTER: (self.rank, n_draft_vocab)}
        if self.is_gated:
            shapes |= {GATE: (n_embd + self.rank, self.rank), GATE_BIAS: (self.rank,)}
        return shapes


def markov_lattice(
    g: Graph,
    w: Mapping[str, Tensor],
    m: Markov,
    logits: Tensor,
    hidden: Tensor,
    pending: Tensor,
    candidates: int,
) -> Tensor:
    """Candidates and pair scores in the form of `pack`; U_i includes M_i after the best candidate of depth i - 1.

    A lattice over the best logits alone needs no matmul over the vocabulary, but its candidates miss tokens that only the
    previous token makes probable. This one adds the whole bias along the best path, depth by depth, as in training and in
    llama.cpp, and costs L matmuls [R, n]: about another target head at n 248k, R 256, L 7.

    Args:
        logits: [n, L] over the draft's vocabulary.
        hidden: [D, L], the head's input.
        pending: int32 [1].
        candidates: Candidates per depth.
    """
    n, depths, k = logits.ne[0], logits.ne[1], min(candidates, logits.ne[0])
    from_hidden: Any = g.mul_mat(w[GATE_HIDDEN], hidden) if m.is_gated else None

    def gated(rows, first: int):
        """Rows [R, k, n] of the first table times the gates of the depths from `first` on."""
        if from_hidden is None:
            return rows
        strides = (from_hidden.nb[1], from_hidden.nb[1])
        there = g.view(from_hidden, (m.rank, 1, rows.ne[2]), strides, offset=first * from_hidden.nb[1])
        k, n = rows.ne[1], rows.ne[2]
        # flat: ggml's AMX kernels do not repeat a matrix over further dimensions
        from_token = g.reshape(g.mul_mat(w[GATE_TOKEN], g.reshape(rows, m.rank, k * n)), m.rank, k, n)
        gate = g.add(g.add(from_token, there), w[GATE_BIAS])
        return g.mul(rows, g.sigmoid(gate))

    def to_target(ids, count: int):
        return g.reshape(g.get_rows(w[TO_TARGET], ids), count) if TO_TARGET in w else ids

    best: Any = None
    before = pending
    for i in range(depths):
        row = gated(g.reshape(g.get_rows(w[BEFORE], before), m.rank, 1, 1), i)
        bias = g.mul_mat(w[AFTER], g.reshape(row, m.rank, 1))
        one = g.add(g.view(logits, (n, 1), offset=i * logits.nb[1]), bias)
        one = g.reshape(g.top_k_log_probs(one, k), k, 2, 1)
        best = one if best is None else g.concat(best, one, 2)
        before = to_target(g.cast(g.view(one, (1,)), I32), 1)
    own = g.reshape(g.cast(g.view(best, (k, depths), (best.nb[2],)), I32), k * depths)
    return pack(g, best, to_target(own, k * depths), own, pending, w[BEFORE], w[AFTER], gated)
