"""The plan of one sequence's next step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ..config import Mode
from ..decode.candidates import Candidates
from ..decode.lookup import Merged
from ..decode.tree import Tree, expand, spine
from ..errors import ConfigError


@dataclass(frozen=True, slots=True)
class Plan:
    """What to propose, and the size of the tree.

    Attributes:
        budget: Drafted nodes; 0 for plain decoding. A chain has at most as many as its source proposes.
        depth: Tokens that the draft model proposes; None for its maximum.
        drafts: Whether the draft model runs; otherwise the tree holds prompt lookup's candidates only.
    """

    kind: Literal["plain", "chain", "tree"]
    budget: int
    chain_seed: bool = False
    depth: int | None = None
    drafts: bool = True

    def build(self, root: int, candidates: Candidates | Merged) -> Tree:
        """Grow the tree of a step from its candidates."""
        if self.kind == "chain":
            return spine(root, candidates, self.budget)
        return expand(root, candidates, self.budget, self.chain_seed)


PLAIN = Plan("plain", 0)


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
