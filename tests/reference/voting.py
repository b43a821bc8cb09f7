"""Prompt lookup's votes and rates in Python: the reference of `decode/native/lookup.c` and `lookup_rates.c`."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp

from dflash_ggml.decode.accept import Accepted
from dflash_ggml.decode.ngram_index import LONGEST
from dflash_ggml.decode.tree import Tree

PRIOR = 8.0  # weight of earlier sequences, in samples
OWN_WORD = 5.0  # weight of the table below, in samples
KEPT = 200.0  # samples of a cell after which old ones fade
TREND_FIRST = -0.6  # of a sequence that has not repeated anything yet
TREND_RATE = 0.5  # logits per unit of surprise
TREND_MOST = 4.0
FIRST_TRUST = 5.0  # weight of the draft, in samples
TRUST_KEPT = 0.995  # of older samples
MOST = 0.98  # of the probability that votes may take
LEAST = 0.02  # likelihood of a path below which it is not followed
_LENGTHS = (3, 4, 6, 9, 16, 32)  # first lengths of the buckets but for that of the shortest matches
_BUCKET = [sum(length >= first for first in _LENGTHS) for length in range(LONGEST + 256)]
_BY_LENGTH = (0.25, 0.4, 0.5, 0.65, 0.8, 0.9, 0.95)
# one match, two that agree, more; a majority, 25% or more, less
_BY_VOTE = (0.0, 0.4, 0.8, -0.3, -1.2, -2.2)
# a draft's probability of the token, below each bound and above, and what that adds in logits
_DRAFT_PROBS = (0.1, 0.5, 0.9)
_BY_DRAFT = (-0.8, 0.3, 1.3, 2.5)
N_VOTES, N_DRAFT = len(_BY_VOTE), 1 + len(_BY_DRAFT)
N_CELLS = len(_BY_LENGTH) * N_VOTES * N_DRAFT
_MOST_WEIGHT = 16

Cursor = tuple[int, tuple[int, ...]]
Vote = tuple[int, int, Cursor]  # token, cell while no draft was asked, and where it leads


class _Moved(dict[int, float]):
    """Rates with a trend, each worked out when it is asked for: a step looks at a few of them."""

    def __init__(self, own: Sequence[float], trend: float) -> None:
        self._own, self._lift = own, math.exp(trend)

    def __missing__(self, cell: int) -> float:
        lifted = self._own[cell] * self._lift
        self[cell] = rate = lifted / (1 - self._own[cell] + lifted)
        return rate


class LookupRates:
    """How often prompt lookup was right, by cell. A sequence repeats much or little, whatever the cell: a trend follows that.

    of: the rate of a cell now, until `learn` is called.
    """

    def __init__(self, prior: LookupRates | None = None) -> None:
        """`prior`: rates of other sequences; it learns too."""
        self._prior = prior
        self._hits, self._tried = [0.0] * N_CELLS, [0.0] * N_CELLS
        # without the trend
        self._own: list[float] = list(_FIRST if prior is None else prior._own)
        # of all sequences and of this one: samples of each cell, and the rate after them
        self._levels: tuple[tuple[list[float], ...], ...] = (
            *(() if prior is None else prior._levels),
            (self._tried, self._hits, self._own),
        )
        self.trend = 0.0 if prior is None else TREND_FIRST
        # where no vote was right: how often a draft's candidates were, and the sum of their probabilities
        self._draft_right = self._draft_promised = FIRST_TRUST if prior is None else 0.0
        self.of = _Moved(self._own, self.trend)

    @property
    def rates(self) -> list[float]:
        """The rates of all cells."""
        return [self.of[cell] for cell in range(N_CELLS)]

    def learn(self, samples: Iterable[tuple[int, bool]]) -> None:
        """Count samples: a cell, and whether the token was right."""
        trend, of = self.trend, self.of
        for cell, is_right, expected in [(cell, is_right, of[cell]) for cell, is_right in samples]:
            trend += TREND_RATE * (is_right - expected)
            if not -TREND_MOST <= trend <= TREND_MOST:
                trend = TREND_MOST if trend > 0 else -TREND_MOST
            before, worth = _FIRST[cell], OWN_WORD
            for tried, hits, own in self._levels:
                n = tried[cell]
                fading = 1.0 if n < KEPT else KEPT / (KEPT + 1)
                tried[cell] = n = fading * (n + 1)
                hits[cell] = right = fading * (hits[cell] + is_right)
                before = own[cell] = (right + worth * before) / (n + worth)
                worth = PRIOR
        self.trend = trend
        self.of = _Moved(self._own, trend)

    @property
    def trust(self) -> float:
        """Factor on a draft's probabilities beside votes, at most 1."""
        known = self if self._prior is None else self._prior
        return min(known._draft_right / known._draft_promised, 1.0)

    def learn_trust(self, promised: float, is_right: bool) -> None:
        """Count a node where no vote was right: the sum of the draft's candidates there, and whether one was right."""
        if self._prior is not None:
            self._prior.learn_trust(promised, is_right)
            return
        self._draft_promised = (self._draft_promised + promised) * TRUST_KEPT
        self._draft_right = (self._draft_right + is_right) * TRUST_KEPT


@dataclass(frozen=True, slots=True)
class Evidence:
    """`lookup.Evidence` with lists; rests: only where there are votes and the draft has another child."""

    cells: Sequence[int]
    rests: Mapping[int, float]
    trust: float


def with_lists(tree: Tree) -> Tree:
    """A merged tree with the evidence that is used here."""
    found = tree.evidence
    assert found is not None
    rests = {node: rest for node, rest in enumerate(found.rests[: tree.width].tolist()) if rest}
    return replace(tree, evidence=Evidence(found.cells.tolist(), rests, found.trust))  # type: ignore[arg-type]


def in_order(parts: Iterable[float]) -> float:
    """A sum one after the other: Python's own is exact from 3.12 on."""
    total = 0.0
    for part in parts:
        total += part
    return total


class LookupCandidates:
    """What followed each match. windows: ids behind it; lengths: of the matches in tokens.

    Cursors are (depth, matches that contain the whole path).
    """

    def __init__(self, windows: Sequence[Sequence[int]], lengths: Sequence[int], depth: int) -> None:
        """`depth`: the longest path."""
        self.windows, self.lengths, self.depth = windows, lengths, depth
        self.root: Cursor = (0, tuple(range(len(windows))))
        # by matches: how far they agree, the tokens, the longest match, and the vote's part of a cell
        self._agreed: dict[tuple[int, ...], tuple[int, Sequence[int], int, int]] = {}

    def votes(self, cursor: Cursor) -> list[Vote]:
        """The next tokens, each once."""
        depth, matches = cursor
        agreed = self._agreed.get(matches) or self._agree(matches)
        until, window, length, vote = agreed
        if depth < until:
            return [(window[depth], _BUCKET[length + depth] * _PER_LENGTH + vote, (depth + 1, matches))]
        return self._parted(depth, matches)

    def _agree(self, matches: tuple[int, ...]) -> tuple[int, Sequence[int], int, int]:
        """See `_agreed`."""
        first = self.windows[matches[0]]
        until = min(len(first), self.depth)
        for match in matches[1:]:
            other = self.windows[match]
            if other[:until] != first[:until]:
                until = next((i for i, (a, b) in enumerate(zip(first, other)) if a != b), len(other))
        length = max([self.lengths[match] for match in matches])
        agreed = until, first, length, (min(len(matches), 3) - 1) * N_DRAFT
        self._agreed[matches] = agreed
        return agreed

    def _parted(self, depth: int, matches: tuple[int, ...]) -> list[Vote]:
        """The votes of matches that differ, or of which some have ended."""
        windows, lengths = self.windows, self.lengths
        by_token: dict[int, list[int]] = {}
        for match in matches:
            if depth < min(len(windows[match]), self.depth):
                by_token.setdefault(windows[match][depth], []).append(match)
        if len(by_token) == 1:
            ((token, who),) = by_token.items()
            length, vote = max([lengths[p] for p in who]), min(len(who), 3) - 1
            cell = _BUCKET[length + depth] * _PER_LENGTH + vote * N_DRAFT
            return [(token, cell, (depth + 1, tuple(who)))]
        weights = [1 << min(length, _MOST_WEIGHT) for length in lengths]
        total = sum([weights[p] for who in by_token.values() for p in who])
        out = []
        for token, who in by_token.items():
            share = sum([weights[p] for p in who]) / total
            vote = 3 if share >= 0.6 else 4 if share >= 0.25 else 5
            cell = _BUCKET[max([lengths[p] for p in who]) + depth] * _PER_LENGTH + vote * N_DRAFT
            out.append((token, cell, (depth + 1, tuple(who))))
        return out


def beside_draft(cell: int, promised: float) -> int:
    """The cell of a token that a draft gives probability `promised`."""
    return cell + 1 + bisect(_DRAFT_PROBS, promised)


def _first() -> list[float]:
    """Rates before any sample, cell by cell."""
    out = []
    for p in _BY_LENGTH:
        for vote in _BY_VOTE:
            logit = math.log(p / (1 - p)) + vote
            logits = [logit, *(logit + promised for promised in _BY_DRAFT)]
            out += [1 / (1 + math.exp(-x)) for x in logits]
    return out


_PER_LENGTH = N_VOTES * N_DRAFT
_FIRST = _first()


def observe(tree: Tree, accepted: Accepted, rates: LookupRates) -> None:
    """Count the votes at the visited nodes of a merged tree."""
    evidence = tree.evidence
    assert evidence is not None
    kept, visited, parents = set(accepted.kept), set(accepted.path), tree.parents.tolist()
    samples = [
        (cell, i in kept)
        for i, (cell, parent) in enumerate(zip(evidence.cells, parents))
        if cell >= 0 and parent in visited
    ]
    if samples:
        rates.learn(samples)
    if not visited.isdisjoint(evidence.rests):
        _observe_trust(tree, kept, accepted, rates)


def _observe_trust(tree: Tree, kept: set[int], accepted: Accepted, rates: LookupRates) -> None:
    """Count what the draft's own children promised at visited nodes where they stood beside votes and no vote was right."""
    assert tree.evidence is not None
    evidence, parents, log_probs = tree.evidence, tree.parents.tolist(), tree.log_probs.tolist()
    promised = {node: 0.0 for node in accepted.path if node in evidence.rests}
    right = dict.fromkeys(promised, False)
    for node, parent in enumerate(parents):
        if parent in promised:
            if evidence.cells[node] < 0:
                promised[parent] += exp(log_probs[node] - log_probs[parent]) / (
                    evidence.rests[parent] * evidence.trust
                )
                right[parent] |= node in kept
            elif node in kept:
                del promised[parent]
    for node, total in promised.items():
        if total:
            rates.learn_trust(total, right[node])
