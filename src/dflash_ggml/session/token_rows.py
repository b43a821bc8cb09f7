"""The raw logits behind emitted tokens, for log-probabilities and stopping criteria."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..decode.sampling import token_log_probs
from ..text.tokenizer import Tokenizer
from .events import TokenLogprob, TopLogprob


class RowTap:
    """A logits processor that changes nothing and keeps a copy of the row it saw. It must come first."""

    def __init__(self) -> None:
        self.row: NDArray[np.float32] | None = None

    def __call__(self, history: NDArray[np.int32], scores: NDArray[np.float32]) -> NDArray[np.float32]:
        self.row = scores.copy()
        return scores


def token_logprob(
    tokenizer: Tokenizer, row: NDArray[np.float32], token: int, n_top: int, offset: int = 0
) -> TokenLogprob:
    """The log-probability of `token` under a raw row float32 [V], with the n_top best alternatives."""
    logprob, best = token_log_probs(row, token, n_top)
    top = tuple(TopLogprob(i, tokenizer.piece(i), p) for i, p in best)
    return TokenLogprob(token, tokenizer.piece(token), logprob, top, offset)
