"""Bound on what speculation may lose against plain decoding, in milliseconds.

Expectations can be wrong in many ways: costs that were never measured, medians that know nothing of what happens now and then,
probabilities of another sequence. What came of a step is certain. Every speculative step is held against the time that plain
decoding takes for as many tokens; its loss is drawn from the ledger, its gain paid in. While nothing is left there are no more
such steps, and each plain one pays in a small share of its time.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARE = 0.01  # of a plain step's time that may be lost later
START = 4.0  # plain steps' time that may be lost at first: some tries, and steps that gave less than usual
MOST = 16.0  # plain steps' time of gains that later losses may be drawn from


@dataclass(slots=True)
class Ledger:
    """What drafting may still lose against plain decoding.

    Attributes:
        left: Milliseconds, None before a plain step was measured.
    """

    left: float | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing more may be lost now."""
        return self.left is not None and self.left <= 0

    def plain(self, ms: float) -> None:
        """Note a plain step."""
        if self.left is not None:
            self.left += SHARE * ms

    def speculative(self, ms: float, tokens_ms: float, plain_ms: float) -> None:
        """Hold a speculative step against plain decoding.

        Args:
            ms: What it took.
            tokens_ms: What plain decoding takes for as many tokens.
            plain_ms: A plain step of all its sequences.
        """
        start = START * plain_ms
        left = start if self.left is None else self.left
        most = max(MOST * plain_ms, left)
        # a machine that was suspended within a step may not disable drafting for hours
        self.left = max(min(left + tokens_ms - ms, most), -start)

    def plain_steps(self, plain_ms: float) -> int:
        """How many steps have to be plain until something may be lost again."""
        return int(-(self.left or 0.0) / (SHARE * plain_ms)) + 1 if self.is_empty else 0

    def begin(self, plain_ms: float, part: float) -> None:
        """A sequence joins: what others gained is not for it to lose.

        Args:
            plain_ms: A plain step of all sequences, 0 while that is not known.
            part: How much of what others left gives way to what may be lost at first.
        """
        if self.left is not None and plain_ms:
            start = START * plain_ms
            self.left = min(self.left + part * (start - self.left), start)
