"""Logits processors of a generation's own: one keeps an answer from ending, one keeps the raw logits of an emitted token."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class EndBan:
    """Forbids `ends` while prompt and answer together have fewer than `until` tokens (None: always)."""

    def __init__(self, ends: Iterable[int], until: int | None) -> None:
        self._ends = np.fromiter(sorted(ends), np.int64)
        self._until = until

    def __call__(self, ids: NDArray[np.int32], scores: NDArray[np.float32], /) -> NDArray[np.float32]:
        if self._binds(ids):
            scores[self._ends] = -np.inf
        return scores

    def allows(self, history: NDArray[np.int32], ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each of these tokens may follow the history."""
        return ~np.isin(ids, self._ends) if self._binds(history) else np.ones(len(ids), np.bool_)

    def _binds(self, history: NDArray[np.int32]) -> bool:
        return self._until is None or len(history) < self._until


class RowKeeper:
    """A logits processor that changes nothing and keeps a copy of the row it saw. It must come first."""

    def __init__(self) -> None:
        self.row: NDArray[np.float32] | None = None

    def __call__(self, history: NDArray[np.int32], scores: NDArray[np.float32]) -> NDArray[np.float32]:
        self.row = scores.copy()
        return scores
