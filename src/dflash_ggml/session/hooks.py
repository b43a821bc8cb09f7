"""Callables that a caller in the same process may attach to a generation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..decode.sampling import Processor
from ..text.chat_parser import new_call_id

if TYPE_CHECKING:
    from ..engine.step import Step
    from .slots import CachedSlot

# (ids so far int32 [n], raw logits after them float32 [V]) -> stop here? Called before each token is taken.
StoppingCriterion = Callable[[np.ndarray, np.ndarray], bool]


@dataclass(frozen=True, slots=True)
class Hooks:
    """Callables beside a request, which is plain data: these cannot be sent to another process.

    on_step sees every engine step; on_end the slot, once all are made. new_call_id makes the id of a tool call from its index
    and name.
    """

    logits_processor: tuple[Processor, ...] = ()
    stopping_criteria: tuple[StoppingCriterion, ...] = ()
    on_step: Callable[[Step], None] | None = None
    on_end: Callable[[CachedSlot], None] | None = None
    new_call_id: Callable[[int, str], str] = new_call_id
