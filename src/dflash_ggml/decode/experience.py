"""What is known of a draft and of copies from all texts of an engine, and what drafting was worth of late."""

from __future__ import annotations

from dataclasses import dataclass, field

from .calibration import Calibration

MEMORY = 16.0  # drafted steps that a moving mean looks back over


@dataclass(slots=True)
class Worth:
    """A moving mean of how many times plain decoding a drafted step was worth."""

    mean: float = 0.0
    weight: float = 0.0  # samples that the mean stands for
    tried: int = 0

    def learn(self, times: float) -> None:
        self.tried += 1
        self.weight = min(self.weight + 1, MEMORY)
        self.mean += (times - self.mean) / self.weight


@dataclass(slots=True)
class Experience:
    """What is known of the sources from all sequences of an engine.

    worth: per columns of the draft's block. owed: milliseconds that trying has cost and plain steps have not yet
    paid back. last_loss: those of the last try. reach: how often the draft's path was kept to each depth.
    """

    calibration: Calibration = field(default_factory=Calibration)
    reach: list[float] = field(default_factory=list)
    worth: dict[int, Worth] = field(default_factory=dict)
    owed: float = 0.0
    last_loss: float = 0.0
    drafted: int = 0  # steps
    right: int = 0  # accepted nodes that the draft offered

    def of(self, block: int) -> Worth:
        """The worth of steps with a draft of `block` columns."""
        return self.worth.setdefault(block, Worth())
