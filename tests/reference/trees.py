"""Reference of draft trees grown in Python, for the C of `decode/native`."""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dflash_ggml.decode.candidates import CandidateBlock
from dflash_ggml.decode.tree import Tree, expand

from .cursors import Candidates, Children, children_of, root_of


def best_first(
    root: int, ids: NDArray[np.int32], log_probs: NDArray[np.float32], budget: int, chain_seed: bool = False
) -> Tree:
    """`tree.expand` for a block of candidates without pair scores: ids and log_probs [L, K]."""
    return expand(root, CandidateBlock(ids, log_probs), budget, chain_seed)


def chain(root: int, ids: ArrayLike, log_probs: ArrayLike | None = None, length: int | None = None) -> Tree:
    """The path of the best candidate of each depth: what classic speculative decoding verifies.

    Args:
        ids, log_probs: [L] or [L, K] (rank 0 is taken); without log_probs every path log-probability is 0.
        length: At most so many nodes.

    Raises:
        ValueError: The shapes differ or length < 0.
    """
    ids = np.asarray(ids, np.int32)
    scores = np.zeros(ids.shape, np.float32) if log_probs is None else np.asarray(log_probs, np.float32)
    if ids.ndim not in (1, 2) or scores.shape != ids.shape:
        raise ValueError(f"ids {ids.shape} and log_probs {scores.shape} must both be [L] or [L, K]")
    if length is not None and length < 0:
        raise ValueError(f"length must not be negative, got {length}")
    if ids.ndim == 2:
        ids, scores = ids[:, 0], scores[:, 0]
    ids, scores = ids[:length], scores[:length]
    depths = np.arange(len(ids) + 1, dtype=np.int32)
    # Summed in float64 like the costs in C, so that a chain equals a tree of one candidate to the bit.
    paths = np.concatenate(([0.0], np.cumsum(scores, dtype=np.float64))).astype(np.float32)
    return Tree(np.concatenate((np.array([root], np.int32), ids)), depths - 1, depths, paths)


def grown_of_rows(
    root: int,
    token_rows: list[list[int]],
    score_rows: list[list[float]],
    budget: int,
    chain_seed: bool,
) -> Tree:
    """`tree.expand` over plain rows."""
    n_depths = len(score_rows)
    n_ranks = len(score_rows[0]) if score_rows else 0
    tokens, parents, depths, costs = [root], [-1], [0], [0.0]
    # One entry per node that may come next: (cost = -log-probability of its path, depth, parent, rank).
    heap: list[tuple[float, int, int, int]] = []
    if chain_seed:
        for depth in range(1, min(n_depths, budget) + 1):
            scores = score_rows[depth - 1]
            before = costs[-1]
            if scores[0] == -np.inf:
                break
            tokens.append(token_rows[depth - 1][0])
            parents.append(depth - 1)
            depths.append(depth)
            costs.append(before - scores[0])
            if n_ranks > 1:
                heap.append((before - scores[1], depth, depth - 1, 1))
        heapify(heap)
    elif score_rows:
        heap.append((-score_rows[0][0], 1, 0, 0))

    for node in range(len(tokens), budget + 1):
        if not heap:
            break
        cost, depth, parent, rank = heap[0]
        if cost == np.inf:
            break
        tokens.append(token_rows[depth - 1][rank])
        parents.append(parent)
        depths.append(depth)
        costs.append(cost)
        rank += 1
        if rank < n_ranks:
            heapreplace(heap, (costs[parent] - score_rows[depth - 1][rank], depth, parent, rank))
        else:
            heappop(heap)
        if depth < n_depths:
            heappush(heap, (cost - score_rows[depth][0], depth + 1, node, 0))
    return Tree(
        np.array(tokens, np.int32),
        np.array(parents, np.int32),
        np.array(depths, np.int32),
        0 - np.array(costs, np.float32),  # the root's is 0, not -0
    )


def grown(root: int, candidates: Candidates, budget: int, chain_seed: bool = False) -> Tree:
    """`tree.expand` over candidates that are walked with cursors."""
    nodes = _Nodes(root)
    # One entry per node that may come next: (cost = -log-probability of its path, depth, parent, rank, the parent's children).
    heap: list[tuple[float, int, int, int, Children]] = []

    def queue(parent: int, rank: int, children: Children) -> None:
        if rank < len(children[0]) and children[1][rank] > -np.inf:
            cost = nodes.costs[parent] - children[1][rank]
            heappush(heap, (cost, nodes.depths[parent] + 1, parent, rank, children))

    cursor = root_of(candidates)
    while chain_seed and len(nodes.tokens) <= budget:
        children = children_of(candidates, cursor)
        if not len(children[0]) or children[1][0] == -np.inf:
            break
        parent = len(nodes.tokens) - 1
        nodes.add(children[0][0], parent, nodes.costs[parent] - children[1][0])
        queue(parent, 1, children)
        cursor = children[2][0]
    if len(nodes.tokens) <= budget:
        queue(len(nodes.tokens) - 1, 0, children_of(candidates, cursor))
    while heap and len(nodes.tokens) <= budget:
        cost, _, parent, rank, children = heappop(heap)
        node = nodes.add(children[0][rank], parent, cost)
        queue(parent, rank + 1, children)
        queue(node, 0, children_of(candidates, children[2][rank]))
    return nodes.tree()


def spine_of(root: int, candidates: Candidates, length: int) -> Tree:
    """`tree.spine` over the same."""
    nodes, cursor = _Nodes(root), root_of(candidates)
    while len(nodes.tokens) <= length:
        tokens, log_probs, cursors = children_of(candidates, cursor)
        if not len(tokens):
            break
        nodes.add(tokens[0], len(nodes.tokens) - 1, nodes.costs[-1] - log_probs[0])
        cursor = cursors[0]
    return nodes.tree()


class Pairs:
    """Rows with pair scores, walked with cursors, by numpy's exponentials and sums."""

    def __init__(self, rows: CandidateBlock) -> None:
        assert rows.pairs is not None
        self.ids, self.joint = rows.ids.tolist(), after_each(rows, rows.pairs)

    def expand(self, cursor: tuple[int, int]) -> Children:
        depth, index = cursor
        if depth == len(self.ids):
            return (), (), ()
        row = self.joint[depth, index].tolist()
        ranks = sorted(range(len(row)), key=row.__getitem__, reverse=True)
        ranks = [rank for rank in ranks if row[rank] > -np.inf]
        tokens = [self.ids[depth][rank] for rank in ranks]
        return tokens, [row[rank] for rank in ranks], [(depth + 1, rank) for rank in ranks]


def after_each(rows: CandidateBlock, pairs: NDArray[np.float32]) -> NDArray[np.float64]:
    """Log-probabilities [L, K, K] of each depth's candidates after each of the depth before."""
    scores = rows.log_probs.astype(np.float64)
    # of tokens outside the row nothing is known but that they take the rest; rounding must not make them less than none
    mass = np.exp(scores).sum(1)
    mass = np.minimum(np.log(mass, where=mass > 0, out=np.zeros_like(mass)), 0)
    joint = scores[:, None] + pairs
    best = joint.max(2, keepdims=True)
    possible = best > -np.inf
    joint -= np.where(possible, best, 0)
    total = np.exp(joint).sum(2, keepdims=True)
    joint += mass[:, None, None] - np.log(total, where=possible, out=total)
    return joint


def observers(tree: Tree | ArrayLike, width: int | None = None) -> NDArray[np.uint8]:
    """`tree.observers`, with Python's integers for bits."""
    parents = np.asarray(tree.parents if isinstance(tree, Tree) else tree).tolist()
    width = width or len(parents)
    bits = [1 << node for node in range(width)]
    # children hand what they collected to their parents, last child first
    for node in range(len(parents) - 1, -1, -1):
        parent = parents[node]
        if 0 <= parent < node:
            bits[parent] |= bits[node]
        elif parent != -1:
            raise ValueError(f"parents[{node}] = {parent}: a parent must come before its child (-1 = none)")
    n_bytes = (width + 7) // 8
    rows = b"".join([row.to_bytes(n_bytes, "little") for row in bits])
    return np.frombuffer(rows, np.uint8).reshape(width, n_bytes)


class _Nodes:
    """A tree in the making, root first."""

    def __init__(self, root: int) -> None:
        self.tokens, self.parents, self.depths, self.costs = [root], [-1], [0], [0.0]

    def add(self, token: int, parent: int, cost: float) -> int:
        """Add a node; its index."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.costs.append(cost)
        return len(self.tokens) - 1

    def tree(self) -> Tree:
        return Tree(
            np.array(self.tokens, np.int32),
            np.array(self.parents, np.int32),
            np.array(self.depths, np.int32),
            0 - np.array(self.costs, np.float32),  # the root's is 0, not -0
        )
