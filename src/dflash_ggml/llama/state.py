"""Helper classes of `Llama`: saved states, processor and criteria lists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

LogitsProcessor = Callable[[npt.NDArray[np.intc], npt.NDArray[np.single]], npt.NDArray[np.single]]
StoppingCriteria = Callable[[npt.NDArray[np.intc], npt.NDArray[np.single]], bool]


@dataclass
class LlamaState:
    """What Llama.save_state returns; it can be pickled.

    Attributes:
        input_ids: intc [n_ctx].
        scores: single [n_tokens or 0, n_vocab].
        n_tokens: How many of input_ids are evaluated.
        llama_state: A snapshot of the engine, None for an empty context.
        llama_state_size: Bytes of that.
        seed: That of the next answer.
    """

    input_ids: npt.NDArray[np.intc]
    scores: npt.NDArray[np.single]
    n_tokens: int
    llama_state: Any
    llama_state_size: int
    seed: int


class LogitsProcessorList(list[LogitsProcessor]):
    """Processors applied one after the other."""

    def __call__(
        self, input_ids: npt.NDArray[np.intc], scores: npt.NDArray[np.single]
    ) -> npt.NDArray[np.single]:
        for processor in self:
            scores = processor(input_ids, scores)
        return scores


class StoppingCriteriaList(list[StoppingCriteria]):
    """Stops if any criterion is true; all are evaluated."""

    def __call__(self, input_ids: npt.NDArray[np.intc], logits: npt.NDArray[np.single]) -> bool:
        answers = [criterion(input_ids, logits) for criterion in self]
        return any(answers)


class MinTokensLogitsProcessor:
    """Forbids the end-of-sequence token until min_tokens tokens have been generated."""

    def __init__(self, min_tokens: int, token_eos: int) -> None:
        self.min_tokens = min_tokens
        self.token_eos = token_eos
        self.prompt_tokens: int | None = None

    def __call__(
        self, input_ids: npt.NDArray[np.intc], scores: npt.NDArray[np.single]
    ) -> npt.NDArray[np.single]:
        if self.prompt_tokens is None:
            self.prompt_tokens = len(input_ids)
        if len(input_ids) - self.prompt_tokens < self.min_tokens:
            scores[self.token_eos] = -np.inf
        return scores
