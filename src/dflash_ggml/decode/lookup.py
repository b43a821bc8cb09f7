"""Prompt lookup as candidates: the continuations found where the end of the sequence has occurred before.

The places vote for the next token, each with a weight that doubles with every token of its match; those that agree go on
together. A place's own word is worth little (1 of 1 is not p = 1), so a probability is what came of such votes: `LookupRates`
keeps (tried, right) by the length of the match, by how many places agree, and by what the model draft says of the token. Depth
needs no place of its own there: a path lengthens the match that it rests on. The arithmetic is in `native/`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .native import NONE, ffi, ints, lib

MOST_PLACES: int = lib.MOST_PLACES
N_VOTES: int = lib.N_VOTES
N_DRAFT: int = lib.N_DRAFT
N_CELLS: int = lib.N_CELLS
LEAST: float = lib.copy_least  # likelihood of a path below which it is not followed
_RATES, _COPIES, _VOTES = (ffi.typeof(t) for t in ("struct copy_rates *", "struct copies *", "struct vote[]"))

Cursor = tuple[int, int]
Vote = tuple[int, int, Cursor]  # token, cell while no draft was asked, and where it leads


class LookupRates:
    """How often prompt lookup was right, by cell. A text repeats much or little, whatever the cell: a trend, in
    logits, follows that.

    rates[cell] is the rate of a cell now.
    """

    def __init__(self, prior: LookupRates | None = None) -> None:
        """`prior`: rates of other sequences; it learns too."""
        self._prior = prior
        self.native = ffi.new(_RATES)
        lib.copy_rates_init(self.native, NONE if prior is None else prior.native)

    def __getitem__(self, cell: int) -> float:
        if not 0 <= cell < N_CELLS:
            raise IndexError(f"no cell {cell}: there are {N_CELLS}")
        found: float = lib.copy_rate(self.native, cell)
        return found

    @property
    def rates(self) -> list[float]:
        """The rates of all cells."""
        return [self[cell] for cell in range(N_CELLS)]

    @property
    def trend(self) -> float:
        """Of the text, in logits."""
        found: float = self.native.trend
        return found

    @property
    def trust(self) -> float:
        """What a draft's word is worth where votes have one, at most 1."""
        found: float = lib.copy_trust(self.native)
        return found

    def learn(self, samples: Iterable[tuple[int, bool]]) -> None:
        """Count samples: a cell, and whether the candidate was accepted."""
        pairs = list(samples)
        cells, right = [cell for cell, _ in pairs], bytes([is_right for _, is_right in pairs])
        checked(lib.copy_rates_learn(self.native, len(pairs), cells, right))


def checked(done: int) -> None:
    """Raise what a function of `native/copy_rates.h` says by a number below 0."""
    if done == -1:
        raise MemoryError("no memory for the walk of prompt lookup")
    if done == -2:
        raise IndexError(f"cells of prompt lookup are 0 to {N_CELLS - 1}")
    if done < 0:
        raise ValueError("parents must come before their children, and a walk's nodes must be the tree's")


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the probabilities of a merged tree rest on, each for as many nodes as were grown.

    cells: int32, of `LookupRates`, -1 for the draft's own word; rests: float64, what votes leave to the draft's other children of
    a node, 0 where they have no word or the draft no child; trust: how much of that they got.
    """

    cells: NDArray[np.int32]
    rests: NDArray[np.float64]
    trust: float


class LookupCandidates:
    """What followed at each place; lengths: tokens matched before it. Cursors are (depth, places that carry the whole path), the
    latter as bits."""

    def __init__(self, windows: Sequence[Sequence[int]], lengths: Sequence[int], depth: int) -> None:
        """windows: ids behind each place; `depth`: the longest path. Raises ValueError as `of` does."""
        block, ends = np.zeros((len(windows), max(depth, 0)), np.int32), []
        for row, window in zip(block, windows):
            window = window[: len(row)]
            row[: len(window)] = window
            ends.append(len(window))
        self._take(block, np.array(ends, np.int32), np.array(lengths, np.int32))

    @classmethod
    def of(
        cls, windows: NDArray[np.int32], ends: NDArray[np.int32], lengths: NDArray[np.int32]
    ) -> LookupCandidates:
        """Of arrays: windows [places, depth], of which the first ends[i] ids of a row stood there; lengths [places].

        Raises ValueError for more than MOST_PLACES places, or if shapes differ, lengths are negative or ends reach beyond depth.
        """
        self = cls.__new__(cls)
        self._take(windows, ends, lengths)
        return self

    def _take(self, windows: NDArray[np.int32], ends: NDArray[np.int32], lengths: NDArray[np.int32]) -> None:
        native = ffi.new(_COPIES)
        n, self.depth = windows.shape
        native.n_places, native.depth = n, self.depth
        self._arrays = windows, ends, lengths
        self._held = native.windows, native.ends, native.matched = ints(windows), ints(ends), ints(lengths)
        if not n == len(ends) == len(lengths) <= MOST_PLACES:
            raise ValueError(
                f"{n} windows, {len(ends)} ends and {len(lengths)} lengths: one of each for up to {MOST_PLACES} places"
            )
        if lib.copies_fault(native):
            raise ValueError(f"lengths must not be negative, nor ends reach beyond a depth of {self.depth}")
        self.native = native  # for C
        self.root: Cursor = (0, (1 << n) - 1)

    @property
    def windows(self) -> list[list[int]]:
        """Ids behind each place, no more than `depth`."""
        return [row[:end].tolist() for row, end in zip(*self._arrays[:2])]

    @property
    def lengths(self) -> list[int]:
        """Tokens matched before each place."""
        return self._arrays[2].tolist()

    def votes(self, cursor: Cursor) -> list[Vote]:
        """The next tokens, each once."""
        depth, places = cursor
        votes = ffi.new(_VOTES, max(self.native.n_places, 1))
        n = lib.copies_votes(self.native, depth, places, votes)
        return [(vote.token, vote.cell, (depth + 1, vote.places)) for vote in votes[0:n]]

    def gains(self, rates: LookupRates, budget: int) -> list[float]:
        """Expected tokens of a step by the nodes of a tree of prompt lookup alone, 1 for none, up to `budget`: what growing it
        would give, for a part of the time. Raises ValueError if budget < 0."""
        if budget < 0:
            raise ValueError(f"budget must not be negative, got {budget}")
        budget = min(budget, self.native.n_places * self.depth)  # which a tree of prompt lookup cannot exceed
        gains = ffi.new("double[]", budget + 1)
        n = lib.copies_gains(self.native, rates.native, budget, gains)
        if n < 0:
            raise MemoryError("no memory for the gains of prompt lookup")
        found: list[float] = ffi.unpack(gains, n)
        return found
