"""The raw logits of an emitted token, for its log-probability and for stopping criteria."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class RowKeeper:
    """A logits processor that changes nothing and keeps a copy of the row it saw. It must come first."""

    def __init__(self) -> None:
        self.row: NDArray[np.float32] | None = None

    def __call__(self, history: NDArray[np.int32], scores: NDArray[np.float32]) -> NDArray[np.float32]:
        self.row = scores.copy()
        return scores
