"""Probability of prompt lookup's best candidate, in one cheap call.

Most plain steps of a small model only need to know that no match is likely enough. The full lookup (`NgramIndex`,
`LookupCandidates`) takes several calls and arrays, each three times slower behind a pass whose weights fill the caches.
"""

from __future__ import annotations

from collections.abc import Sequence

from .lookup import LookupRates, checked
from .native import ffi, lib
from .ngram_index import NgramIndex

_GLANCE = ffi.typeof("struct glance *")


class Glance:
    """Cheap lookup; keeps the last votes until the next pending token shows whether they were right.

    Args:
        most: Matches that are examined, the longest first.
    """

    def __init__(self, most: int) -> None:
        self._most, self._native = most, ffi.new(_GLANCE)

    def forget(self) -> None:
        """Drop the last votes."""
        self._native.n = 0

    def at(
        self,
        index: NgramIndex,
        past: NgramIndex,
        rates: LookupRates,
        new: Sequence[int],
        pending: int,
        learn: bool,
    ) -> float:
        """Append `new`, and find what followed earlier occurrences of the end and `pending`.

        Args:
            index: the sequence's tokens. past: earlier outputs, searched too.
            learn: count the last votes as right or wrong, if `new` is the one token that followed them.

        Returns:
            The highest probability of a next token; 0 without a match.
        """
        found: float = lib.lookup_glance(
            self._native, index.native, past.native, rates.native, new, len(new), pending, self._most, learn
        )
        if found == -1:  # out of memory
            index.extend(new)
            found = lib.lookup_glance(
                self._native, index.native, past.native, rates.native, [], 0, pending, self._most, learn
            )
        if found < 0:
            checked(-1)
        return found
