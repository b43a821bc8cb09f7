"""Plans of the fixed modes."""

from __future__ import annotations

from typing import get_args

from ..config import Mode
from ..errors import ConfigError
from .plan import PLAIN, Plan


def plan_of(
    mode: Mode, budget: int, depth: int, chain_seed: bool = False, lookup: bool = False
) -> Plan | None:
    """Return the plan of every step of a mode, None for `auto`, which decides each step.

    Args:
        budget: Drafted nodes of a tree.
        depth: The longest path that the draft model proposes, 0 without one.
        lookup: Whether prompt lookup may propose.

    Raises:
        ConfigError: The mode is unknown, or needs a source of candidates and there is none.
    """
    if mode not in get_args(Mode):
        raise ConfigError(f"mode: {mode!r} is none of {', '.join(get_args(Mode))}")
    has_source = depth > 0 or lookup
    if mode == "plain" or (mode == "auto" and not has_source):
        return PLAIN
    if not has_source:
        raise ConfigError(f"mode {mode} needs a draft model (-md)")
    if mode == "auto":
        return None
    return Plan("chain", depth or budget) if mode == "chain" else Plan("tree", budget, chain_seed)
