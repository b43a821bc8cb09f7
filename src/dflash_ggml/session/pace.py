"""How fast a prompt is read while other texts are being written.

What reading takes of the others' time is a debt that writing pays off: for every second of steps so much of reading, so that a
long prompt slows the others by SLOWER at most. Some may be borrowed at once, so that the first token of a short prompt comes
soon. The other design was a share of the columns of every pass; prompts would need passes of both kinds, and one of 500 tokens
would take as long per token as one of 5,000.
"""

from __future__ import annotations

SLOWER = 0.3  # of the time of steps that reading may take beside them
BORROWED = 0.25  # seconds of reading that are there at once, and again after a while without any
LONGEST = 0.08  # seconds of one pass over a prompt that others wait for
STEPS = 3.0  # or so many of their steps, where those are long
LEAST = 16  # tokens of a pass over a prompt: weights would be read for too few


class Pace:
    """When the next piece of a prompt may be read beside running texts, and how long it may be."""

    def __init__(self) -> None:
        self.level = BORROWED  # seconds of reading that are free now
        self._step = 0.0  # seconds of a step, the last few
        self._took: dict[int, float] = {}  # seconds of a pass over so many tokens, the last few

    @property
    def may_read(self) -> bool:
        """Whether the others have been left in peace for long enough."""
        return self.level > 0

    def stepped(self, seconds: float) -> None:
        """A step of the others took so long."""
        self._step += (seconds - self._step) * (0.2 if self._step else 1.0)
        self.level = min(self.level + SLOWER * seconds, BORROWED)

    def read(self, n: int, seconds: float, beside: bool, usual: bool = True) -> None:
        """A pass over n tokens of a prompt took so long; beside: others waited for it. usual: not so where a graph had to be
        built for it, which happens once and is no debt."""
        if usual:
            before = self._took.get(n, seconds)
            self._took[n] = before + 0.3 * (seconds - before)
            if beside:
                self.level -= seconds

    def lent(self, seconds: float) -> None:
        """The others waited so long for something that is no prompt of theirs."""
        self.level -= seconds

    def most(self) -> int:
        """Tokens of a piece that others wait for: a power of two."""
        longest, n = max(LONGEST, STEPS * self._step), LEAST
        while self._expected(2 * n) <= longest and n < 4096:
            n *= 2
        return n

    def _expected(self, n: int) -> float:
        """Seconds of a pass over n tokens, from the nearest that was measured; at first as long as may be."""
        if not self._took:
            return 0.0 if n <= 4 * LEAST else float("inf")
        nearest = min(self._took, key=lambda seen: abs(seen.bit_length() - n.bit_length()))
        return self._took[nearest] * max(n / nearest, 1.0)
