"""What speculation may lose against plain decoding: so many milliseconds and no more, whatever was expected of it.

Expectations can be wrong in many ways: costs that were never measured, medians that know nothing of what happens now and then,
probabilities of another text. What came of a step is certain. Every speculative step is held against the time that plain
decoding takes for as many tokens; its loss is drawn from the ledger, its gain paid in. While nothing is left steps are plain,
and each pays in a small share of its time.

What plain decoding takes is a median, which knows nothing of steps that something else on the machine disturbed. So a
speculative step that took several times what was expected is held to the expected too, as long as such steps are few.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

SHARE = 0.01  # of a plain step's time that may be lost later
START = 4.0  # plain steps' time that may be lost at first: some tries, and steps that gave less than usual
MOST = 16.0  # plain steps' time of gains that later losses may be drawn from
PATIENCE = 25.0  # times as much of both on a GPU, where drafting seldom loses for long and captures make costs known late
GRAPHS = (
    10.0  # plain steps' time that building graphs may take beside that; later ones are losses like all others
)
SPIKE = 2.5  # times the expected that a disturbed step takes, which is no loss of speculation: plain steps are disturbed too
SPIKES = 8  # steps of which one may be such a step; others count as they are
LOOK_AGAIN = 200  # steps after which it is seen again what a plain step takes


@dataclass(slots=True)
class Ledger:
    """left: milliseconds that may still be lost, None before a plain step was measured. patience: factor of all limits."""

    patience: float = 1.0
    left: float | None = None
    _built: float = 0.0  # milliseconds
    _since: int = 0  # steps since one was plain
    _spared: float = START  # disturbed steps that may be left out

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

    def speculative(
        self, ms: float, tokens_ms: float, plain_ms: float, expected: float = inf, is_cold: bool = False
    ) -> None:
        """Hold a speculative step against plain decoding.

        Args:
            ms: What it took.
            tokens_ms: What plain decoding takes for as many tokens.
            plain_ms: A plain step of all its sequences.
            expected: Milliseconds that it was expected to take.
            is_cold: Whether graphs were built in it.
        """
        free, over = 0.0, max(ms - expected, 0.0)
        self._spared = min(self._spared + 1 / SPIKES, START)
        if is_cold:
            free = min(over, max(self.patience * GRAPHS * plain_ms - self._built, 0.0))
            self._built += free
        elif ms > SPIKE * expected and self._spared >= 1:
            free, self._spared = over, self._spared - 1
        start = self.patience * START * plain_ms
        left = start if self.left is None else self.left
        most = max(self.patience * MOST * plain_ms, left)
        # a machine that was suspended within a step may not disable drafting for hours
        self.left = max(min(left + tokens_ms - ms + free, most), -START * plain_ms)

    def begin(self, plain_ms: float) -> None:
        """A sequence joins: what others gained is not for it to lose."""
        if self.left is not None:
            self.left = min(self.left, self.patience * START * plain_ms)
