"""What steps of one kind may lose of a text's time against plain decoding: the bound behind `never slower`.

Estimates err, and a text may change its kind at any token. So whatever they say, what all drafted steps of a text have lost may
exceed a few plain steps and a small share of the text by no more than the last of them lost. What they gained may be lost again,
up to a limit: a hard part must not be paid for with all that an easy one has won.
"""

from __future__ import annotations

from collections.abc import Mapping

START = 3.0  # plain steps that may be lost at once: some tries, and steps that gave less than usual
START_COPIES = 2.0  # the same for copies that are verified alone; one that fails loses a step or two
SHARE = 0.02  # of a plain step for each token
MOST = 16.0  # plain steps; gains beyond are not remembered


class Allowance:
    """The plain steps that may still be lost; after the step that went beyond it, less than none."""

    __slots__ = ("left",)

    def __init__(self, start: float = START) -> None:
        self.left = start

    def affordable(self, took: Mapping[int, float], plain: float, after: float) -> dict[int, float]:
        """Of what steps take by their width those that may be lost but for one token; the times are milliseconds."""
        most = (1 + self.left) * plain - after
        return {n: ms for n, ms in took.items() if ms <= most}

    def earn(self, steps: int = 1) -> None:
        """So many plain steps gave a token each."""
        self.left = min(self.left + steps * SHARE, MOST)

    def book(self, tokens: int, steps: float) -> None:
        """A step that took as long as so many plain ones gave so many tokens."""
        self.left = min(self.left + (1 + SHARE) * tokens - steps, MOST)
