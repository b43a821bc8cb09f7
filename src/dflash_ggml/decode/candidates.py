"""Candidates of a draft: blocks of continuations with log-probabilities, which C walks by their `native`
(docs/decisions/0007).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Union

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .native import ffi, floats, ints, lib

_DRAFT = ffi.typeof("struct draft *")
_MOST = 2**31 - 1  # candidates: cursors are int32


class NonFiniteDraft(ValueError):
    """The draft returned NaN or infinite probabilities: its weights are damaged, or a sum overflowed."""


class CandidateBlock:
    """A block: K candidates for each of L depths, best first, and optionally pairwise scores of adjacent depths.

    ids int32 and log_probs float32 [L, K]. pairs float32 [L, K, K]: added to the score of candidate b of depth i after
    candidate a of depth i - 1 is pairs[i, a, b] (pairs[0, 0] is that of the pending token); the probabilities of one parent's
    children have the same sum as the row's, since tokens outside the row have some too.
    """

    def __init__(self, ids: ArrayLike, log_probs: ArrayLike, pairs: ArrayLike | None = None) -> None:
        """Check a block of candidates and hand it to C.

        Args:
            ids: int32 [L, K], the K candidates of each of L depths, best first.
            log_probs: float32 [L, K], their log-probabilities, falling along each row.
            pairs: Pair scores, if the draft has them (see the class).

        Raises:
            NonFiniteDraft: Log-probabilities are NaN or above 0.
            ValueError: Shapes differ, or rows do not fall.
        """
        self.ids = ids = np.ascontiguousarray(ids, np.int32)
        self.log_probs = log_probs = np.ascontiguousarray(log_probs, np.float32)
        if ids.ndim != 2 or ids.shape != log_probs.shape or (ids.shape[0] and not ids.shape[1]):
            raise ValueError(
                f"ids {ids.shape} and log_probs {log_probs.shape} must both be [L, K] with K >= 1"
            )
        if ids.size > _MOST:
            raise ValueError(f"ids {ids.shape} are more than {_MOST} candidates")
        self.pairs: NDArray[np.float32] | None = None
        native = ffi.new(_DRAFT)
        native.n_depths, native.n_ranks = n_depths, n_ranks = ids.shape
        self._held = held = [ints(self.ids), floats(self.log_probs)]
        native.ids, native.log_probs = held
        if fault := lib.rows_fault(n_depths, n_ranks, native.log_probs):
            if fault == 1:
                raise NonFiniteDraft("log_probs must be log-probabilities: found NaN or a value above 0")
            raise ValueError("log_probs must fall along each row: sort the candidates by rank")
        if pairs is not None:
            self.pairs = np.ascontiguousarray(pairs, np.float32)
            if self.pairs.shape != (n_depths, n_ranks, n_ranks):
                raise ValueError(f"pairs {self.pairs.shape} must be [L, K, K] for ids {ids.shape}")
            held.append(floats(self.pairs))
            native.pairs = held[-1]
            if lib.pairs_fault(self.pairs.size, native.pairs):
                raise NonFiniteDraft("pairs must be numbers: found NaN")
        self.native = native  # struct for C, which points to the arrays above


class CombinedCandidates:
    """Candidates of several drafts combined: below a node, the mean of the distributions of the drafts that reach it.

    A token of several drafts is one node.
    """

    def __init__(self, drafts: Sequence[CandidateBlock]) -> None:
        self.drafts = tuple(drafts)
        self._held = ffi.new("struct draft *[]", [draft.native for draft in drafts])
        self.native = native = ffi.new(_DRAFT)  # struct for C, which points to those of the drafts
        native.n_parts, native.parts = len(drafts), self._held


Candidates = Union[CandidateBlock, CombinedCandidates]
