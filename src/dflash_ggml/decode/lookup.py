"""Prompt lookup as candidates: the continuations found where the end of the sequence has occurred before.

Matches vote for the next token, each with a weight that doubles with every token of its length; matches that agree are followed
jointly. Shares of votes are poor probabilities (1 of 1 is not p = 1), so probabilities are measured: `LookupRates` counts
(tried, right) by the length of the match, by how many matches agree, and by the draft's probability of the token. Depth needs no
cell of its own: a path lengthens its match. The arithmetic is in `native/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .candidates import Candidates
from .native import NONE, ffi, ints, lib
from .ngram_index import NgramIndex

MOST_MATCHES: int = lib.MOST_MATCHES
N_VOTES: int = lib.N_VOTES
N_DRAFT: int = lib.N_DRAFT
N_CELLS: int = lib.N_CELLS
LEAST: float = lib.lookup_least  # least probability of a path to be followed
_RATES, _LOOKUP = (ffi.typeof(t) for t in ("struct lookup_rates *", "struct lookup *"))


class LookupRates:
    """Rates at which prompt lookup was right, by cell. How repetitive a sequence is affects all cells: a trend, in logits,
    follows that.

    Args:
        prior: Rates of other sequences, updated as well.
    """

    def __init__(self, prior: LookupRates | None = None) -> None:
        self._prior = prior
        self.native = ffi.new(_RATES)
        lib.lookup_rates_init(self.native, NONE if prior is None else prior.native)

    @property
    def trust(self) -> float:
        """Factor on a draft's probabilities where there are votes too, at most 1."""
        found: float = lib.lookup_trust(self.native)
        return found


def checked(done: int) -> None:
    """Raise the error that a function of `native/lookup_rates.h` returned as a negative number."""
    if done == -1:
        raise MemoryError("no memory for the walk of prompt lookup")
    if done == -2:
        raise IndexError(f"cells of prompt lookup are 0 to {N_CELLS - 1}")
    if done < 0:
        raise ValueError("parents must come before their children, and a walk's nodes must be the tree's")


@dataclass(frozen=True, slots=True)
class Evidence:
    """The sources of a merged tree's probabilities, per node.

    Attributes:
        cells: int32 [n], of `LookupRates`, -1 for a node of the draft alone.
        rests: float64 [n], the probability that votes leave for the draft's other children of a node; 0 without votes or
            without such a child.
            trust: The factor on it.
    """

    cells: NDArray[np.int32]
    rests: NDArray[np.float64]
    trust: float


class LookupCandidates:
    """The tokens that followed each match.

    Args:
        windows: int32 [matches, depth], ids after each match; of row i the first ends[i] are valid.
        ends: int32 [matches].
        lengths: int32 [matches], tokens of each match.

    Raises:
        ValueError: More than MOST_MATCHES matches, shapes that differ, negative lengths, or ends beyond depth.
    """

    def __init__(
        self, windows: NDArray[np.int32], ends: NDArray[np.int32], lengths: NDArray[np.int32]
    ) -> None:
        native = ffi.new(_LOOKUP)
        n, self.depth = windows.shape
        native.n_matches, native.depth = n, self.depth
        self._held = native.windows, native.ends, native.matched = ints(windows), ints(ends), ints(lengths)
        if not n == len(ends) == len(lengths) <= MOST_MATCHES:
            raise ValueError(
                f"{n} windows, {len(ends)} ends and {len(lengths)} lengths: one of each for up to {MOST_MATCHES} matches"
            )
        if lib.lookup_fault(native):
            raise ValueError(f"lengths must not be negative, nor ends reach beyond a depth of {self.depth}")
        self.native = native  # struct for C


@dataclass(slots=True)
class Merged:
    """A draft's candidates (or none) and those of prompt lookup, to be merged into one tree.

    The distribution below each node combines both: tokens with votes of prompt lookup get the measured probabilities of such
    votes (`LookupRates`, which also depend on the draft's probability), and the draft's other candidates share the rest in
    their own proportions. Together they sum to one; a token of both is one node (docs/decisions/0007).
    """

    draft: Candidates | None
    lookup: LookupCandidates
    rates: LookupRates


_GLANCE = ffi.typeof("struct glance *")


class Glance:
    """Cheap lookup; keeps the last votes until the next pending token shows whether they were right.

    Args:
        most: Matches that are examined, the longest first.
    """

    def __init__(self, most: int) -> None:
        self._most, self._native = most, ffi.new(_GLANCE)

    def forget(self) -> None:
        """Drop the last votes."""
        self._native.n = 0

    def at(
        self,
        index: NgramIndex,
        past: NgramIndex,
        rates: LookupRates,
        new: Sequence[int],
        pending: int,
        learn: bool,
    ) -> float:
        """Append `new`, and find what followed earlier occurrences of the end and `pending`.

        Args:
            index: the sequence's tokens. past: earlier outputs, searched too.
            learn: count the last votes as right or wrong, if `new` is the one token that followed them.

        Returns:
            The highest probability of a next token; 0 without a match.
        """
        found: float = lib.lookup_glance(
            self._native, index.native, past.native, rates.native, new, len(new), pending, self._most, learn
        )
        if found == -1:  # out of memory
            index.extend(new)
            found = lib.lookup_glance(
                self._native, index.native, past.native, rates.native, [], 0, pending, self._most, learn
            )
        if found < 0:
            checked(-1)
        return found
