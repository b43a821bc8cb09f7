"""The texts of a step: who they are, and who of them may draft as much as pays."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .adaptive import Adaptive
from .prospect import Prospect
from .sequence import Sequence

if TYPE_CHECKING:
    from .controller import Controller


@dataclass(frozen=True, slots=True)
class Member:
    """A sequence of a step, and what plans it alone."""

    sequence: Sequence
    controller: Controller

    @property
    def adaptive(self) -> Adaptive | None:
        """The controller, where how much to draft is free and there is a draft to run."""
        free = isinstance(self.controller, Adaptive) and self.controller.depth
        return self.controller if free and not self.sequence.undraftable else None  # type: ignore[return-value]


class Company:
    """The members of a step, in its order. others: the mean of all texts that there ever were.

    free: by place, the controllers of those who may draft as much as pays; None for the others.
    """

    def __init__(self, members: Items[Member], others: Prospect) -> None:
        self.members, self.others = list(members), others
        self.free = [member.adaptive for member in self.members]

    def __len__(self) -> int:
        return len(self.members)

    def update(self) -> None:
        """See who still may: a draft without numbers may have come since."""
        self.free = [None if m.sequence.undraftable else free for m, free in zip(self.members, self.free)]

    @property
    def who(self) -> tuple[tuple[int, bool], ...]:
        """Whom it is made of; a company of the same is told by it."""
        return tuple([(id(m.controller), free is not None) for m, free in zip(self.members, self.free)])

    def prospect(self, adaptive: Adaptive) -> Prospect:
        """What drafting is expected to give a text."""
        if adaptive.prospect is None:
            adaptive.prospect = Prospect(others=self.others)
        return adaptive.prospect
