"""Parameters of DSpark beyond DFlash: sizes and tensors."""

from __future__ import annotations

from dataclasses import dataclass

BEFORE, AFTER = "markov_w1.weight", "markov_w2.weight"
GATE, GATE_BIAS = "markov_gate.weight", "markov_gate.bias"
CONFIDENCE, CONFIDENCE_BIAS = "conf_proj.weight", "conf_proj.bias"
TO_TARGET = "d2t"  # target ids of a reduced vocabulary
# the halves of the gate's matrix: what is multiplied with the hidden state, and with the row of the token before
GATE_HIDDEN, GATE_TOKEN = "markov_gate_hidden.weight", "markov_gate_token.weight"
MAX_RANK = 1 << 16


@dataclass(frozen=True, slots=True)
class Markov:
    """The head: its rank, and whether a gate from hidden state and token before stands on each row of its first table.

    Attributes:
        from_anchor: Column 0 of a block, on the pending token, drafts the next token already; else the columns behind
            it draft.
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
