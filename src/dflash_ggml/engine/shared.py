"""What the places of an engine have in common."""

from __future__ import annotations

import threading
from collections.abc import Sequence as Items
from typing import Any, Protocol

from ..config import EngineConfig
from ..decode.costs import Costs
from ..decode.experience import Experience
from ..decode.sequence import Sequence
from ..drafts.drafter import Drafter
from ..ggml.device import Device
from ..text.tokenizer import Tokenizer
from .batches import BatchSizes
from .passes import TargetPasses
from .side_by_side import SideBySide
from .step import Run


class Shared(Protocol):
    """All that an engine is, beside the text of its own."""

    config: EngineConfig
    n_ctx: int
    n_vocab: int
    tokenizer: Tokenizer
    metadata: dict[str, Any]
    batches: BatchSizes
    passes: TargetPasses
    drafter: Drafter | None
    device: Device
    costs: Costs
    experience: Experience
    stepper: SideBySide
    over: int  # cache rows of a text beyond its tokens
    passing: threading.RLock  # held while a pass may run, so that closing waits for it
    in_pass: bool

    def alive(self) -> None:
        """Raises DeviceError once the engine is closed."""
        ...

    def others(self, runs: Items[Run]) -> list[Sequence]:
        """The sequences of open places but those of the runs."""
        ...

    def gather(self, n: int, rows: range | None = None) -> bool:
        """Have room for a lent range of n rows, or for n more (None), by moving texts; False where there are not as many."""
        ...

    def left(self, lane: int) -> None:
        """The place with this lane was closed."""
        ...
