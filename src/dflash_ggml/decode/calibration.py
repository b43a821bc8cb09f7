"""How often a draft is right when it says so: its probabilities, corrected by what the target chose.

Every node that a walk visits is a labelled sample: the target's choice there is known, so each of its children was right or
wrong. Counts are kept by depth and by the probability that the draft gave the child; where there are few, the draft's own
word, or what other texts showed, stands. A text that turns easy or hard moves all depths at once, and deep nodes are seldom
visited: a trend, in logits, follows that faster than counts can. Temperature, penalties and grammars change what is
accepted: what counts is what was, not why.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .tree import Tree

N_DEPTHS = 8  # depths told apart; deeper ones count as the last
N_BUCKETS = 8  # of the draft's probability
PRIOR = 8.0  # samples that what was believed before is worth
KEPT = 400.0  # samples of a cell after which old ones fade
TREND_RATE = 0.2  # logits per unit of surprise
TREND_MOST = 5.0


class Calibration:
    """Hit counts of one draft on one target."""

    def __init__(self, prior: Calibration | None = None) -> None:
        """`prior`: what is known of other texts; it learns too."""
        self.hits = np.zeros((N_DEPTHS, N_BUCKETS))
        self.tried = np.zeros((N_DEPTHS, N_BUCKETS))
        self.trend = 0.0
        self._prior = prior

    def observe(self, tree: Tree, path: tuple[int, ...]) -> None:
        """Count the children of the visited nodes; `path`: visited nodes, root first."""
        visited = np.zeros(tree.width, bool)
        visited[list(path)] = True
        children = np.flatnonzero(visited[tree.parents] & (tree.parents >= 0))
        if len(children):
            self._follow(tree, visited, children)
            cells = np.ravel_multi_index(_cells(tree, children), self.hits.shape)
            self._count(cells, visited[children])

    def path_probabilities(self, tree: Tree) -> NDArray[np.float64]:
        """How likely each node is to be accepted, [width], 1 at the root: the product of its path's calibrated probabilities."""
        out = self._edges(tree)
        parents = tree.parents.tolist()
        for node in range(1, len(out)):
            out[node] *= out[parents[node]]
        return np.array(out)

    def _edges(self, tree: Tree) -> list[float]:
        """The probability of each node given that its parent is accepted, 1 at the root."""
        edges = np.ones(tree.width)
        nodes = np.arange(1, tree.width)
        if len(nodes):
            said = np.exp(np.minimum(_log_edges(tree, nodes), 0.0))
            edges[1:] = self._corrected(said, _cells(tree, nodes))
        if self.trend and len(nodes):
            # the children of a node share its trend: one of them is right, or none
            parents = tree.parents[1:]
            any_right = np.bincount(parents, edges[1:], tree.width)
            edges[1:] *= _moved(any_right, self.trend)[parents]
        return edges.tolist()

    def _corrected(self, said: NDArray[np.float64], cells: tuple[NDArray, NDArray]) -> NDArray[np.float64]:
        before = said if self._prior is None else self._prior._corrected(said, cells)
        return (self.hits[cells] + PRIOR * before) / (self.tried[cells] + PRIOR)

    def _count(self, cells: NDArray[np.int64], right: NDArray[np.bool_]) -> None:
        shape, n = self.hits.shape, self.hits.size
        self.tried += np.bincount(cells, minlength=n).reshape(shape)
        self.hits += np.bincount(cells, right, n).reshape(shape)
        faded = np.minimum(1.0, KEPT / np.maximum(self.tried, 1.0))
        self.tried *= faded
        self.hits *= faded
        if self._prior is not None:
            self._prior._count(cells, right)

    def _follow(self, tree: Tree, visited: NDArray[np.bool_], children: NDArray[np.int64]) -> None:
        """Move the trend by what was a surprise at each visited node that had children."""
        edges = np.array(self._edges(tree))
        parents = tree.parents[children]
        expected = np.bincount(parents, edges[children], tree.width)
        right = np.bincount(parents, visited[children], tree.width)
        for node in np.unique(parents):
            self.trend += TREND_RATE * float(right[node] - min(expected[node], 1.0))
        self.trend = min(max(self.trend, -TREND_MOST), TREND_MOST)


def _moved(any_right: NDArray[Any], trend: float) -> NDArray[np.float64]:
    """The factor that moves probabilities by `trend` logits."""
    p = np.clip(any_right, 1e-9, 1 - 1e-6)
    odds = p / (1 - p) * math.exp(trend)
    return odds / (1 + odds) / p


def _log_edges(tree: Tree, nodes: NDArray[np.integer]) -> NDArray[np.float64]:
    """The draft's log-probability of each node given its parent."""
    return tree.log_probs[nodes].astype(np.float64) - tree.log_probs[tree.parents[nodes]]


def _cells(tree: Tree, nodes: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Depth and probability bucket of nodes. Buckets: 1 to 0.84, 0.71, 0.59, 0.5, then halves."""
    halvings = -_log_edges(tree, nodes) / math.log(2)
    buckets = np.clip(np.where(halvings < 1, 4 * halvings, 3 + halvings), 0, N_BUCKETS - 1)
    return np.minimum(tree.depths[nodes], N_DEPTHS).astype(np.int64) - 1, buckets.astype(np.int64)
