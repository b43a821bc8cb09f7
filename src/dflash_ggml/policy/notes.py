"""The policy's notes on one sequence."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ..decode.calibration import Calibration
from .forecast import LOOK_BACK, Forecast
from .plan import Plan


@dataclass(slots=True, eq=False)
class Notes:
    """Notes on a sequence.

    Attributes:
        fixed: The plan of its mode, None where each step is decided.
        tried_at: The step of the last draft.
        again: Whether the last try paid, so that the next need not be saved for.
        rest: Steps that are plain without a look.
        glanced: Whether prompt lookup was asked in this step; foretold: in the last one, which was plain.
        promise: Tokens that its next draft is expected to add.
        kept: Verified nodes of the last trees.
    """

    fixed: Plan | None
    calibration: Calibration
    forecast: Forecast
    tried_at: int = -(1 << 30)
    again: bool = False
    rest: int = 0
    glanced: bool = False
    foretold: bool = False
    promise: float = 0.0
    kept: deque[int] = field(default_factory=lambda: deque(maxlen=LOOK_BACK))
