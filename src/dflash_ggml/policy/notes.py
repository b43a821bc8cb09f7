"""Per-sequence state of the policy."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ..decode.calibration import Calibration
from .forecast import LOOK_BACK, Forecast
from .plan import Plan


@dataclass(slots=True, eq=False)
class Notes:
    """The policy's state of one sequence.

    Attributes:
        fixed: The plan of a fixed mode, None for `auto`.
        tried_at: The step of the last draft.
        again: Whether the last trial paid, so that the next need not wait for its budget.
        rest: Remaining steps that are plain without evaluation.
        glanced: Whether prompt lookup was evaluated in this step; foretold: in the last one, which was plain.
        promise: Expected additional tokens of its next draft.
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
