"""State shared by the slots of an engine."""

from __future__ import annotations

import threading
from collections.abc import Sequence as Items
from typing import Any, Protocol

from ..config import EngineConfig
from ..decode.sequence import Sequence
from ..drafts.drafter import Drafter
from ..ggml.device import Device
from ..text.tokenizer import Tokenizer
from .batches import BatchSizes
from .passes import TargetPasses
from .step import Step, Stepper, Verify


class Shared(Protocol):
    """An engine as its slots see it."""

    config: EngineConfig
    n_ctx: int
    n_vocab: int
    tokenizer: Tokenizer
    metadata: dict[str, Any]
    batches: BatchSizes
    passes: TargetPasses
    drafter: Drafter | None
    device: Device
    stepper: Stepper
    over: int  # cache rows of a sequence beyond its tokens
    passing: threading.RLock  # held while a pass may run, so that closing waits for it
    in_pass: bool

    def alive(self) -> None:
        """Raise once the engine is closed.

        Raises:
            DeviceError: The engine is closed.
        """
        ...

    def step(self, sequences: Items[Sequence], beside: Verify | None = None) -> list[Step | Exception]:
        """Step sequences of different slots once."""
        ...

    def expected_ms(self, nodes: int, context: int) -> float | None:
        """Expected milliseconds of a step that verifies `nodes` drafted nodes; None if unknown."""
        ...

    def gather(self, n: int, rows: range | None) -> bool:
        """Move slots so that a lent range can have n rows, or n more can be lent (None); False if there are too few rows."""
        ...

    def closed(self, state_index: int) -> None:
        """The slot with this state index was closed."""
        ...
