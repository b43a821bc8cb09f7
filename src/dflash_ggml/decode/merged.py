"""Trees of a draft and prompt lookup merged: sources of their nodes, and what they teach about prompt lookup."""

from __future__ import annotations

from .accept import Accepted
from .lookup import LookupRates, checked
from .native import doubles, ints, lib
from .tree import Tree

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
