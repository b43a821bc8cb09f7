"""llama-cpp-python's Python drafters: prompt lookup selects the engine's own, others are accepted and ignored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt


class LlamaDraftModel(ABC):
    """Base of Python drafters. Accepted by Llama(draft_model=...), but not called."""

    @abstractmethod
    def __call__(self, input_ids: npt.NDArray[np.intc], /, **kwargs: Any) -> npt.NDArray[np.intc]:
        """Tokens that may follow these."""


class LlamaPromptLookupDecoding(LlamaDraftModel):
    """Prompt lookup decoding: proposes the tokens that followed an earlier occurrence of the last tokens.

    As Llama(draft_model=...) it selects the engine's own: at most `num_pred_tokens` nodes a step, and no draft model.
    Matches have any length, so `max_ngram_size` has no effect.
    """

    def __init__(self, max_ngram_size: int = 2, num_pred_tokens: int = 10) -> None:
        self.max_ngram_size = max_ngram_size
        self.num_pred_tokens = num_pred_tokens

    @staticmethod
    def find_candidate_pred_tokens(
        input_ids: npt.NDArray[np.intc], max_ngram_size: int, num_pred_tokens: int
    ) -> npt.NDArray[np.intc]:
        """Up to num_pred_tokens ids after the earliest occurrence of the longest suffix of at most max_ngram_size; or none."""
        ids = np.asarray(input_ids)
        n = len(ids)
        for size in range(min(max_ngram_size, n - 1), 0, -1):
            same = np.ones(n - size, bool)  # earlier positions of the suffix
            for k in range(size):
                same &= ids[k : n - size + k] == ids[n - size + k]
            if same.any():
                start = int(same.argmax()) + size
                return ids[start : start + num_pred_tokens]
        return np.array([], np.intc)

    def __call__(self, input_ids: npt.NDArray[np.intc], /, **kwargs: Any) -> npt.NDArray[np.intc]:
        return self.find_candidate_pred_tokens(input_ids, self.max_ngram_size, self.num_pred_tokens)
