"""The plan of one sequence's next step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..decode.candidates import Candidates
from ..decode.lookup import Merged
from ..decode.tree import Tree, expand, spine


@dataclass(frozen=True, slots=True)
class Plan:
    """What to propose, and the size of the tree.

    Attributes:
        budget: Drafted nodes; 0 for plain decoding. A chain has at most as many as its source proposes.
        depth: Tokens that the draft model proposes; None for its maximum.
        drafts: Whether the draft model runs; otherwise the tree holds prompt lookup's candidates only.
    """

    kind: Literal["plain", "chain", "tree"]
    budget: int
    chain_seed: bool = False
    depth: int | None = None
    drafts: bool = True

    def build(self, root: int, candidates: Candidates | Merged) -> Tree:
        """Grow the tree of a step from its candidates."""
        if self.kind == "chain":
            return spine(root, candidates, self.budget)
        return expand(root, candidates, self.budget, self.chain_seed)


PLAIN = Plan("plain", 0)
