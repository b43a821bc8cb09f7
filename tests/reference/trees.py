"""Draft trees grown in Python: what the C of the decode room is held against, bit for bit."""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from dflash_ggml.decode.tree import Tree


def grown_of_rows(
    root: int,
    token_rows: list[list[int]],
    score_rows: list[list[float]],
    budget: int,
    chain_seed: bool,
    most_cost: float = np.inf,
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
        if cost > most_cost or cost == np.inf:
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
