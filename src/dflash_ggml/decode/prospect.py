"""What drafting is expected to give one text, known before its next draft is run: what its last trees promised."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

LOOK_BACK = 6.0  # trees that a prospect is the moving mean of
SURE = 2.0  # nodes that a promise is believed for before any came
FADING = 0.95
OTHERS = 2.0  # trees that what is known of other texts is worth for a new one


@dataclass(slots=True)
class Prospect:
    """What drafting is expected to give one text: by columns of the draft, the gains of its nodes, largest first.

    gains: moving means over trees, float64 [nodes]; a draft that was shorter says nothing of what a longer one would add.
    """

    gains: dict[int, NDArray[np.float64]] = field(default_factory=dict)
    weights: dict[int, float] = field(default_factory=dict)
    others: Prospect | None = None
    tried: int = 0
    tried_at: int = -(1 << 30)  # the step of the last try
    kept: float = 0.0  # nodes, of those that were `promised`; both fade
    promised: float = 0.0
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=6))  # nodes kept of the last trees

    def of(self, block: int, most: int) -> NDArray[np.float64]:
        """Expected gains of up to `most` nodes of a draft of `block` columns."""
        own, others = self.gains.get(block), self.others.gains.get(block) if self.others else None
        if own is None:
            own = others
        elif others is not None and self.weights[block] < LOOK_BACK:
            n, share = min(len(own), len(others)), self.weights[block] / (self.weights[block] + OTHERS)
            own = share * own[:n] + (1 - share) * others[:n]
        if own is None:
            return np.zeros(0)
        return own[:most] * min((self.kept + SURE) / (self.promised + SURE), 1.0)

    def came(self, promised: float, kept: int) -> None:
        """What came of nodes whose probabilities sum to `promised`: a draft that promises too much is soon believed less."""
        self.kept, self.promised = FADING * self.kept + kept, FADING * self.promised + promised

    def learn(
        self, probability: Items[float], depths: Items[int], blocks: Items[int], drafted: int, most: int
    ) -> None:
        """Take in the calibrated path probabilities of a grown tree, root first, of a draft of `drafted` columns."""
        if self.others is not None:
            self.others.learn(probability, depths, blocks, drafted, most)
        for block in blocks:
            if block > drafted:
                continue
            found = sorted([p for p, d in zip(probability, depths) if 0 < d < block], reverse=True)[:most]
            new = np.zeros(most)
            new[: len(found)] = found
            weight = self.weights.get(block, 0.0)
            old = self.gains.get(block)
            if old is None or len(old) != most:
                old, weight = new, 0.0
            if len(found) < len(probability) - 1 or block == drafted:
                # nodes that were not grown are worth less than the last one, not nothing
                new[len(found) :] = np.minimum(old[len(found) :], found[-1] if found else 0.0)
            self.weights[block] = weight = min(weight + 1, LOOK_BACK)
            self.gains[block] = old + (new - old) / weight
