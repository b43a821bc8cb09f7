"""How to decode the next step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .candidates import Candidates
from .merged import Merged
from .tree import Tree, expand, spine


@dataclass(frozen=True, slots=True)
class Plan:
    """`budget` counts drafted nodes: 0 for plain, for a chain at most the draft's depth where only that drafts.

    depth: how far the draft need look; None: as far as it can. least: log-probability of paths that are not worth growing; a
    merged tree is not cut there. choose: makes the grown tree smaller, once its candidates are
    known; None keeps all of it. drafts: whether the model draft is run; where not, copies alone are verified, and `tree` is
    what was grown of them to decide that.
    """

    kind: Literal["plain", "chain", "tree"]
    budget: int
    chain_seed: bool = False
    depth: int | None = None
    choose: Callable[[Tree], Tree] | None = None
    drafts: bool = True
    tree: Tree | None = None
    least: float = float("-inf")

    def build(self, root: int, candidates: Candidates | Merged) -> Tree:
        """The tree to verify."""
        if self.tree is not None:
            return self.tree
        if isinstance(candidates, Merged):
            if self.kind == "chain":
                return candidates.spine(root, self.budget)
            tree = candidates.grow(root, self.budget, self.chain_seed)
        elif self.kind == "chain":
            return spine(root, candidates, self.budget)
        else:
            tree = expand(root, candidates, self.budget, self.chain_seed, self.least)
        return tree if self.choose is None else self.choose(tree)
