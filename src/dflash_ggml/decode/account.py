"""What drafts and copies may lose against plain batching: so many milliseconds, and no more.

What a step is worth is expected, and expectations can be wrong in many ways: costs that were never measured, medians that know
nothing of what is done now and then, probabilities of another text. What came of a step is certain. A step that is not plain is
held against as many tokens of plain batching as it gave; its loss is drawn from the account, its gain paid in. While there is
nothing left steps are plain, and each of them pays in a small share of its time. So all that was tried costs that share at most,
beside what the account began with and what it may hold of gains, whatever was expected.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

SHARE = 0.01  # of a plain step's time that may be spent on what is not plain
BEGINS = 4.0  # plain steps' time that an engine's first tries may lose
GRAPHS = 10.0  # plain steps' time that an engine's first graphs may take beside that; later ones are losses like all others
HOLDS = 8.0  # plain steps' time of gains that later losses may be drawn from
# times as much of all three on a GPU: drafting seldom loses there for long, and what it costs is known late, behind captures
PATIENCE = 25.0
CURIOSITY = 0.002  # of the time that may be lost by steps that are plain only to see what they take
SOON, OFTEN, SELDOM = 1, 16, 200  # steps between those: where it is not known, at the least, at the most
RUN = 3  # of those in a row where the host has the processors that passes run on: it is still busy with what a wide one gave
MEMORY = 16.0  # steps that a moving mean looks back over


@dataclass(slots=True)
class Account:
    """left: milliseconds that may be lost; not known before plain batching was measured. since: steps since one was plain. run:
    plain ones in a row. ahead: how many times as much as plain batching the last others gave. patience: times as much that may be
    lost, of what an account begins with, of what it holds and of what first graphs take."""

    in_a_row: int = 1  # plain steps by which it is seen what one takes
    patience: float = 1.0
    left: float = inf
    since: int = 0
    run: int = 0
    ahead: float = 2.0
    _built: float = 0.0  # milliseconds
    _curious: float = 0.0  # milliseconds that plain steps may lose

    @property
    def is_empty(self) -> bool:
        """Whether nothing more may be lost now."""
        return self.left <= 0

    def wants_plain(self, plain_step: float | None) -> bool:
        """Whether the step that begins is to be plain, which takes so long (None: not known). It is where nothing more may be
        lost, or what it takes is to be seen."""
        self.since += 1
        if self.is_empty or 0 < self.run < self.in_a_row:
            wants = True
        elif plain_step is None:
            wants = self.since > SOON
        else:
            loss = self.in_a_row * plain_step * (1 - 1 / max(self.ahead, 1.0))
            wants = self.since > SELDOM or (self.since > OFTEN and self._curious >= loss)
        if wants:
            self.since, self._curious = 0, 0.0
        self.run = self.run + 1 if wants else 0
        return wants

    def paid(self, ms: float) -> None:
        """A plain step took so long."""
        self.left += SHARE * ms

    def built(self, ms: float, plain_step: float) -> float:
        """Building graphs took so long; what of it is no loss."""
        free = min(ms, max(self.patience * GRAPHS * plain_step - self._built, 0.0))
        self._built += free
        return free

    def came(self, ms: float, plain_ms: float, plain_step: float) -> None:
        """Another took so long, and plain batching takes `plain_ms` for as many tokens. plain_step: for one of each text."""
        if self.left == inf:
            self.left = self.patience * BEGINS * plain_step
        left = min(self.left + plain_ms - ms, max(self.patience * HOLDS * plain_step, self.left))
        self.left = max(
            left, -BEGINS * plain_step
        )  # a machine that slept within a step is not paid for in hours
        if ms > 0:  # else all of it was building graphs, beside plain steps of which nothing is known
            self.ahead += (plain_ms / ms - self.ahead) / MEMORY
        self._curious += CURIOSITY * ms
