"""What a draft proposes: continuations with log-probabilities, walked with cursors.

A cursor says where in its source a node of the tree stands. Two forms were weighed: a tree of nodes that each source builds
whole, and a source that is asked for the children of one node at a time. The second won: best-first expansion looks at a
few of K^L paths, and several sources can be merged by keeping a cursor of each. One source of plain rows, which is what a
DFlash block is, has a faster way in `tree.best_first`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import log
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

# A log-probability rounded in float32 may exceed 0 by an ulp or two; anything larger was never normalised.
_ROUNDING = 1e-3


class NoNumbers(ValueError):
    """A draft that gave NaN, or infinities where probabilities should be: its weights are damaged, or a sum overflowed."""


Children = tuple[Sequence[int], Sequence[float], Sequence[Any]]


class Candidates(Protocol):
    """Proposed continuations of one pending token."""

    @property
    def root(self) -> Hashable:
        """The cursor of the pending token."""
        ...

    def expand(self, cursor: Any) -> Children:
        """The children of a node, best first: token ids, log-probabilities given their parent, and their cursors."""
        ...


class Rows:
    """A block: K candidates for each of L depths, best first, and maybe how well neighbours go together.

    ids int32 and log_probs float32 [L, K]. pairs float32 [L, K, K]: added to the score of candidate b of depth i after
    candidate a of depth i - 1 is pairs[i, a, b] (pairs[0, 0] holds for the pending token); probabilities of one parent's
    children add up to what the row's do, for the tokens outside it have some too. Cursors are (depth, index in its row).
    """

    root = (0, 0)

    def __init__(self, ids: ArrayLike, log_probs: ArrayLike, pairs: ArrayLike | None = None) -> None:
        """Raises ValueError if shapes differ or rows do not fall; NoNumbers, one of them, if values are NaN or above 0."""
        self.ids, self.log_probs = checked_rows(ids, log_probs)
        self.pairs = None
        if pairs is not None:
            self.pairs = np.asarray(pairs, np.float32)
            if self.pairs.shape != (*self.ids.shape, self.ids.shape[1]):
                raise ValueError(f"pairs {self.pairs.shape} must be [L, K, K] for ids {self.ids.shape}")
            if np.isnan(self.pairs).any():
                raise NoNumbers("pairs must be numbers: found NaN")
            self._tokens = self.ids.tolist()
            self._cursors = [[(i + 1, j) for j in range(self.ids.shape[1])] for i in range(len(self.ids))]
            self._sorted: dict[int, tuple[list[list[float]], list[list[int]], list[int]]] = {}

    @property
    def depth(self) -> int:
        """L, the length of the longest path."""
        return len(self.ids)

    def expand(self, cursor: tuple[int, int]) -> Children:
        depth, index = cursor
        if depth == len(self.ids):
            return (), (), ()
        scores = self.log_probs[depth]
        if self.pairs is None:
            return self.ids[depth].tolist(), scores.tolist(), [(depth + 1, i) for i in range(len(scores))]
        if (found := self._sorted.get(depth)) is None:
            found = self._sorted[depth] = self._sort(depth)
        joint, order, counts = found
        ranks = order[index][: counts[index]]
        tokens, after, row = self._tokens[depth], self._cursors[depth], joint[index]
        return [tokens[j] for j in ranks], [row[j] for j in ranks], [after[j] for j in ranks]

    def _sort(self, depth: int) -> tuple[list[list[float]], list[list[int]], list[int]]:
        """After every candidate before `depth`: log-probabilities [K, K], their order, and how many are possible. Of a depth at
        once: node by node, numpy's calls would cost more than the tree."""
        assert self.pairs is not None
        scores = self.log_probs[depth].astype(np.float64)
        # of tokens outside the row nothing is known but that they take the rest; rounding must not make them less than none
        mass = min(log(np.exp(scores).sum()), 0) if scores[0] > -np.inf else 0
        joint = scores + (self.pairs[depth] if depth else self.pairs[0, :1])
        best = joint.max(1, keepdims=True)
        possible = best > -np.inf
        joint -= np.where(possible, best, 0)
        total = np.exp(joint).sum(1, keepdims=True)
        joint += mass - np.log(total, where=possible, out=total)
        counts = (joint > -np.inf).sum(1)
        return joint.tolist(), np.argsort(-joint, axis=1, kind="stable").tolist(), counts.tolist()


def checked_rows(ids: ArrayLike, log_probs: ArrayLike) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Candidate rows as arrays [L, K]. Raises ValueError as `Rows` does."""
    ids, log_probs = np.asarray(ids), np.asarray(log_probs)
    if ids.ndim != 2 or ids.shape != log_probs.shape or (ids.shape[0] and not ids.shape[1]):
        raise ValueError(f"ids {ids.shape} and log_probs {log_probs.shape} must both be [L, K] with K >= 1")
    # Counting what is right, so that NaN fails too.
    if np.count_nonzero(log_probs <= _ROUNDING) < log_probs.size:
        raise NoNumbers("log_probs must be log-probabilities: found NaN or a value above 0")
    if np.count_nonzero(log_probs[:, 1:] <= log_probs[:, :-1]) < log_probs[:, 1:].size:
        raise ValueError("log_probs must fall along each row: sort the candidates by rank")
    return ids, log_probs
