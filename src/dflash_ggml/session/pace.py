"""How fast a prompt is read while other texts are being written.

What reading takes of the others' time is a debt that writing pays off: for every second of steps so much of reading, so that
prompts slow the others by SLOWER at most. Some may be borrowed at once, so that the first token of a short prompt comes soon. A
prompt that takes longer than that borrows nothing, and its next piece waits until it is paid for: what is borrowed would slow
those who write while it is read, which for one of 4,000 tokens on an H100 are three seconds, by another tenth. The other design
was a share of the columns of every pass; prompts would need passes of both kinds, and one of 500 tokens would take as long per
token as one of 5,000.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SLOWER = 0.27  # of the time of steps that reading may take beside them; with what else a round does 1.3 times slower at most
BORROWED = 0.25  # seconds of reading that are there at once, and again after a while without any
LONGEST = 0.1  # seconds of one pass over a prompt that others wait for
STEPS = 3.0  # or so many of their steps, where those are long
LEAST = 16  # tokens of a pass over a prompt: weights would be read for too few
MOST = 4096
OVERTAKEN = 3  # pieces of short prompts in a row that are read before one of an older, long one


@dataclass(slots=True)
class Account:
    """Of one prompt that is read beside others. since: seconds of steps that there had been before; spent: of reading."""

    since: float
    spent: float = 0.0


class Pace:
    """When the next piece of a prompt may be read beside running texts, and how long it may be."""

    def __init__(self) -> None:
        self.level = BORROWED  # seconds of reading that are free now
        self._step = 0.0  # seconds of a step, the last few
        self._stepped = 0.0  # of all steps
        self._overtaken = 0  # pieces of short prompts since the last one of an older, long one
        self._took: dict[int, float] = {}  # seconds of a pass over so many tokens, the last few

    @property
    def may_read(self) -> bool:
        """Whether the others have been left in peace for long enough."""
        return self.level > 0

    def opened(self) -> Account:
        """An account for a prompt of which nothing has been read yet."""
        return Account(self._stepped)

    def is_short(self, account: Account, left: int) -> bool:
        """Whether a prompt of which so many tokens are left may borrow what it takes."""
        if left <= 0:
            return True
        piece = min(self.most(), left)
        return account.spent + self._expected(piece) * left / piece <= BORROWED

    def may_go_on(self, account: Account, left: int) -> bool:
        """Whether a prompt is short, or has what its next piece takes."""
        if self.is_short(account, left):
            return True
        took = self._expected(min(self.most(), left))
        return account.spent + took <= SLOWER * (self._stepped - account.since)

    def turn(self, short: Sequence[bool]) -> int:
        """Which of some prompts that may be read comes next, by its place among them, oldest first: the first that is short, or
        every fourth time the oldest, for short ones that come all the time would take all that there is."""
        if not any(short):
            self._overtaken = 0
            return 0
        first = short.index(True)
        if first and self._overtaken >= OVERTAKEN:
            first = self._overtaken = 0
        elif first:
            self._overtaken += 1
        return first

    def stepped(self, seconds: float) -> None:
        """A step of the others took so long."""
        self._step += (seconds - self._step) * (0.2 if self._step else 1.0)
        self._stepped += seconds
        self.level = min(self.level + SLOWER * seconds, BORROWED)

    def read(
        self, n: int, seconds: float, beside: bool, usual: bool = True, account: Account | None = None
    ) -> None:
        """A pass over n tokens of a prompt took so long; beside: others waited for it. usual: not so where a graph had to be
        built for it, which happens once and is no debt."""
        if not usual:
            return
        before = self._took.get(n, seconds)
        self._took[n] = before + 0.3 * (seconds - before)
        if beside:
            self.level -= seconds
            if account is not None:
                account.spent += seconds

    def lent(self, seconds: float) -> None:
        """The others waited so long for something that is no prompt of theirs."""
        self.level -= seconds

    def most(self) -> int:
        """Tokens of a piece that others wait for: a power of two."""
        longest, n = max(LONGEST, STEPS * self._step), LEAST
        while 2 * n <= MOST and self._expected(2 * n) <= longest:
            n *= 2
        return n

    def _expected(self, n: int) -> float:
        """Seconds of a pass over n tokens: as measured, or on the line of two neighbours, for twice the tokens take less than
        twice as long; at first as long as may be."""
        if not self._took:
            return 0.0 if n <= 4 * LEAST else float("inf")
        if n in self._took:
            return self._took[n]
        known = sorted(self._took.items())
        fewer, more = [k for k in known if k[0] < n], [k for k in known if k[0] > n]
        if not fewer:
            return more[0][1]
        n0, least = fewer[-1]
        (n1, ms) = more[0] if more else fewer[-2] if len(fewer) > 1 else (0, 0.0)
        return least + max((ms - least) / (n1 - n0), 0.0) * (n - n0)
