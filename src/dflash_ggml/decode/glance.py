"""A cheap look at prompt lookup's best candidate, in one call.

Most plain steps of a small model only need to know that no match is likely enough. The full lookup (`TextIndex`,
`LookupCandidates`) takes several calls and arrays, each three times slower behind a pass whose weights fill the caches.
"""

from __future__ import annotations

from collections.abc import Sequence

from .lookup import LookupRates, checked
from .native import ffi, lib
from .text_index import TextIndex

_GLANCE = ffi.typeof("struct glance *")


class Glance:
    """What the last look foretold, until the next one tells whether it was right."""

    def __init__(self, most: int) -> None:
        """`most`: matches that are examined, the longest first."""
        self._most, self._native = most, ffi.new(_GLANCE)

    def forget(self) -> None:
        """Nothing is to be learned of the last look."""
        self._native.n = 0

    def at(
        self,
        text: TextIndex,
        past: TextIndex,
        rates: LookupRates,
        new: Sequence[int],
        pending: int,
        learn: bool,
    ) -> float:
        """Put `new` behind the text; how likely the likeliest token is that stood behind its end and `pending` somewhere.

        0 where they stood nowhere, neither in it nor in `past`. learn: count what the last look foretold, if `new` is one token
        and followed it.
        """
        found: float = lib.copies_glance(
            self._native, text.native, past.native, rates.native, new, len(new), pending, self._most, learn
        )
        if found == -1:  # there was no room
            text.extend(new)
            found = lib.copies_glance(
                self._native, text.native, past.native, rates.native, [], 0, pending, self._most, learn
            )
        if found < 0:
            checked(-1)
        return found
