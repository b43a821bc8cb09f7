"""Copies and how often they were right, in Python: what the C of the decode room is held against."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import exp

from dflash_ggml.decode.accept import Accepted
from dflash_ggml.decode.text_index import LONGEST
from dflash_ggml.decode.tree import Tree

PRIOR = 8.0  # samples that other texts are worth for a new one
OWN_WORD = 5.0  # samples that the table below is worth
KEPT = 200.0  # samples of a cell after which old ones fade
TREND_FIRST = -0.6  # of a text that has not been seen to copy
TREND_RATE = 0.5  # logits per unit of surprise
TREND_MOST = 4.0
FIRST_TRUST = 5.0  # samples that a draft's own word is worth
TRUST_KEPT = 0.995  # of older samples
MOST = 0.98  # of the probability that votes may take
LEAST = 0.02  # likelihood of a copied path below which it is not followed
_LENGTHS = (3, 4, 6, 9, 16, 32)  # first lengths of the buckets but for that of the shortest matches
_BUCKET = [sum(length >= first for first in _LENGTHS) for length in range(LONGEST + 256)]
_BY_LENGTH = (0.25, 0.4, 0.5, 0.65, 0.8, 0.9, 0.95)
# one place alone, two that agree, more; a majority, a good part, less
_BY_VOTE = (0.0, 0.4, 0.8, -0.3, -1.2, -2.2)
# what a draft says of a token, below each and above, and what that adds in logits
_SAID = (0.1, 0.5, 0.9)
_BY_SAID = (-0.8, 0.3, 1.3, 2.5)
N_VOTES, N_DRAFT = len(_BY_VOTE), 1 + len(_BY_SAID)
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
    """How often copies were right, by cell. A text copies much or little, whatever the cell: a trend, in logits, follows that.

    of: the rate of a cell now, until `learn` is called.
    """

    def __init__(self, prior: LookupRates | None = None) -> None:
        """`prior`: what is known of other texts; it learns too."""
        self._prior = prior
        self._hits, self._tried = [0.0] * N_CELLS, [0.0] * N_CELLS
        # without the trend
        self._own: list[float] = list(_FIRST if prior is None else prior._own)
        # of all texts and of this one: each cell's samples, and the rate that they make of the one before
        self._levels: tuple[tuple[list[float], ...], ...] = (
            *(() if prior is None else prior._levels),
            (self._tried, self._hits, self._own),
        )
        self.trend = 0.0 if prior is None else TREND_FIRST
        # where no vote was right: how often a draft's candidates were, and how often they said so
        self._draft_right = self._draft_said = FIRST_TRUST if prior is None else 0.0
        self.of = _Moved(self._own, self.trend)

    @property
    def rates(self) -> list[float]:
        """The rates of all cells."""
        return [self.of[cell] for cell in range(N_CELLS)]

    def learn(self, samples: Iterable[tuple[int, bool]]) -> None:
        """Count samples: a cell, and whether the copy was right."""
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
        """What a draft's word is worth where votes have one, at most 1."""
        known = self if self._prior is None else self._prior
        return min(known._draft_right / known._draft_said, 1.0)

    def learn_trust(self, said: float, is_right: bool) -> None:
        """Count a place where no vote was right: what the draft's candidates promised together, and whether one was."""
        if self._prior is not None:
            self._prior.learn_trust(said, is_right)
            return
        self._draft_said = (self._draft_said + said) * TRUST_KEPT
        self._draft_right = (self._draft_right + is_right) * TRUST_KEPT


@dataclass(frozen=True, slots=True)
class Evidence:
    """`copied.Evidence` with lists; rests: only where votes have a word and the draft another child."""

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
    """What followed at each place. windows: ids behind it; lengths: tokens matched before it.

    Cursors are (depth, places that carry the whole path).
    """

    def __init__(self, windows: Sequence[Sequence[int]], lengths: Sequence[int], depth: int) -> None:
        """`depth`: the longest path."""
        self.windows, self.lengths, self.depth = windows, lengths, depth
        self.root: Cursor = (0, tuple(range(len(windows))))
        # by places: how far they say the same, what they say, the longest match before it, and their vote's part of a cell
        self._agreed: dict[tuple[int, ...], tuple[int, Sequence[int], int, int]] = {}

    def votes(self, cursor: Cursor) -> list[Vote]:
        """The next tokens, each once."""
        depth, places = cursor
        agreed = self._agreed.get(places) or self._agree(places)
        until, window, length, vote = agreed
        if depth < until:
            return [(window[depth], _BUCKET[length + depth] * _PER_LENGTH + vote, (depth + 1, places))]
        return self._parted(depth, places)

    def gains(self, rates: Mapping[int, float], budget: int) -> list[float]:
        """Expected tokens of a step by the nodes of a tree of copies alone, 1 for none, up to `budget`: what growing it
        would give, for a part of the time."""
        kept: list[float] = []
        open_ = [(self.root, 1.0)]
        while open_:
            cursor, path = open_.pop()
            votes = self.votes(cursor)
            if len(votes) > 1:
                path /= max(in_order([rates[cell] for _, cell, _ in votes]) / MOST, 1.0)
            for _, cell, follow in votes:
                p = path * rates[cell]
                kept.append(p)
                if p > LEAST:
                    open_.append((follow, p))
        kept.sort(reverse=True)
        return list(accumulate(kept[:budget], initial=1.0))

    def _agree(self, places: tuple[int, ...]) -> tuple[int, Sequence[int], int, int]:
        """See `_agreed`."""
        first = self.windows[places[0]]
        until = min(len(first), self.depth)
        for place in places[1:]:
            other = self.windows[place]
            if other[:until] != first[:until]:
                until = next((i for i, (a, b) in enumerate(zip(first, other)) if a != b), len(other))
        length = max([self.lengths[place] for place in places])
        agreed = until, first, length, (min(len(places), 3) - 1) * N_DRAFT
        self._agreed[places] = agreed
        return agreed

    def _parted(self, depth: int, places: tuple[int, ...]) -> list[Vote]:
        """The votes of places that say different things, or of which some have ended."""
        windows, lengths = self.windows, self.lengths
        said: dict[int, list[int]] = {}
        for place in places:
            if depth < min(len(windows[place]), self.depth):
                said.setdefault(windows[place][depth], []).append(place)
        if len(said) == 1:
            ((token, who),) = said.items()
            length, vote = max([lengths[p] for p in who]), min(len(who), 3) - 1
            cell = _BUCKET[length + depth] * _PER_LENGTH + vote * N_DRAFT
            return [(token, cell, (depth + 1, tuple(who)))]
        weights = [1 << min(length, _MOST_WEIGHT) for length in lengths]
        total = sum([weights[p] for who in said.values() for p in who])
        out = []
        for token, who in said.items():
            share = sum([weights[p] for p in who]) / total
            vote = 3 if share >= 0.6 else 4 if share >= 0.25 else 5
            cell = _BUCKET[max([lengths[p] for p in who]) + depth] * _PER_LENGTH + vote * N_DRAFT
            out.append((token, cell, (depth + 1, tuple(who))))
        return out


def beside_draft(cell: int, said: float) -> int:
    """The cell of a token of which a draft says that it comes with probability `said`."""
    return cell + 1 + bisect(_SAID, said)


def _first() -> list[float]:
    """Rates before any sample, cell by cell."""
    out = []
    for p in _BY_LENGTH:
        for vote in _BY_VOTE:
            logit = math.log(p / (1 - p)) + vote
            logits = [logit, *(logit + said for said in _BY_SAID)]
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
    said = {node: 0.0 for node in accepted.path if node in evidence.rests}
    right = dict.fromkeys(said, False)
    for node, parent in enumerate(parents):
        if parent in said:
            if evidence.cells[node] < 0:
                said[parent] += exp(log_probs[node] - log_probs[parent]) / (
                    evidence.rests[parent] * evidence.trust
                )
                right[parent] |= node in kept
            elif node in kept:
                del said[parent]
    for node, promised in said.items():
        if promised:
            rates.learn_trust(promised, right[node])
