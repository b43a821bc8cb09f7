"""One tree of a model draft's candidates and of copied text.

Under each node the next token's distribution is put together from both: the tokens that copies vote for take the
probabilities that such votes have earned (`CopyRates`, which also looks at what the draft says of them), and the draft's
other candidates share the rest in its own proportions. So the parts sum to one, a token that both offer is one node with
both cursors, and where no copy goes on the draft stands alone. A mean weighted by source was the other design: it knows
nothing of agreement, which is what tells most (bench/notes-drafts.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace
from math import exp, log
from typing import Any

import numpy as np

from .accept import Accepted
from .candidates import Candidates, Rows
from .copied import LEAST, MOST, Copied, CopyRates, Cursor, Evidence, beside_draft
from .tree import Tree

DRAFT, COPIES = 1, 2  # bits of `Tree.sources`
_FAR = -log(LEAST)
_NEVER = float("-inf")


def observe(tree: Tree, accepted: Accepted, rates: CopyRates) -> None:
    """Count the votes at the visited nodes of a merged tree."""
    assert tree.evidence is not None
    kept, visited = set(accepted.kept), set(accepted.path)
    parents = tree.parents.tolist()
    votes = [(i, cell) for i, cell in enumerate(tree.evidence.cells[: len(parents)]) if cell >= 0]
    samples = [(cell, i in kept) for i, cell in votes if parents[i] in visited]
    if samples:
        rates.learn(samples)
    _observe_trust(tree, kept, accepted, rates)


def _observe_trust(tree: Tree, kept: set[int], accepted: Accepted, rates: CopyRates) -> None:
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


class Merged:
    """A draft's candidates, or none, and copies."""

    def __init__(self, draft: Candidates | None, copied: Copied, rates: CopyRates) -> None:
        self.draft, self.copied, self.rates, self.trust = draft, copied, rates.of, rates.trust

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
# whose rank is negative, (token, cell, cursor among copies, cursor in the draft or None, sources).
_Entry = tuple[float, int, int, int, Any]


class _Growth:
    """A merged tree in the making. Tuples and no objects per node: it runs once a step."""

    def __init__(self, merged: Merged, root: int, budget: int) -> None:
        """Raises ValueError if budget < 0."""
        if budget < 0:
            raise ValueError(f"budget must not be negative, got {budget}")
        self.budget, self.votes, self.rates = budget, merged.copied.votes, merged.rates
        self.trust = merged.trust
        self.nodes = [(root, -1, 0, -1, 0)]  # token, parent, depth, cell, sources
        self.costs, self.rests = [0.0], dict[int, float]()
        self.heap: list[_Entry] = []
        draft = merged.draft
        self.rows = _plain_rows(draft)
        self.expand = None if draft is None or self.rows is not None else draft.expand
        self._children(0, 0.0, 1, None if draft is None else draft.root, merged.copied.root)

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
            self._add()
            waiting += [entry for entry in heap if entry[2] == parent]
            heap[:] = sorted([entry for entry in heap if entry[2] != parent])
        self.heap += waiting
        heapify(self.heap)

    def finish(self) -> None:
        """The rest of the budget, best first."""
        heap, nodes, budget, add = self.heap, self.nodes, self.budget, self._add
        while heap and len(nodes) <= budget:
            add()

    def _add(self) -> None:
        """The best of the heap becomes a node."""
        heap, nodes, costs = self.heap, self.nodes, self.costs
        cost, depth, parent, rank, what = heap[0]
        node = len(nodes)
        costs.append(cost)
        if what is None:  # plain rows, as in `tree.best_first`
            rows = self.rows
            assert rows is not None
            tokens, scores = rows[depth - 1]
            nodes.append((tokens[rank], parent, depth, -1, DRAFT))
            rank += 1
            if rank < len(tokens) and scores[rank] > _NEVER:
                heapreplace(heap, (costs[parent] - scores[rank], depth, parent, rank, None))
            else:
                heappop(heap)
            if depth < len(rows) and (best := rows[depth][1][0]) > _NEVER:
                heappush(heap, (cost - best, depth + 1, node, 0, None))
            return
        heappop(heap)
        if rank < 0:
            token, cell, cursor, at, sources = what
            nodes.append((token, parent, depth, cell, sources))
            self._children(node, cost, depth + 1, at, cursor)
            return
        (tokens, scores, cursors), taken, lost = what
        nodes.append((tokens[rank], parent, depth, -1, DRAFT))
        at = depth if cursors is None else cursors[rank]
        rank = _after(rank, taken)
        if rank < len(tokens) and scores[rank] > _NEVER:
            heappush(heap, (costs[parent] + lost - scores[rank], depth, parent, rank, what))
        self._children(node, cost, depth + 1, at, None)

    def _children(self, node: int, cost: float, depth: int, at: Any, cursor: Cursor | None) -> None:
        """Queue the children, at `depth`, of a node with these cursors: of plain rows the cursor is the depth."""
        heap, rates = self.heap, self.rates
        votes = self.votes(cursor) if cursor is not None and cost < _FAR else ()
        tokens: Sequence[int] = ()
        scores: Sequence[float] = ()
        cursors: Sequence[Any] | None = None
        if self.rows is not None and at is not None:
            if depth <= len(self.rows):
                tokens, scores = self.rows[depth - 1]
                if not votes:
                    if scores[0] > _NEVER:
                        heappush(heap, (cost - scores[0], depth, node, 0, None))
                    return
        elif self.expand is not None and at is not None:
            tokens, scores, cursors = self.expand(at)
            tokens = list(tokens)
        if not tokens:
            if len(votes) == 1:
                ((token, cell, follow),) = votes
                heappush(
                    heap, (cost - log(rates[cell]), depth, node, -1, (token, cell, follow, None, COPIES))
                )
                return
            total = sum([rates[cell] for _, cell, _ in votes])
            lost = log(max(total / MOST, 1.0))
            for i, (token, cell, follow) in enumerate(votes):
                entry = (token, cell, follow, None, COPIES)
                heappush(heap, (cost + lost - log(rates[cell]), depth, node, -1 - i, entry))
            return
        if len(votes) == 1:  # nearly always
            ((token, cell, follow),) = votes
            if token in tokens:
                rank = tokens.index(token)
                said, sources = exp(scores[rank]), COPIES | DRAFT
                under = depth if cursors is None else cursors[rank]
                taken: tuple[int, ...] = (rank,)
                other = 1 if rank == 0 else 0
            else:
                said, sources, taken, other = 0.0, COPIES, (), 0
                under = depth if cursors is None else None
            cell = beside_draft(cell, said)
            p = min(rates[cell], MOST)
            heappush(heap, (cost - log(p), depth, node, -1, (token, cell, follow, under, sources)))
            if other < len(tokens) and scores[other] > _NEVER:
                self.rests[node] = rest = 1 - p
                lost = log(max(1 - said, 1e-6) / (rest * self.trust))
                what = (tokens, scores, cursors), taken, lost
                heappush(heap, (cost + lost - scores[other], depth, node, other, what))
            return
        total = said_of_votes = 0.0
        several: list[int] = []
        offers = []
        for token, cell, follow in votes:
            said, sources = 0.0, COPIES
            under = depth if cursors is None else None
            if token in tokens:
                rank = tokens.index(token)
                said, sources = exp(scores[rank]), COPIES | DRAFT
                under = depth if cursors is None else cursors[rank]
                several.append(rank)
                said_of_votes += said
            cell = beside_draft(cell, said)
            total += rates[cell]
            offers.append((token, cell, follow, under, sources))
        scale = MOST / total if total > MOST else 1.0
        for i, offer in enumerate(offers):
            heappush(heap, (cost - log(scale * rates[offer[1]]), depth, node, -1 - i, offer))
        rank = _after(-1, several)
        if rank < len(tokens) and scores[rank] > _NEVER:
            self.rests[node] = rest = 1 - scale * total
            lost = log(max(1 - said_of_votes, 1e-6) / (rest * self.trust))
            heappush(
                heap,
                (cost + lost - scores[rank], depth, node, rank, ((tokens, scores, cursors), several, lost)),
            )


def _after(rank: int, taken: Sequence[int]) -> int:
    """The next rank that no vote has taken."""
    rank += 1
    while rank in taken:
        rank += 1
    return rank


def _plain_rows(draft: Candidates | None) -> list[tuple[list[int], list[float]]] | None:
    """Plain rows as lists: indexing numpy scalars one by one would dominate growth."""
    if not isinstance(draft, Rows) or draft.pairs is not None:
        return None
    return list(zip(draft.ids.tolist(), draft.log_probs.tolist()))
