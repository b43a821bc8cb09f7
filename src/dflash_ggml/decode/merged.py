"""Merging of a draft model's candidates and prompt lookup's into one tree.

The distribution below each node combines both: tokens with votes of prompt lookup get the measured probabilities of such votes
(`LookupRates`, which also depend on the draft's probability), and the draft's other candidates share the rest in their own
proportions. Together they sum to one; a token of both is one node with both cursors (docs/decisions/0007).
"""

from __future__ import annotations

from .accept import Accepted
from .candidates import Candidates
from .lookup import LookupCandidates, LookupRates, checked
from .native import doubles, ints, lib
from .tree import BEST_FIRST, CHAIN_SEED, SPINE, Tree, grow

DRAFT, LOOKUP = 1, 2  # bits of `Tree.sources`


def observe(tree: Tree, accepted: Accepted, rates: LookupRates) -> None:
    """Count the votes at the visited nodes of a merged tree, and where none was right the draft's own children."""
    evidence, n, kept = tree.evidence, tree.width, accepted.kept
    assert evidence is not None
    parents, _, log_probs = tree.arrays()
    cells, rests = ints(evidence.cells), doubles(evidence.rests)
    if len(cells) < n or len(rests) < n:
        raise ValueError(f"the evidence of {n} nodes has {len(cells)} cells and {len(rests)} rests")
    tree_arrays, walked = (
        (parents, log_probs, cells, rests, evidence.trust),
        (kept, len(kept), len(accepted.path)),
    )
    checked(lib.lookup_rates_observe(rates.native, n, *tree_arrays, *walked))


class Merged:
    """A draft's candidates (or none) and those of prompt lookup."""

    def __init__(self, draft: Candidates | None, lookup: LookupCandidates, rates: LookupRates) -> None:
        self.draft, self.lookup, self.rates = draft, lookup, rates

    def grow(self, root: int, budget: int, chain_seed: bool = False) -> Tree:
        """The most probable paths, up to `budget` nodes, best first; see `tree.expand`."""
        order = CHAIN_SEED if chain_seed else BEST_FIRST
        return grow(root, self.draft, budget, order, lookup=self.lookup, rates=self.rates)

    def spine(self, root: int, length: int) -> Tree:
        """The chain of best children, at most `length` long."""
        return grow(root, self.draft, length, SPINE, lookup=self.lookup, rates=self.rates)
