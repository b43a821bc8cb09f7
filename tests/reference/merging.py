"""Trees of a draft and of prompt lookup, grown in Python: the reference of `decode/native/trees.c`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from heapq import heapify, heappop, heappush, heapreplace
from math import exp, log
from typing import Any

import numpy as np

from dflash_ggml.decode.candidates import CandidateBlock, Candidates
from dflash_ggml.decode.tree import Tree

from .cursors import children_of, root_of
from .voting import LEAST, MOST, Evidence, LookupCandidates, LookupRates, Vote, beside_draft, in_order

DRAFT, LOOKUP = 1, 2  # bits of `Tree.sources`
_FAR = -log(LEAST)
_NEVER = float("-inf")


class Merged:
    """A draft's candidates, or none, and those of prompt lookup."""

    def __init__(self, draft: Candidates | None, lookup: LookupCandidates, rates: LookupRates) -> None:
        self.draft, self.lookup, self.rates, self.trust = draft, lookup, rates.of, rates.trust

    def grow(self, root: int, budget: int, chain_seed: bool = False) -> Tree:
        """The most probable paths, up to `budget` nodes, best first; see `tree.expand`."""
        growth = _Growth(self, root, budget)
        if chain_seed:
            growth.seed()
        growth.finish()
        return growth.tree()

    def spine(self, root: int, length: int) -> Tree:
        """The chain of best children, at most `length` long."""
        growth = _Growth(self, root, length)
        growth.seed()
        return growth.tree()


# One entry per node that may come next: (cost = -log-probability of its path, depth, parent, rank, what). Of plain rows `what`
# is None; of a draft's candidates beside votes (candidates, ranks that votes have taken, what votes cost them); of a vote,
# whose rank is negative, (token, cell, cursor of prompt lookup, cursor in the draft or None, sources).
_Entry = tuple[float, int, int, int, Any]
# A draft's candidates after a node: tokens, log-probabilities and cursors, of which plain rows have none: there it is the depth.
_Row = tuple[Sequence[int], Sequence[float], Sequence[Any] | None]
_NO_ROW: _Row = ((), (), None)
_NONE: tuple[int, ...] = ()


class _Growth:
    """A merged tree in the making. Tuples and no objects per node: it runs once a step."""

    def __init__(self, merged: Merged, root: int, budget: int) -> None:
        """Raises ValueError if budget < 0."""
        if budget < 0:
            raise ValueError(f"budget must not be negative, got {budget}")
        self.budget, self.votes, self.rates = budget, merged.lookup.votes, merged.rates
        self.trust = merged.trust
        self.nodes = [(root, -1, 0, -1, 0)]  # token, parent, depth, cell, sources
        self.costs, self.rests = [0.0], dict[int, float]()
        self.heap: list[_Entry] = []
        draft = merged.draft
        self.rows = _plain_rows(draft)
        self.expand = None if draft is None or self.rows is not None else partial(children_of, draft)
        self._children(0, 0.0, 1, None if draft is None else root_of(draft), self.votes(merged.lookup.root))

    def tree(self) -> Tree:
        tokens, parents, depths, cells, sources = zip(*self.nodes)
        return Tree(
            np.array(tokens, np.int32),
            np.array(parents, np.int32),
            np.array(depths, np.int32),
            0 - np.array(self.costs, np.float32),  # the root's is 0, not -0
            np.array(sources, np.uint8),
            Evidence(cells, self.rests, self.trust),
        )

    def seed(self) -> None:
        """The chain of best children first; what else was queued waits."""
        heap, waiting = self.heap, []
        while heap and len(self.nodes) <= self.budget:
            parent = heap[0][2]
            best = heappop(heap)
            waiting += heap
            heap[:] = [best]
            self._add(1)
            waiting += [entry for entry in heap if entry[2] == parent]
            heap[:] = sorted([entry for entry in heap if entry[2] != parent])
        self.heap += waiting
        heapify(self.heap)

    def finish(self) -> None:
        """The rest of the budget, best first."""
        self._add(self.budget + 1 - len(self.nodes))

    def _add(self, n: int) -> None:
        """The best n of the heap, one after the other, become nodes. Locals, and a call for few of them: it runs once a step."""
        heap, nodes, costs, rows = self.heap, self.nodes, self.costs, self.rows or ()
        n_rows, end = len(rows), len(nodes) + n
        while heap and (node := len(nodes)) < end:
            cost, depth, parent, rank, what = heap[0]
            if what is None:  # plain rows, as in `trees.best_first`
                tokens, scores, _ = rows[depth - 1]
                nodes.append((tokens[rank], parent, depth, -1, DRAFT))
                costs.append(cost)
                rank += 1
                if rank < len(tokens) and scores[rank] > _NEVER:
                    heapreplace(heap, (costs[parent] - scores[rank], depth, parent, rank, None))
                else:
                    heappop(heap)
                if depth < n_rows and rows[depth][1]:
                    heappush(heap, (cost - rows[depth][1][0], depth + 1, node, 0, None))
            elif rank < 0:
                self._follow(end)
            else:
                (tokens, scores, cursors), taken, lost = what
                nodes.append((tokens[rank], parent, depth, -1, DRAFT))
                costs.append(cost)
                at = depth if cursors is None else cursors[rank]
                rank = _after(rank, taken)
                if rank < len(tokens) and scores[rank] > _NEVER:
                    heapreplace(heap, (costs[parent] + lost - scores[rank], depth, parent, rank, what))
                else:
                    heappop(heap)
                self._children(node, cost, depth + 1, at, ())

    def _follow(self, end: int) -> None:
        """The voted token on top of the heap becomes a node, and those behind it do while each is the only one that is voted for
        and the best of all, up to `end` nodes: uncontested tokens, most of a tree, need no heap."""
        heap, nodes, costs, rests = self.heap, self.nodes, self.costs, self.rests
        rows, expand, votes, rates, trust = self.rows or (), self.expand, self.votes, self.rates, self.trust
        cost, depth, parent, _, (token, cell, cursor, at, sources) = heappop(heap)
        while True:
            node = len(nodes)
            nodes.append((token, parent, depth, cell, sources))
            costs.append(cost)
            found = votes(cursor) if cost < _FAR else ()
            if len(found) != 1:
                self._children(node, cost, depth + 1, at, found)
                return
            ((token, cell, cursor),) = found
            row: _Row = _NO_ROW
            if at is not None:
                row = expand(at) if expand else rows[depth] if depth < len(rows) else _NO_ROW
            tokens, scores, cursors = row
            parent, sources, at, depth = node, LOOKUP, None, depth + 1
            if not tokens:  # the draft has no word here
                cost -= log(rates[cell])
            else:
                promised, other, taken = 0.0, 0, _NONE
                if cursors is None:
                    at = depth
                if token in tokens:
                    rank = tokens.index(token)
                    promised, sources, taken = exp(scores[rank]), LOOKUP | DRAFT, (rank,)
                    other = 0 if rank else 1
                    if cursors is not None:
                        at = cursors[rank]
                cell = beside_draft(cell, promised)
                p = rates[cell]
                if p > MOST:
                    p = MOST
                if other < len(tokens) and scores[other] > _NEVER:
                    rests[node] = rest = 1 - p
                    lost = log(max(1 - promised, 1e-6) / (rest * trust))
                    what = row, taken, lost
                    heappush(heap, (cost + lost - scores[other], depth, node, other, what))
                cost -= log(p)
            is_beaten = heap and heap[0][0] <= cost and heap[0] < (cost, depth, parent, -1)
            if is_beaten or len(nodes) == end:
                heappush(heap, (cost, depth, parent, -1, (token, cell, cursor, at, sources)))
                return

    def _children(self, node: int, cost: float, depth: int, at: Any, votes: Sequence[Vote]) -> None:
        """Queue the children, at `depth`, of a node with this cursor in the draft, of plain rows the depth, and these votes."""
        heap, rates, row = self.heap, self.rates, _NO_ROW
        if at is not None:
            if self.expand is not None:
                row = self.expand(at)
            elif self.rows is not None and depth <= len(self.rows):
                row = self.rows[depth - 1]
        tokens, scores, cursors = row
        if not tokens:
            total = in_order([rates[cell] for _, cell, _ in votes])
            lost = log(max(total / MOST, 1.0)) if len(votes) > 1 else 0.0
            for i, (token, cell, follow) in enumerate(votes):
                entry = (token, cell, follow, None, LOOKUP)
                heappush(heap, (cost + lost - log(rates[cell]), depth, node, -1 - i, entry))
            return
        if not votes:
            if scores[0] > _NEVER:
                what = None if cursors is None else (row, (), 0.0)
                heappush(heap, (cost - scores[0], depth, node, 0, what))
            return
        total = votes_in_draft = 0.0
        several: list[int] = []
        offers = []
        for token, cell, follow in votes:
            promised, sources = 0.0, LOOKUP
            under = depth if cursors is None else None
            if token in tokens:
                rank = tokens.index(token)
                promised, sources = exp(scores[rank]), LOOKUP | DRAFT
                under = depth if cursors is None else cursors[rank]
                several.append(rank)
                votes_in_draft += promised
            cell = beside_draft(cell, promised)
            total += rates[cell]
            offers.append((token, cell, follow, under, sources))
        scale = MOST / total if total > MOST else 1.0
        promised = scale * total if len(votes) > 1 else min(total, MOST)
        for i, offer in enumerate(offers):
            p = scale * rates[offer[1]] if len(votes) > 1 else promised
            heappush(heap, (cost - log(p), depth, node, -1 - i, offer))
        rank = _after(-1, several)
        if rank < len(tokens) and scores[rank] > _NEVER:
            self.rests[node] = rest = 1 - promised
            lost = log(max(1 - votes_in_draft, 1e-6) / (rest * self.trust))
            heappush(heap, (cost + lost - scores[rank], depth, node, rank, (row, several, lost)))


def _after(rank: int, taken: Sequence[int]) -> int:
    """The next rank that no vote has taken."""
    rank += 1
    while rank in taken:
        rank += 1
    return rank


def _plain_rows(draft: Candidates | None) -> list[_Row] | None:
    """Plain rows, without cursors, and without what has no probability."""
    if not isinstance(draft, CandidateBlock) or draft.pairs is not None:
        return None
    found: list[_Row] = []
    for tokens, scores in zip(draft.ids.tolist(), draft.log_probs.tolist()):
        possible = sum(score > _NEVER for score in scores)
        found.append((tokens[:possible], scores[:possible], None))
    return found
