"""What drafting is expected to give a sequence, known before its next draft runs: what its last trees promised."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

LOOK_BACK = 6  # trees that are remembered
PRIOR = 2.0  # trees that a prior is worth: what a longer draft is hoped to add, or other sequences
SURE = 2.0  # nodes for which a draft's promises are believed before any of them came
FADING = 0.95  # of those that came, by a step

Array = NDArray[np.float64]
Gains = tuple[Array, Array]  # of nodes, and how often a step has each of them


def blocks(depth: int) -> list[int]:
    """Columns that a draft of `depth` positions may run with: the whole block, half of it, down to four."""
    found = [depth + 1] if depth else []
    while found and found[-1] >= 8:
        found.append(found[-1] // 2)
    return found


class Forecast:
    """Expected gains of a sequence's next drafts, by the columns of the draft.

    Trees are kept node by node, largest gain first. Their mean would hide that an easy place takes the columns that a hard one
    leaves, which is what a longer draft is for.
    """

    def __init__(self, depth: int, others: Forecast | None = None) -> None:
        """depth: of the draft. others: the mean of all sequences, which learns too."""
        self.blocks, self.others = blocks(depth), others
        self.tried = 0  # trees
        self._gains: dict[int, deque[Array]] = {block: deque(maxlen=LOOK_BACK) for block in self.blocks}
        # a longer draft than was run: the path is thought to go on as it began, until the draft was tried
        self._hoped: dict[int, Array] = {}
        self._kept = self._promised = 0.0  # nodes; both fade

    def of(self, block: int, most: int) -> Gains:
        """Expected gains of up to `most` nodes of a draft of `block` columns, in any order."""
        own = list(self._gains[block])
        prior: list[Array] = []
        if len(own) < LOOK_BACK:
            if block in self._hoped:
                prior = [self._hoped[block]]
            elif self.others is not None:
                prior = list(self.others._gains[block])
        if not own and not prior:
            return np.zeros(0), np.zeros(0)
        total = len(own) + (PRIOR if prior else 0.0)
        trees = [tree[:most] for tree in (*own, *prior)]
        often = [1 / total] * len(own) + [PRIOR / total / len(prior) for _ in prior]
        believed = min((self._kept + SURE) / (self._promised + SURE), 1.0)
        return np.concatenate(trees) * believed, np.repeat(often, [len(tree) for tree in trees])

    def came(self, promised: float, kept: int) -> None:
        """Note what came of nodes whose probabilities sum to `promised`: a draft that promises too much is soon believed
        less."""
        self._kept, self._promised = FADING * self._kept + kept, FADING * self._promised + promised

    def learn(self, probability: Array, depths: NDArray[np.int32], drafted: int, whole: bool = True) -> None:
        """Take in a grown tree.

        Args:
            probability: Of each node to be accepted, the root first.
            drafted: Columns of its draft.
            whole: Whether all of it was grown. What was not is worth no more than its least node, and no more than in the
                tree before.
        """
        self.tried += 1
        nodes, deep = probability[1:], depths[1:]
        least = float(nodes.min(initial=1.0)) if len(nodes) else 0.0
        for block in self.blocks:
            if block <= drafted:
                found = np.sort(nodes if block == drafted else nodes[deep < block])[::-1]
                for forecast in (self.others, self):
                    if forecast is not None:
                        forecast._take(block, found, least, whole)
        reach = float(nodes[deep == drafted - 1].max(initial=0.0))
        for block in self.blocks:
            if block > drafted and len(self._gains[block]) < LOOK_BACK:
                further = reach ** (1 + np.arange(1, block - drafted + 1) / (drafted - 1))
                self._hoped[block] = np.sort(np.concatenate([self._gains[drafted][-1], further]))[::-1]

    def _take(self, block: int, found: Array, least: float, whole: bool) -> None:
        trees = self._gains[block]
        before = trees or (self.others._gains[block] if self.others else ())
        if not whole and before:
            found = np.concatenate([found, np.minimum(before[-1][len(found) :], least)])
        trees.append(found)
        self._hoped.pop(block, None) if len(trees) == LOOK_BACK else None
