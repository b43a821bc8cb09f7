"""Whether a text repeats itself: a sign, free of passes, that a draft is worth a try.

A text that falls into repetition is what a draft foretells best. Where decoding is plain, since drafting did not pay before, each
token is looked up: did the three before it stand somewhere earlier, and did this one follow there too?
"""

from __future__ import annotations

from collections.abc import Sequence

ORDER = 3  # tokens that foretell the next
LOOK_BACK = 512  # tokens of a prompt that are looked at when a text begins


class Repetition:
    """What followed each three tokens of one text, and how many tokens in a row were so foretold."""

    def __init__(self) -> None:
        self.run = 0
        self._followed: dict[tuple[int, ...], int] = {}
        self._at: int | None = None

    def follow(self, tokens: Sequence[int]) -> int:
        """Take in what `tokens` has more than last time; the tokens in a row, up to its end, that were foretold."""
        followed, n = self._followed, len(tokens)
        if self._at is None or self._at > n:
            self._at = max(n - LOOK_BACK, ORDER)
        for i in range(self._at, n):
            before, token = (tokens[i - 3], tokens[i - 2], tokens[i - 1]), tokens[i]
            self.run = self.run + 1 if followed.get(before) == token else 0
            followed[before] = token
        self._at = max(n, ORDER)
        return self.run
