"""What drafting is expected to give one text, known before its next draft is run: what its last trees promised."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .tree import Tree

LOOK_BACK = 6  # trees of a text that are remembered
SURE = 2.0  # nodes that a promise is believed for before any came
FADING = 0.95
OTHERS = 2.0  # trees that what is hoped for, or known of other texts, is worth
HOPED = 3  # of the last trees, what a longer draft would have added

Gains = tuple[NDArray[np.float64], NDArray[np.float64]]  # of nodes, and how often a step has each of them


@dataclass(slots=True)
class Prospect:
    """What drafting is expected to give one text: by columns of the draft, the gains of the nodes of its last trees.

    Means over trees, node by node in falling order, were kept first: they hide that an easy place takes the columns that a hard
    one leaves, which is what a longer draft is for, and longer drafts were undervalued by some 7 %.

    gains: float64 [nodes] a tree, largest first; a draft that was shorter says nothing of what a longer one would add.
    hoped: the same of longer drafts, until enough of them were run. Other texts' trees stood for those at first, and an easy text
    whose draft was cut short early was taken for a mean one, by whose measure the longer draft did not pay: so it was never run.
    Now its own path is thought to go on as it began, which is put right as soon as it is tried.
    """

    gains: dict[int, deque[NDArray[np.float64]]] = field(default_factory=dict)
    hoped: dict[int, deque[NDArray[np.float64]]] = field(default_factory=dict)
    others: Prospect | None = None
    tried: int = 0
    tried_at: int = -(1 << 30)  # the step of the last try
    kept: float = 0.0  # nodes, of those that were `promised`; both fade
    promised: float = 0.0
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=6))  # nodes kept of the last trees
    # log-probabilities, to the draft, of the last of them
    lasts: deque[float] = field(default_factory=lambda: deque(maxlen=6))

    def of(self, block: int, most: int) -> Gains:
        """Expected gains of up to `most` nodes of a draft of `block` columns, in any order."""
        own = self.gains.get(block, ())
        others: Items[NDArray[np.float64]] = ()
        if len(own) < LOOK_BACK:
            others = self.hoped.get(block) or (self.others.gains.get(block) if self.others else None) or ()
        if not own and not others:
            return np.zeros(0), np.zeros(0)
        total = len(own) + (OTHERS if others else 0.0)
        trees = [tree[:most] for tree in (*own, *others)]
        often = [1 / total] * len(own) + [OTHERS / total / len(others) for _ in others]
        believed = min((self.kept + SURE) / (self.promised + SURE), 1.0)
        return np.concatenate(trees) * believed, np.repeat(often, [len(tree) for tree in trees])

    def came(self, promised: float, kept: int) -> None:
        """What came of nodes whose probabilities sum to `promised`: a draft that promises too much is soon believed less."""
        self.kept, self.promised = FADING * self.kept + kept, FADING * self.promised + promised

    def learn(
        self,
        probability: ArrayLike,
        depths: ArrayLike,
        blocks: Items[int],
        drafted: int,
        whole: bool = True,
    ) -> None:
        """Take in the calibrated path probabilities of a grown tree, root first, of a draft of `drafted` columns. whole: whether
        all was grown; what was not is worth less than the least node and no more than in the tree before, not nothing."""
        nodes, deep = np.asarray(probability, np.float64)[1:], np.asarray(depths)[1:]
        least = float(nodes.min()) if len(nodes) else 0.0
        for block in blocks:
            if block <= drafted:
                found = np.sort(nodes if block == drafted else nodes[deep < block])[::-1]
                if self.others is not None:
                    self.others._take(block, found, least, whole)
                self._take(block, found, least, whole)
        reach = float(nodes[deep == drafted - 1].max(initial=0.0))
        for block in blocks:
            if block > drafted and len(self.gains.get(block, ())) < LOOK_BACK:
                further = reach ** (1 + np.arange(1, block - drafted + 1) / (drafted - 1))
                longer = np.sort(np.concatenate([self.gains[drafted][-1], further]))[::-1]
                self.hoped.setdefault(block, deque(maxlen=HOPED)).append(longer)

    def _take(self, block: int, found: NDArray[np.float64], least: float, whole: bool) -> None:
        """Remember a tree's gains."""
        trees = self.gains.setdefault(block, deque(maxlen=LOOK_BACK))
        before = trees or (self.others.gains[block] if self.others else ())
        if not whole and before:
            found = np.concatenate([found, np.minimum(before[-1][len(found) :], least)])
        trees.append(found)


def beside_a_draft(tree: Tree, reach: Items[float], depth: int) -> float:
    """Tokens expected of a step that runs the draft beside copies. tree: of those alone; reach: how often the draft's own path is
    kept to each depth, up to `depth`."""
    depths = tree.depths.tolist()
    kept = [0.0] * (max(depth, *depths) + 1)  # likelihood that the copies are right so far
    for at, p in zip(depths, np.exp(tree.log_probs.astype(np.float64)).tolist()):
        kept[at] += p
    tokens = kept[0] + sum(kept[depth + 1 :])
    for p, own in zip(kept[1 : depth + 1], reach):
        # both know the easy places: between the better of the two and either of two that know nothing of each other
        tokens += p + own * (1 - p) / 2 if p > own else own + p * (1 - own) / 2
    return tokens
