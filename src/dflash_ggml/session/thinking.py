"""Reasoning budgets in tokens, explicit or by level of effort."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import ConfigError

Effort = Literal["minimal", "low", "medium", "high", "xhigh", "max"]
# share of the answer that reasoning may take; None: all of it
EFFORTS: dict[Effort, float | None] = {
    "minimal": 1 / 64,
    "low": 1 / 16,
    "medium": 1 / 4,
    "high": 3 / 4,
    "xhigh": None,
    "max": None,
}


@dataclass(frozen=True, slots=True)
class ThoughtLimit:
    """A limit on reasoning: after `budget` tokens the tokens of `end`, which close it, are forced."""

    budget: int
    end: tuple[int, ...]


def check_thinking(budget: int | None, effort: Effort | None) -> None:
    """Refuse a budget below -1 or an unknown effort.

    Raises:
        ConfigError: A field is wrong; it names it.
    """
    if budget is not None and budget < -1:
        raise ConfigError(f"reasoning_budget: expected -1 (no limit), 0 or more tokens, got {budget}")
    if effort is not None and effort not in EFFORTS:
        raise ConfigError(f"reasoning_effort: {effort!r:.40} is none of {', '.join(EFFORTS)}")


def effort_budget(effort: Effort, longest: int) -> int | None:
    """Tokens of reasoning at this effort, for an answer of at most `longest` tokens; None without a limit."""
    share = EFFORTS[effort]
    return None if share is None else int(share * longest)
