"""Widths that a step may have: node counts, columns of a draft, what they cost, and the one that was chosen."""

from __future__ import annotations

from dataclasses import dataclass


def step_ends(budget: int) -> list[int]:
    """Node counts at which one more node would start a wider pass, up to `budget`; the root takes a column too."""
    ends = [n for n in (1, 2, 3, 5, 7) if n <= budget]
    ends += range(15, budget + 1, 8)
    return ends if ends[-1] == budget else [*ends, budget]


def block_choices(depth: int) -> list[int]:
    """Columns that a draft of `depth` positions may be run with: the whole block, and half of it."""
    whole = depth + 1
    return [whole, whole // 2] if whole >= 8 else [whole]


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
    """What drafted steps cost with a draft of so many columns. ms: by nodes; least: of them; is_sure: whether the draft was
    measured more than once or twice; due: the step at which it is made anew; asked: the one at which that was put off."""

    ms: dict[int, float]
    least: float
    is_sure: bool
    due: int
    asked: int | None = None
