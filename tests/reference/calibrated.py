"""Reference of calibration in Python, for the C of `decode/native`."""

from __future__ import annotations

import math

from dflash_ggml.decode.accept import Accepted
from dflash_ggml.decode.lookup import Evidence
from dflash_ggml.decode.tree import Tree

N_DEPTHS = 8  # separate depths; deeper ones count as the last
N_BUCKETS = 8  # of the draft's probability
PRIOR = 8.0  # weight of other sequences for a new one, in samples
OWN_WORD = 16.0  # weight of the draft's own probability without other sequences, in samples
KEPT = 400.0  # samples of a cell after which old ones fade
TREND_RATE = 0.05  # logits per unit of surprise
TREND_MOST = 5.0
_SURE = 1 - 1e-6
_HALVINGS = 1 / math.log(2)
_HALF, _QUARTERS = -math.log(2), -4 * _HALVINGS


class Calibration:
    """Hit counts of one draft on one target. Plain lists: a tree has few nodes, and an array operation costs more than a loop."""

    def __init__(self, prior: Calibration | None = None) -> None:
        """`prior`: calibration over other sequences; it learns too."""
        self.hits = [0.0] * (N_DEPTHS * N_BUCKETS)
        self.tried = [0.0] * (N_DEPTHS * N_BUCKETS)
        self.trend = 0.0
        self._prior = prior
        # the corrected probability of a cell is linear in the draft's own: base + slope * p
        self._base = [0.0] * len(self.hits)
        self._slope = [1.0] * len(self.hits)
        for cell in range(len(self.hits)):
            self._correct(cell)

    def path_probabilities(self, tree: Tree) -> list[float]:
        """How likely each node is to be accepted, 1 at the root: the product of its path's calibrated probabilities."""
        if tree.evidence is not None:
            return self._merged_probabilities(tree, tree.evidence)
        parents, log_probs, depths = tree.parents.tolist(), tree.log_probs.tolist(), tree.depths.tolist()
        base, slope, exp, last = self._base, self._slope, math.exp, N_BUCKETS - 1
        edges, sums = [1.0] * len(parents), [0.0] * len(parents)
        for node in range(1, len(parents)):
            parent, depth = parents[node], depths[node]
            log_prob = log_probs[node] - log_probs[parent]
            # `_cell`, inlined: this runs for every node of every sequence, while a device waits
            bucket = int(_QUARTERS * log_prob) if log_prob > _HALF else int(3 - _HALVINGS * log_prob)
            if bucket > last:
                bucket = last
            cell = (depth - 1 if depth < N_DEPTHS else N_DEPTHS - 1) * N_BUCKETS + bucket
            edges[node] = edge = base[cell] + slope[cell] * exp(log_prob)
            sums[parent] += edge
        lift = exp(self.trend)  # the children of a node share it: one of them is right, or none
        for node in range(1, len(parents)):
            parent = parents[node]
            total = sums[parent]
            if total < _SURE:
                edges[node] *= edges[parent] * lift / (1 - total + total * lift)
            else:
                edges[node] *= edges[parent]
        return edges

    def _merged_probabilities(self, tree: Tree, evidence: Evidence) -> list[float]:
        """`path_probabilities` beside votes, which are calibrated already: the draft has the rest."""
        parents, log_probs, depths = tree.parents.tolist(), tree.log_probs.tolist(), tree.depths.tolist()
        cells, rests, lift = evidence.cells, evidence.rests, math.exp(self.trend)
        edges, sums = [1.0] * len(parents), [0.0] * len(parents)
        for node in range(1, len(parents)):
            parent = parents[node]
            edges[node] = p = math.exp(log_probs[node] - log_probs[parent])
            if cells[node] < 0:
                if parent in rests:
                    p /= rests[parent] * evidence.trust
                log_prob = math.log(max(min(p, 1.0), 1e-30))
                cell = _cell(depths[node], log_prob)
                edges[node] = edge = self._base[cell] + self._slope[cell] * math.exp(log_prob)
                sums[parent] += edge
        for node in range(1, len(parents)):
            parent = parents[node]
            if cells[node] < 0:
                edges[node] *= rests.get(parent, 1.0) * _moved(sums[parent], lift)
            edges[node] *= edges[parent]
        return edges

    def observe(self, tree: Tree, accepted: Accepted) -> None:
        """Count the children of the visited nodes; of a merged tree those of the draft alone, where no vote was right."""
        parents, log_probs, depths = tree.parents.tolist(), tree.log_probs.tolist(), tree.depths.tolist()
        kept, evidence = accepted.kept, tree.evidence
        expected, right = dict.fromkeys(accepted.path, 0.0), dict.fromkeys(kept[:-1], 1.0)
        if evidence is not None:
            for node in kept[1:]:
                if evidence.cells[node] >= 0:
                    del expected[parents[node]]
        for node in range(1, len(parents)):
            parent = parents[node]
            if parent in expected:
                log_prob = log_probs[node] - log_probs[parent]
                if evidence is not None:
                    if evidence.cells[node] >= 0:
                        continue
                    if parent in evidence.rests:
                        log_prob = min(log_prob - math.log(evidence.rests[parent] * evidence.trust), 0.0)
                cell = _cell(depths[node], log_prob)
                expected[parent] += self._base[cell] + self._slope[cell] * math.exp(log_prob)
                self._count(cell, node in kept)
        for node, p in expected.items():
            if p:
                surprise = right.get(node, 0.0) - min(p * _moved(p, math.exp(self.trend)), 1.0)
                self.trend = min(max(self.trend + TREND_RATE * surprise, -TREND_MOST), TREND_MOST)

    def _count(self, cell: int, is_right: bool) -> None:
        if self._prior is not None:
            self._prior._count(cell, is_right)
        fading = 1.0 if self.tried[cell] < KEPT else KEPT / (KEPT + 1)
        self.tried[cell] = fading * (self.tried[cell] + 1)
        self.hits[cell] = fading * (self.hits[cell] + is_right)
        self._correct(cell)

    def _correct(self, cell: int) -> None:
        """What was believed before counts as some samples more."""
        before, slope = (
            (0.0, 1.0) if self._prior is None else (self._prior._base[cell], self._prior._slope[cell])
        )
        prior = OWN_WORD if self._prior is None else PRIOR
        weight = prior / (self.tried[cell] + prior)
        self._base[cell] = self.hits[cell] / (self.tried[cell] + prior) + weight * before
        self._slope[cell] = weight * slope


def _moved(probability: float, lift: float) -> float:
    """The factor that moves a probability by a trend, given as exp(trend)."""
    return lift / (1 - probability + probability * lift) if probability < _SURE else 1.0


def _cell(depth: int, log_prob: float) -> int:
    """The cell of a depth and a log-probability: 1 to 0.84, 0.71, 0.59, 0.5, then halves."""
    halvings = -log_prob * _HALVINGS
    bucket = int(4 * halvings) if halvings < 1 else int(min(3 + halvings, N_BUCKETS - 1))
    return (min(depth, N_DEPTHS) - 1) * N_BUCKETS + max(bucket, 0)
