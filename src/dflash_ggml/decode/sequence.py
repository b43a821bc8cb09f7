"""One text under decoding, as plain data: all that belongs to it and to no device.

The engine, or the device's state, could own the tokens instead. Then each would hold one text for good; with the text apart they
take it as an argument, and controllers, drafts and tests can look at it without a device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import Mode
from .sampling import Sampler


@dataclass(slots=True)
class Statistics:
    """Sums over the steps of a sequence since it was last empty. A pass is one run of the target in decoding."""

    passes: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0

    def took(self, tokens: tuple[int, ...], drafted: int, accepted: int) -> None:
        """Count a step."""
        self.passes += 1
        self.emitted += len(tokens)
        self.drafted += drafted
        self.accepted += accepted

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per target pass, the target's own included; 0.0 before the first."""
        return self.emitted / self.passes if self.passes else 0.0


@dataclass(slots=True)
class Sequence:
    """Committed tokens, what was emitted after them, and where the device keeps its rows.

    tokens: committed ids. pending: emitted, not yet through the target. text: what the sampler has seen, emitted tokens included.
    logits: the target's row after the last committed token, float32 [n_vocab], where a prefill left it.
    first_slot: cache row of position 0. A position is a place in the text and decides rotation; a slot is a row of the
    caches. The token at position p lies in slot first_slot + p. end_slot: where its rows end (None: with the caches).
    lane: which of the recurrent states, and of the rings of windowed layers, are its own.
    unseen: columns of the target's features, one for each of the last committed tokens that the draft has not taken in.
    torn: a pass was broken off; the state is of no use until it is reset.
    spoilt_from: position from which on its cache rows may hold NaN, until they are cleared (None: all are numbers).
    undraftable: the draft gave no numbers for this text; it is decoded plainly to its end. spoilt_draft: and what it holds of it
    has not been cleared since.
    """

    tokens: list[int] = field(default_factory=list)
    pending: int | None = None
    text: list[int] = field(default_factory=list)
    logits: NDArray[np.float32] | None = None
    sampler: Sampler | None = None
    first_slot: int = 0
    end_slot: int | None = None
    lane: int = 0
    unseen: tuple[int, ...] = ()
    torn: bool = False
    spoilt_from: int | None = None
    undraftable: bool = False
    spoilt_draft: bool = False
    statistics: Statistics = field(default_factory=Statistics)
    mode: Mode = "plain"
    budget: int = 0
    chain_seed: bool = False
    lookup: Any = None
    notes: Any = None

    @property
    def n_tokens(self) -> int:
        """Committed tokens; also the position at which a pass starts."""
        return len(self.tokens)

    def slots(self, n: int) -> range:
        """The cache rows of the next n positions."""
        start = self.first_slot + len(self.tokens)
        return range(start, start + n)

    @property
    def lent(self) -> slice:
        """Its cache rows."""
        return slice(self.first_slot, self.end_slot)

    def commit(self, path: tuple[int, ...], emitted: tuple[int, ...]) -> None:
        """Take in an accepted path: its nodes carry the pending token and all of `emitted` but the last, which is pending now."""
        assert self.pending is not None
        self.tokens += (self.pending, *emitted[:-1])
        self.pending, self.unseen = emitted[-1], path

    def clear(self) -> None:
        """Forget the text; the place of its rows stays, and whether it is torn."""
        self.tokens.clear()
        self.text.clear()
        self.pending = self.logits = self.sampler = None
        self.unseen, self.undraftable, self.statistics = (), False, Statistics()
