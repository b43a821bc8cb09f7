"""Parameters of DSpark beyond DFlash: sizes and tensors."""

from __future__ import annotations

from dataclasses import dataclass

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
