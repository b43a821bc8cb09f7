"""How to decode the next step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .candidates import Candidates
from .tree import Tree, expand, spine


@dataclass(frozen=True, slots=True)
class Plan:
    """`budget` counts drafted nodes: 0 for plain, at most the draft's depth for a chain.

    depth: how far the draft need look; None: as far as it can. choose: makes the grown tree smaller, once its candidates are
    known; None keeps all of it.
    """

    kind: Literal["plain", "chain", "tree"]
    budget: int
    chain_seed: bool = False
    depth: int | None = None
    choose: Callable[[Tree], Tree] | None = None

    def build(self, root: int, candidates: Candidates) -> Tree:
        """The tree to verify."""
        if self.kind == "chain":
            return spine(root, candidates, self.budget)
        tree = expand(root, candidates, self.budget, self.chain_seed)
        return tree if self.choose is None else self.choose(tree)
