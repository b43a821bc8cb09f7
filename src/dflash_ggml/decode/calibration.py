"""Calibration of draft probabilities: corrected by how often the target chose such tokens.

Every visited node is a labelled sample: the target's choice there is known, so each of its children was right or wrong. Counts
are kept by depth and by the draft's probability of the child; where there are few, the draft's own probability, or the rate of
other sequences, is used. If a sequence becomes more or less predictable, all depths change at once, and deep nodes are rarely
visited: a trend, in logits, follows faster than counts can. The counts include the effect of temperature, penalties and
grammars. The arithmetic is in `native/`.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .accept import Accepted
from .lookup import LookupRates, checked
from .native import NONE, doubles, ffi, ints, lib
from .tree import Tree

_CALIBRATION = ffi.typeof("struct calibration *")
_CALIBRATIONS, _INTS = ffi.typeof("struct calibration *[]"), ffi.typeof("int32_t[]")
_POINTERS = [ffi.typeof(f"{name} *[]") for name in ("int32_t", "int32_t", "float")]


class Calibration:
    """Hit counts of one draft on one target.

    Args:
        prior: Statistics of other sequences, updated as well.
    """

    def __init__(self, prior: Calibration | None = None) -> None:
        self._prior = prior
        self.native = ffi.new(_CALIBRATION)
        lib.calibration_init(self.native, NONE if prior is None else prior.native)

    def path_probabilities(self, tree: Tree) -> NDArray[np.float64]:
        """How likely each node is to be accepted, 1 at the root: the product of its path's calibrated probabilities."""
        found = np.empty(tree.width)
        _check(lib.calibration_paths(self.native, *_arrays(tree), doubles(found)))
        return found

    def observe(self, tree: Tree, accepted: Accepted) -> None:
        """Count the children of the visited nodes; in a merged tree only the draft's own, where no lookup vote was right."""
        kept = accepted.kept
        done = lib.calibration_observe(self.native, *_arrays(tree), kept, len(kept), len(accepted.path))
        _check(done)


def count_votes(tree: Tree, accepted: Accepted, rates: LookupRates) -> None:
    """Count the votes at the visited nodes of a merged tree, and where none was right the draft's own children."""
    assert tree.evidence is not None
    n, parents, _, *rest = _arrays(tree)
    kept = accepted.kept
    checked(lib.lookup_rates_observe(rates.native, n, parents, *rest, kept, len(kept), len(accepted.path)))


def path_probabilities(trees: Items[Tree], calibrations: Items[Calibration | None]) -> NDArray[np.float64]:
    """`Calibration.path_probabilities` of several trees, concatenated; None: uncalibrated."""
    n, widths = len(trees), [tree.width for tree in trees]
    if not n or n != len(calibrations):
        raise ValueError(f"{n} trees with {len(calibrations)} calibrations")
    if n == 1 and calibrations[0] is not None:
        return calibrations[0].path_probabilities(trees[0])
    found, arrays = np.empty(sum(widths)), [tree.arrays() for tree in trees]
    parents, depths, log_probs = (ffi.new(of, part) for of, part in zip(_POINTERS, map(list, zip(*arrays))))
    known = ffi.new(_CALIBRATIONS, [NONE if one is None else one.native for one in calibrations])
    of_all = n, known, ffi.new(_INTS, widths), parents, depths, log_probs
    _check(lib.calibration_paths_each(*of_all, doubles(found)))
    for tree, calibration, first in zip(trees, calibrations, accumulate(widths, initial=0)):
        if tree.evidence is not None and calibration is not None:
            found[first : first + tree.width] = calibration.path_probabilities(tree)
    return found


def _arrays(tree: Tree) -> tuple[Any, ...]:
    """A tree for C: nodes, parents, depths, log-probabilities, and of a merged one cells, rests and trust."""
    n, evidence = tree.width, tree.evidence
    parts = tree.arrays()
    if evidence is None:
        return n, *parts, NONE, NONE, 1.0
    cells, rests = ints(evidence.cells), doubles(evidence.rests)
    if len(cells) < n or len(rests) < n:
        raise ValueError(f"the evidence of {n} nodes has {len(cells)} cells and {len(rests)} rests")
    return n, *parts, cells, rests, evidence.trust


def _check(done: int) -> None:
    if done == -1:
        raise MemoryError("no memory to calibrate a tree")
    if done < 0:
        raise ValueError(
            "parents must come before their children, at depths from 1, and a walk's nodes must be the tree's"
        )
