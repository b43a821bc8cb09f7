"""Which width next: plain decoding, a chain, or a tree of so many nodes. Asked before every step.

A controller sees the sequence and what passes cost, never a draw of the target in the step that it plans: the tree may not
depend on what it is to verify. Deciding once per generation, as a plan object handed to the loop, was the other design; it
cannot follow a text that changes from easy to hard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from ..config import Mode
from ..errors import ConfigError
from .candidates import Candidates
from .costs import Costs
from .sequence import Sequence
from .tree import Tree, expand, spine


@dataclass(frozen=True, slots=True)
class Plan:
    """How to decode the next step. `budget` counts drafted nodes: 0 for plain, at most the draft's depth for a chain."""

    kind: Literal["plain", "chain", "tree"]
    budget: int
    chain_seed: bool = False

    def build(self, root: int, candidates: Candidates) -> Tree:
        """The tree to verify."""
        if self.kind == "chain":
            return spine(root, candidates, self.budget)
        return expand(root, candidates, self.budget, self.chain_seed)


class Controller(Protocol):
    """Chooses the next step's plan."""

    def next(self, sequence: Sequence, costs: Costs) -> Plan:
        """The plan of the next step of `sequence`."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same plan."""

    plan: Plan

    def next(self, sequence: Sequence, costs: Costs) -> Plan:
        return self.plan


def controller(mode: Mode, budget: int, depth: int, chain_seed: bool = False) -> Controller:
    """The controller of a mode; `depth`: the longest path that the draft proposes, 0 without a draft.

    `auto` is a tree of `budget` nodes when there is a draft, else plain. Raises ConfigError for an unknown mode, or one
    without its draft.
    """
    if mode not in get_args(Mode):
        raise ConfigError(f"mode: {mode!r} is none of {', '.join(get_args(Mode))}")
    if not depth and mode in ("chain", "tree"):
        raise ConfigError(f"mode {mode} needs a draft model (-md)")
    if not depth or mode == "plain":
        return Fixed(Plan("plain", 0))
    if mode == "chain":
        return Fixed(Plan("chain", depth))
    return Fixed(Plan("tree", budget, chain_seed))
