"""The sequence's tokens as arrays, extended token by token, for penalties and processors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_TAIL = 256  # trailing known tokens that are compared with the list


class History:
    """Ids of a sequence that mostly grows, and their counts.

    Args:
        n_vocab: Ids lie below it.
        counted: Keep `counts` too.
    """

    def __init__(self, n_vocab: int, counted: bool) -> None:
        self._tokens: Sequence[int] | None = None
        self._tail: list[int] = []
        self._n = 0
        self._buffer = np.empty(0, np.int32)
        self._counts = np.zeros(n_vocab, np.int64) if counted else None
        self._seen = np.empty(n_vocab if counted else 0, np.int64)
        self._n_seen = 0

    @property
    def ids(self) -> NDArray[np.int32]:
        """The ids, int32 [n], read-only; a view keeps its values when the sequence grows."""
        view = self._buffer[: self._n]
        view.flags.writeable = False
        return view

    @property
    def counts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Distinct ids, in no order, with their counts."""
        assert self._counts is not None
        seen = self._seen[: self._n_seen]
        return seen, self._counts[seen]

    def follow(self, tokens: Sequence[int]) -> None:
        """Update to `tokens`: if the list seen last has only grown, just the new tokens; else all of it.

        A change further than 256 tokens before the list's last length is not detected; pass a new list then.
        """
        if not self._goes_on(tokens):
            self._n = self._n_seen = 0
            self._buffer = np.empty(0, np.int32)  # views may use the old array
            if self._counts is not None:
                self._counts[:] = 0
        self._tokens = None  # an id outside the vocabulary must not leave partial state
        self._append(np.asarray(tokens[self._n :], np.int32))
        self._tokens, self._tail = tokens, list(tokens[max(self._n - _TAIL, 0) : self._n])

    def _goes_on(self, tokens: Sequence[int]) -> bool:
        if tokens is not self._tokens or len(tokens) < self._n:
            return False
        return list(tokens[self._n - len(self._tail) : self._n]) == self._tail

    def _append(self, new: NDArray[np.int32]) -> None:
        n = self._n + len(new)
        if n > len(self._buffer):
            grown = np.empty(max(2 * len(self._buffer), n + 256), np.int32)
            grown[: self._n] = self._buffer[: self._n]
            self._buffer = grown
        self._buffer[self._n : n] = new
        self._n = n
        if self._counts is not None:
            first = np.unique(new[self._counts[new] == 0])
            self._seen[self._n_seen : self._n_seen + len(first)] = first
            self._n_seen += len(first)
            np.add.at(self._counts, new, 1)
