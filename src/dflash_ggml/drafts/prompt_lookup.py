"""Prompt lookup: drafting without a model, from tokens of this sequence or of earlier ones.

Not a `Drafter`: it has no device memory or cache rows and needs no features (docs/decisions/0007). Only committed tokens are
indexed; it reads the sequence's own token list, so resets, restored snapshots and reused prefixes need no call.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from ..decode.lookup import Glance, LookupCandidates, LookupRates
from ..decode.ngram_index import Continuations, NgramIndex
from ..decode.sequence import Sequence

NAME = "suffix"
MOST_MATCHES = 6  # most matches of a look-up
PAST_TOKENS = 1 << 16  # tokens of earlier outputs that are kept
_SHORTEST_PAST = 4  # tokens of the shortest indexed output
_NOTHING = (-1, -1, None, None)


class PromptLookup:
    """Prompt lookup in one sequence and past outputs of this engine.

    Args:
        depth: Length of the longest proposed path.
        past_tokens: Tokens of past outputs to keep; the oldest outputs are dropped first.
        others: Prompt lookup of another sequence, to share past outputs and their rates.

    Attributes:
        rates: Its hit rates.
    """

    def __init__(
        self, depth: int, past_tokens: int = PAST_TOKENS, others: PromptLookup | None = None
    ) -> None:
        self.depth, self.past_tokens = depth, past_tokens
        self.index = NgramIndex()
        self.past: NgramIndex = NgramIndex() if others is None else others.past
        self._rates: LookupRates = LookupRates() if others is None else others._rates  # of all sequences
        self.rates = LookupRates(self._rates)
        self._written: list[tuple[int, int]] = []  # ranges of outputs in the index
        self._continuations = Continuations(MOST_MATCHES, depth)
        # the last look-up: length of the index and of the past, the pending token, and the result
        self._found: tuple[int, int, int | None, LookupCandidates | None] = _NOTHING
        self._glance = Glance(MOST_MATCHES)

    @property
    def nbytes(self) -> int:
        """Host bytes, at most 29 a token of the sequence and of `past_tokens`."""
        return self.index.nbytes + self.past.nbytes

    def forget(self) -> None:
        """Forget all tokens; the rates stay."""
        # a running generation's output begins here
        n = max(len(self.index), *(end for _, end in self._written), 0)
        self._written = [(n, n)]
        self.index.cut(0)
        self.past.cut(0)
        self._found = _NOTHING
        self._glance.forget()

    def begin(self, sequence: Sequence) -> None:
        """Begin a generation, with the committed tokens as prompt. What was truncated of the last output becomes a past one."""
        self._found, self.rates = _NOTHING, LookupRates(self._rates)
        self._glance.forget()
        shared = self.index.shared(sequence.tokens)
        for start, end in self._written:
            if end > shared:
                self._remember(self.index.ids[max(start, shared) : end].tolist())
        self._written = [(start, min(end, shared)) for start, end in self._written if start < shared]
        self.index.cut(shared)
        self.index.extend(sequence.tokens[shared:])
        self._written.append((len(self.index), len(self.index)))

    def beside(self) -> PromptLookup:
        """Prompt lookup of another sequence."""
        return PromptLookup(self.depth, self.past_tokens, self)

    def leave(self) -> None:
        """End the sequence: its outputs become past outputs for the others."""
        for start, end in self._written:
            self._remember(self.index.ids[start:end].tolist())
        self._written = [(len(self.index), len(self.index))]

    def _remember(self, ids: Items[int]) -> None:
        if len(ids) < _SHORTEST_PAST:
            return
        past = self.past
        if len(past) + len(ids) > self.past_tokens:
            kept = [*past.ids, *ids][-(self.past_tokens // 2) :]
            past.cut(0)
            past.extend(kept)
        else:
            past.extend(ids)

    def glance(self, sequence: Sequence, learn: bool = False) -> float:
        """Probability of the best continuation, 0 without a match, in less than half of `look_up`'s time.

        Args:
            learn: The pending token was decoded plainly, and so shows whether the last glance was right.
        """
        assert sequence.pending is not None
        new = sequence.tokens[len(self.index) :]
        found = self._glance.at(self.index, self.past, self.rates, new, sequence.pending, learn)
        if new:
            self._written[-1] = (self._written[-1][0], sequence.n_tokens)
        return found

    def look_up(self, sequence: Sequence) -> LookupCandidates | None:
        """Candidates after earlier occurrences of the sequence's end, None without a match. Cached between two commits, unless a
        past output is added."""
        n, pending, index = sequence.n_tokens, sequence.pending, self.index
        at, past, after, found = self._found
        if at == n and after == pending and past == len(self.past):
            return found
        assert pending is not None
        if new := sequence.tokens[len(index) :]:
            index.extend(new)
            self._written[-1] = (self._written[-1][0], n)
        followed = self._continuations.of(index, self.past, pending)
        found = None if followed is None else LookupCandidates(*followed)
        self._found = (n, len(self.past), pending, found)
        return found
