"""What a draft proposes: continuations with log-probabilities, walked with cursors.

A cursor says where in its source a node of the tree stands. Two forms were weighed: a tree of nodes that each source builds
whole, and a source that is asked for the children of one node at a time. The second won: best-first expansion looks at a
few of K^L paths, and several sources can be merged by keeping a cursor of each. One source of plain rows, which is what a
DFlash block is, has a faster way in `tree.best_first`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import repeat
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
            self._joint: NDArray[np.float64] | None = None
            self._children: dict[tuple[int, int], Children] = {}

    @property
    def depth(self) -> int:
        """L, the length of the longest path."""
        return len(self.ids)

    def expand(self, cursor: tuple[int, int]) -> Children:
        depth, index = cursor
        if depth == len(self.ids):
            return (), (), ()
        if self.pairs is None:
            scores = self.log_probs[depth]
            return self.ids[depth].tolist(), scores.tolist(), [(depth + 1, i) for i in range(len(scores))]
        if (found := self._children.get(cursor)) is None:
            if self._joint is None:
                self._joint = self._after_each(self.pairs)
            row, tokens, below = self._joint[depth, index].tolist(), self._tokens[depth], depth + 1
            ranks = sorted(range(len(row)), key=row.__getitem__, reverse=True)
            while ranks and row[ranks[-1]] == -np.inf:
                ranks.pop()
            found = (
                list(map(tokens.__getitem__, ranks)),
                list(map(row.__getitem__, ranks)),
                list(zip(repeat(below), ranks)),
            )
            self._children[cursor] = found
        return found

    def _after_each(self, pairs: NDArray[np.float32]) -> NDArray[np.float64]:
        """Log-probabilities [L, K, K] of each depth's candidates after each of the depth before. Of all at once: parent by
        parent, or depth by depth, numpy's calls would cost more than the tree."""
        scores = self.log_probs.astype(np.float64)
        # of tokens outside the row nothing is known but that they take the rest; rounding must not make them less than none
        mass = np.exp(scores).sum(1)
        mass = np.minimum(np.log(mass, where=mass > 0, out=np.zeros_like(mass)), 0)
        joint = scores[:, None] + pairs
        best = joint.max(2, keepdims=True)
        possible = best > -np.inf
        joint -= np.where(possible, best, 0)
        total = np.exp(joint).sum(2, keepdims=True)
        joint += mass[:, None, None] - np.log(total, where=possible, out=total)
        return joint


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
