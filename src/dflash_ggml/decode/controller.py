"""Which width next: plain decoding, a chain, or a tree of so many nodes. Pure logic, no device code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from ..config import Mode
from ..errors import ConfigError
from .tree import Tree, best_first, chain


@dataclass(frozen=True, slots=True)
class Plan:
    """How to decode the next step. `budget` counts drafted nodes: 0 for plain, at most block - 1 for a chain."""

    kind: Literal["plain", "chain", "tree"]
    budget: int
    chain_seed: bool = False

    def build(self, root: int, ids: np.ndarray, log_probs: np.ndarray) -> Tree:
        """The tree to verify; ids and log_probs [L, K], best first."""
        if self.kind == "chain":
            return chain(root, ids, log_probs, length=self.budget)
        return best_first(root, ids, log_probs, self.budget, self.chain_seed)


def plan(mode: Mode, budget: int, block_size: int, chain_seed: bool = False) -> Plan:
    """The plan of a mode; `block_size` 0 means that there is no draft.

    `auto` is a tree of `budget` nodes when there is a draft, else plain. Raises ConfigError for an unknown mode, or one without its draft.
    """
    if mode not in get_args(Mode):
        raise ConfigError(f"mode: {mode!r} is none of {', '.join(get_args(Mode))}")
    if not block_size:
        if mode in ("chain", "tree"):
            raise ConfigError(f"mode {mode} needs a draft model (-md)")
        return Plan("plain", 0)
    if mode == "plain":
        return Plan("plain", 0)
    if mode == "chain":
        return Plan("chain", block_size - 1)
    return Plan("tree", budget, chain_seed)
