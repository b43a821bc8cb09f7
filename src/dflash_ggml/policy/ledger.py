"""Bound on what speculation may lose against plain decoding, in milliseconds.

Expectations can be wrong in many ways: unmeasured costs, medians that ignore rare events, probabilities from another sequence.
Outcomes are certain. Every speculative step is compared with the time of plain decoding for as many tokens: a loss is debited, a
gain credited. While the balance is empty every step is plain, and credits a small share of its time.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARE = 0.01  # share of a plain step's time that is credited
START = 4.0  # initial balance in plain steps: some trials, and steps below average
MOST = 16.0  # largest balance in plain steps


@dataclass(slots=True)
class Ledger:
    """The loss against plain decoding that drafting may still incur.

    Attributes:
        left: Milliseconds, None before a plain step was measured.
    """

    left: float | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the balance is used up."""
        return self.left is not None and self.left <= 0

    def plain(self, ms: float) -> None:
        """Note a plain step."""
        if self.left is not None:
            self.left += SHARE * ms

    def speculative(self, ms: float, tokens_ms: float, plain_ms: float) -> None:
        """Record a speculative step against plain decoding.

        Args:
            ms: Time of the step.
            tokens_ms: Time of plain decoding for as many tokens.
            plain_ms: Time of a plain step of all its sequences.
        """
        start = START * plain_ms
        left = start if self.left is None else self.left
        most = max(MOST * plain_ms, left)
        # a machine that was suspended within a step may not disable drafting for hours
        self.left = max(min(left + tokens_ms - ms, most), -start)

    def plain_steps(self, plain_ms: float) -> int:
        """Number of plain steps until the balance is positive again."""
        return int(-(self.left or 0.0) / (SHARE * plain_ms)) + 1 if self.is_empty else 0

    def begin(self, plain_ms: float, part: float) -> None:
        """A sequence joins: it must not spend the gains of others.

        Args:
            plain_ms: Time of a plain step of all sequences, 0 while unknown.
            part: Share of the balance that is replaced by the initial one.
        """
        if self.left is not None and plain_ms:
            start = START * plain_ms
            self.left = min(self.left + part * (start - self.left), start)
