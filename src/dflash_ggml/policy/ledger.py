"""Bound on what speculation may lose against plain decoding, in milliseconds.

Expectations can be wrong in many ways: costs that were never measured, medians that know nothing of what happens now and then,
probabilities of another text. What came of a step is certain. Every speculative step is held against the time that plain
decoding takes for as many tokens; its loss is drawn from the ledger, its gain paid in. While nothing is left steps are plain,
and each pays in a small share of its time.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARE = 0.01  # of a plain step's time that may be lost later
START = 4.0  # plain steps' time that may be lost at first: some tries, and steps that gave less than usual
MOST = 16.0  # plain steps' time of gains that later losses may be drawn from
LOOK_AGAIN = 200  # steps after which it is seen again what a plain step takes


@dataclass(slots=True)
class Ledger:
    """left: milliseconds that may still be lost, None before a plain step was measured."""

    left: float | None = None
    _since: int = 0  # steps since one was plain

    @property
    def is_empty(self) -> bool:
        """Whether nothing more may be lost now."""
        return self.left is not None and self.left <= 0

    def wants_plain(self, is_known: bool) -> bool:
        """Whether the step that begins has to be plain: nothing may be lost, or what plain decoding takes is to be seen.

        is_known: whether that was measured for as many sequences.
        """
        self._since += 1
        return self.is_empty or self._since > (LOOK_AGAIN if is_known else 1)

    def plain(self, ms: float) -> None:
        """Note a plain step."""
        self._since = 0
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

    def begin(self, plain_ms: float) -> None:
        """A sequence joins: what others gained is not for it to lose."""
        if self.left is not None:
            self.left = min(self.left, START * plain_ms)
