"""Forecast of a sequence's gain from its next draft, by the expected gains of its last trees."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

LOOK_BACK = 6  # trees kept

Array = NDArray[np.float64]
Gains = tuple[Array, Array]  # of nodes, and how often a step has each of them


def blocks(depth: int) -> list[int]:
    """Block sizes of a draft of `depth` positions: the whole block, half of it, down to four columns."""
    found = [depth + 1] if depth else []
    while found and found[-1] >= 8:
        found.append(found[-1] // 2)
    return found


class Forecast:
    """Expected gains of a sequence's next drafts, by the columns of the draft.

    Trees are kept node by node, largest gain first. A mean would hide that steps of high acceptance use the columns that
    steps of low acceptance leave, which is where a longer draft helps.

    Args:
        depth: Of the draft.
        others: Forecast over all sequences, updated as well.
    """

    def __init__(self, depth: int, others: Forecast | None = None) -> None:
        self.blocks, self.others = blocks(depth), others
        self.tried = 0  # trees
        self._gains: dict[int, deque[Array]] = {block: deque(maxlen=LOOK_BACK) for block in self.blocks}
        # a longer draft than was run: extrapolate the path until that draft was tried
        self._hoped: dict[int, list[Array]] = {}

    def of(self, block: int, most: int) -> Gains:
        """Expected gains of up to `most` nodes of a draft of `block` columns, in any order."""
        trees: Items[Array] = self._gains[block] or self._hoped.get(block, ())
        if not trees and self.others is not None:
            trees = self.others._gains[block]
        if not trees:
            return np.zeros(0), np.zeros(0)
        trees = [tree[:most] for tree in trees]
        nodes = np.concatenate(trees)
        return nodes, np.full(len(nodes), 1 / len(trees))

    def learn(self, probability: Array, depths: NDArray[np.int32], drafted: int) -> None:
        """Learn from a grown tree.

        Args:
            probability: Acceptance probability of each node, the root first.
            drafted: Columns of its draft.
        """
        self.tried += 1
        nodes, deep = probability[1:], depths[1:]
        for forecast in (self.others, self):
            if forecast is not None:
                forecast._take(nodes, deep, drafted)

    def _take(self, nodes: Array, deep: NDArray[np.int32], drafted: int) -> None:
        reach = float(nodes[deep == drafted - 1].max(initial=0.0))
        for block in reversed(self.blocks):
            trees = self._gains[block]
            if block <= drafted:
                trees.append(np.sort(nodes if block == drafted else nodes[deep < block])[::-1])
                continue
            # shorter drafts make what a longer one gave out of date
            if trees and self.tried % LOOK_BACK == 0:
                trees.popleft()
            further = reach ** (1 + np.arange(1, block - drafted + 1) / (drafted - 1))
            self._hoped[block] = [np.sort(np.concatenate([self._gains[drafted][-1], further]))[::-1]]
