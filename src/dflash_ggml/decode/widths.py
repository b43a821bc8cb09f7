"""Widths that a step may have: node counts, columns of a draft, what they cost, and the one that was chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt


def step_ends(budget: int) -> list[int]:
    """Node counts at which one more node would start a wider pass, up to `budget`; the root takes a column too."""
    ends = [n for n in (1, 2, 3, 5, 7) if n <= budget]
    ends += range(15, budget + 1, 8)
    return ends if ends[-1] == budget else [*ends, budget]


def block_choices(depth: int) -> list[int]:
    """Columns that a draft of `depth` positions may be run with: the whole block, and half of it."""
    whole = depth + 1
    return [whole, whole // 2] if whole >= 8 else [whole]


def least_sure(took: Mapping[int, float], plain: float, after: float) -> float:
    """How likely the next token of copies must be for a pass over them to be worth its time, 1 where it never is.

    took: milliseconds of a step by its nodes; plain: of a plain one; after: what the next one takes more. A match grows with
    every token that is right, so that each is likelier than the one before: here those behind the first are as likely as its
    square root, more than was found of any match length (0.25, 0.4, 0.5, 0.65, 0.8 as it grows; `native/copy_rates.c`).
    """
    for percent in range(0, 100, 4):
        sure = percent / 100
        next_ = sqrt(sure)
        for n, ms in took.items():
            if (1 + sure * (1 - next_**n) / (1 - next_)) * plain > ms + after:
                return sure
    return 1.0


@dataclass(frozen=True, slots=True)
class Cut:
    """What was chosen of a tree: drafted nodes, how many times plain decoding the step is expected to be worth, and the
    milliseconds that it loses against plain."""

    nodes: int
    times: float
    loss: float
    token: float = 0.0  # how many times plain decoding each token of the step makes it worth


NOTHING = Cut(0, 0.0, 0.0)


@dataclass(slots=True)
class Table:
    """What drafted steps cost with a draft of so many columns.

    ms: by nodes; least: of them; draft: of the draft alone; is_sure: whether that was measured more than once or twice; due: the
    step at which it is made anew; asked: the one at which that was put off.
    """

    ms: dict[int, float]
    least: float
    draft: float
    is_sure: bool
    due: int
    asked: int | None = None
