"""Which width next: plain decoding, a chain, or a tree of so many nodes. Asked before every step.

A controller sees the sequence and what passes cost, never a draw of the target in the step that it plans: the tree may not
depend on what it is to verify. Deciding once per generation, as a plan object handed to the loop, was the other design; it
cannot follow a text that changes from easy to hard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, get_args

from ..config import Mode
from ..errors import ConfigError
from .accept import Accepted
from .adaptive import Adaptive
from .copied import CopySource
from .costs import Costs
from .experience import Experience
from .plan import Plan
from .sequence import Sequence
from .tree import Tree


class Controller(Protocol):
    """Chooses the next step's plan."""

    def next(self, sequence: Sequence, costs: Costs) -> Plan:
        """The plan of the next step of `sequence`."""
        ...

    def observe(self, tree: Tree, accepted: Accepted) -> None:
        """What came of a drafted step."""
        ...

    def catch_up(self) -> None:
        """Do what `next` and `observe` have left for a time when a device is busy; asked for or not, it is done in time."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same plan."""

    plan: Plan

    def next(self, sequence: Sequence, costs: Costs) -> Plan:
        return self.plan

    def observe(self, tree: Tree, accepted: Accepted) -> None:
        pass

    def catch_up(self) -> None:
        pass


def controller(
    mode: Mode,
    budget: int,
    depth: int,
    chain_seed: bool = False,
    experience: Experience | None = None,
    copies: CopySource | None = None,
) -> Controller:
    """The controller of a mode; `depth`: the longest path that the draft proposes, 0 without a draft; copies: the other source.

    `auto` decides every step, up to `budget` nodes, with what other sequences have left in `experience`; without any source it
    is plain. Raises ConfigError for an unknown mode, or one without its draft.
    """
    if mode not in get_args(Mode):
        raise ConfigError(f"mode: {mode!r} is none of {', '.join(get_args(Mode))}")
    if mode == "plain" or (mode == "auto" and not depth and copies is None):
        return Fixed(Plan("plain", 0))
    if not depth and copies is None:
        raise ConfigError(f"mode {mode} needs a draft model (-md)")
    if mode == "chain":
        return Fixed(Plan("chain", depth or budget))
    if mode == "auto":
        return Adaptive(budget, depth, experience or Experience(), copies)
    return Fixed(Plan("tree", budget, chain_seed))
