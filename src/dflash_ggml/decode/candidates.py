"""Candidates of a draft: continuations with log-probabilities, walked with cursors.

A cursor is the position of a tree's node in its source, which is expanded one node at a time (docs/decisions/0007). Blocks of
candidates, which most drafts return, are walked in C, by their `native`; any other source is called.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import exp, log
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .native import ffi, floats, ints, lib

_DRAFT = ffi.typeof("struct draft *")
_MOST = 2**31 - 1  # candidates: cursors are int32


class NonFiniteDraft(ValueError):
    """The draft returned NaN or infinite probabilities: its weights are damaged, or a sum overflowed."""


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
    """A block: K candidates for each of L depths, best first, and optionally pairwise scores of adjacent depths.

    ids int32 and log_probs float32 [L, K]. pairs float32 [L, K, K]: added to the score of candidate b of depth i after
    candidate a of depth i - 1 is pairs[i, a, b] (pairs[0, 0] is that of the pending token); the probabilities of one parent's
    children have the same sum as the row's, since tokens outside the row have some too. Cursors are (depth, index in its row).
    """

    root = (0, 0)

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

    @property
    def depth(self) -> int:
        """L, the length of the longest path."""
        return len(self.ids)

    def expand(self, cursor: tuple[int, int]) -> Children:
        """The candidates of the next depth, with pair scores added where there are any."""
        depth, index = cursor
        n_depths, n_ranks = self.ids.shape
        if depth == n_depths:
            return (), (), ()
        if self.pairs is None:
            return (
                self.ids[depth].tolist(),
                self.log_probs[depth].tolist(),
                [(depth + 1, i) for i in range(n_ranks)],
            )
        if not (0 <= depth < n_depths and 0 <= index < n_ranks):
            raise IndexError(f"no candidate {index} at depth {depth - 1}")
        tokens, ranks, scores = (
            ffi.new(f"int32_t[{n_ranks}]"),
            ffi.new(f"int32_t[{n_ranks}]"),
            ffi.new(f"double[{n_ranks}]"),
        )
        mass = lib.row_mass(self.native, depth)
        n = lib.pairs_after(self.native, depth, index, mass, tokens, ranks, scores)
        return (
            ffi.unpack(tokens, n),
            ffi.unpack(scores, n),
            [(depth + 1, rank) for rank in ffi.unpack(ranks, n)],
        )


class Several:
    """Candidates of several drafts combined: below a node, the mean of the distributions of the drafts that reach it.

    A cursor has one cursor per draft, None where its candidates end; a token of several drafts is one node with all of their
    cursors.
    """

    def __init__(self, drafts: Sequence[Candidates]) -> None:
        self.drafts = tuple(drafts)
        self.native: Any = None  # struct for C, if all are blocks
        blocks = [draft.native for draft in drafts if isinstance(draft, Rows)]
        if len(blocks) == len(drafts):
            self._held = ffi.new("struct draft *[]", blocks)
            self.native = ffi.new(_DRAFT)
            self.native.n_parts, self.native.parts = len(blocks), self._held

    @property
    def root(self) -> Hashable:
        """The root's cursor in each draft."""
        return tuple(draft.root for draft in self.drafts)

    def expand(self, cursor: tuple[Any, ...]) -> Children:
        """See Candidates.expand."""
        found: dict[int, tuple[float, list[Any]]] = {}
        speaking = 0
        for i, (draft, at) in enumerate(zip(self.drafts, cursor)):
            tokens, log_probs, cursors = ((), (), ()) if at is None else draft.expand(at)
            speaking += bool(len(tokens))
            for token, log_prob, after in zip(tokens, log_probs, cursors):
                total, after_each = found.get(token, (0.0, [None] * len(self.drafts)))
                after_each[i] = after
                found[token] = total + exp(log_prob), after_each
        ranked = sorted(((p, t, c) for t, (p, c) in found.items() if p > 0), key=lambda entry: -entry[0])
        return (
            [t for _, t, _ in ranked],
            [log(p / speaking) for p, _, _ in ranked],
            [tuple(c) for _, _, c in ranked],
        )
