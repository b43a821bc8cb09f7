"""Draft trees: DDTree's best-first expansion, chains, and who attends to whom.

Best-first expansion follows DDTree (arXiv 2604.12989): a draft block gives one distribution per depth, all
conditioned on the same context, so the probability of a path is the product of its tokens' probabilities. It
never rises with depth, hence the `budget` most probable paths are closed under prefixes and form a tree,
found with one heap.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .candidates import Candidates, Children, Rows
from .copied import Evidence
from .native import ffi, lib


@dataclass(frozen=True, slots=True)
class Tree:
    """A draft tree; index 0 is the root (the pending token), and every parent precedes its children.

    tokens, parents, depths: int32 [width]; parents[0] = -1 and depths[0] = 0.
    log_probs: float32 [width], log-probability of the path from the root under the draft, 0 at the root.
    sources: uint8 [width], which sources offered each node, bits of `merged`, 0 at the root; None: one source made all of it.
    evidence: what the probabilities of a merged tree rest on.
    """

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    depths: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    sources: NDArray[np.uint8] | None = None
    evidence: Evidence | None = None

    @property
    def width(self) -> int:
        """Columns of the verify pass: all nodes and the root."""
        return len(self.tokens)

    @property
    def n_nodes(self) -> int:
        """Drafted nodes, without the root."""
        return len(self.tokens) - 1

    def first(self, nodes: int) -> Tree:
        """The tree of the root and the first `nodes` drafted nodes; every parent is among them."""
        end = nodes + 1
        if end >= self.width:
            return self
        sources = None if self.sources is None else self.sources[:end]
        parts = self.tokens[:end], self.parents[:end], self.depths[:end], self.log_probs[:end]
        return Tree(*parts, sources, self.evidence)


def verify_width(nodes: int) -> int:
    """Columns of a verify pass over `nodes` nodes and the root: exact up to 8, then multiples of 8 (kernel tiles)."""
    width = nodes + 1
    return width if width <= 8 else -(-width // 8) * 8


def expand(
    root: int,
    candidates: Candidates,
    budget: int,
    chain_seed: bool = False,
    least: float = -np.inf,
) -> Tree:
    """The `budget` most probable paths that `candidates` offers, in falling order of probability.

    Ties go to the smaller depth, then to the parent that was added first, then to the smaller rank. The tree has fewer nodes
    only if the candidates run out, or what they offer is less likely than `least`, a log-probability; paths of probability 0
    are never added. chain_seed: see `best_first`. Raises ValueError if budget < 0.
    """
    if isinstance(candidates, Rows) and candidates.pairs is None:
        return _expand_rows(root, candidates, budget, chain_seed, -least)
    _check_budget(budget)
    nodes = _Nodes(root)
    # One entry per node that may come next: (cost = -log-probability of its path, depth, parent, rank, the parent's children).
    heap: list[tuple[float, int, int, int, Children]] = []

    def queue(parent: int, rank: int, children: Children) -> None:
        if rank < len(children[0]) and children[1][rank] > -np.inf:
            cost = nodes.costs[parent] - children[1][rank]
            heappush(heap, (cost, nodes.depths[parent] + 1, parent, rank, children))

    cursor = candidates.root
    while chain_seed and len(nodes.tokens) <= budget:
        children = candidates.expand(cursor)
        if not len(children[0]) or children[1][0] == -np.inf:
            break
        parent = len(nodes.tokens) - 1
        nodes.add(children[0][0], parent, nodes.costs[parent] - children[1][0])
        queue(parent, 1, children)
        cursor = children[2][0]
    if len(nodes.tokens) <= budget:
        queue(len(nodes.tokens) - 1, 0, candidates.expand(cursor))
    while heap and len(nodes.tokens) <= budget:
        cost, _, parent, rank, children = heappop(heap)
        if cost > -least:
            break
        node = nodes.add(children[0][rank], parent, cost)
        queue(parent, rank + 1, children)
        queue(node, 0, candidates.expand(children[2][rank]))
    return nodes.tree()


def best_first(
    root: int, ids: NDArray[np.int32], log_probs: NDArray[np.float32], budget: int, chain_seed: bool = False
) -> Tree:
    """`expand` for a block of rows, the draft's product distribution.

    ids, log_probs: [L, K], the K candidates of each of L depths, log_probs falling along each row.

    chain_seed: the spine (rank 0 of depths 1 to min(L, budget)) becomes nodes 1, 2, ...; then the rank-1
    siblings of all spine nodes are queued, and expansion goes on best-first from there. Only the spine may be
    out of order.

    Raises ValueError if shapes differ, rows do not fall, or values are NaN or no log-probabilities; or if
    budget < 0.
    """
    return _expand_rows(root, Rows(ids, log_probs), budget, chain_seed)


def _expand_rows(root: int, rows: Rows, budget: int, chain_seed: bool, most_cost: float = np.inf) -> Tree:
    """`expand` over plain rows, in C."""
    _check_budget(budget)
    ids, scores = (
        np.ascontiguousarray(a, t) for a, t in ((rows.ids, np.int32), (rows.log_probs, np.float32))
    )
    ints, floats = np.empty((3, budget + 1), np.int32), np.empty(budget + 1, np.float32)
    n_depths, n_ranks = ids.shape
    n = lib.tree_of_rows(
        root,
        ffi.from_buffer("int32_t[]", ids),
        ffi.from_buffer("float[]", scores),
        n_depths,
        n_ranks,
        budget,
        chain_seed,
        most_cost,
        *[ffi.from_buffer("int32_t[]", row) for row in ints],
        ffi.from_buffer("float[]", floats),
    )
    if n < 0:
        raise MemoryError(f"a tree of {budget} nodes")
    tokens, parents, depths = ints[:, :n]
    return Tree(tokens, parents, depths, floats[:n])


def chain(root: int, ids: ArrayLike, log_probs: ArrayLike | None = None, length: int | None = None) -> Tree:
    """The path of the best candidate of each depth: what classic speculative decoding verifies.

    ids, log_probs: [L] or [L, K] (rank 0 is taken); without log_probs every path log-probability is 0.
    length: at most so many nodes. Raises ValueError if the shapes differ or length < 0.
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
    # Summed in float64 like best_first's costs, so that a chain equals a tree of one candidate to the bit.
    paths = np.concatenate(([0.0], np.cumsum(scores, dtype=np.float64))).astype(np.float32)
    return Tree(np.concatenate((np.array([root], np.int32), ids)), depths - 1, depths, paths)


def spine(root: int, candidates: Candidates, length: int) -> Tree:
    """The chain of best candidates, at most `length` long."""
    if isinstance(candidates, Rows) and candidates.pairs is None:
        return chain(root, candidates.ids, candidates.log_probs, length)
    nodes, cursor = _Nodes(root), candidates.root
    while len(nodes.tokens) <= length:
        tokens, log_probs, cursors = candidates.expand(cursor)
        if not len(tokens):
            break
        nodes.add(tokens[0], len(nodes.tokens) - 1, nodes.costs[-1] - log_probs[0])
        cursor = cursors[0]
    return nodes.tree()


def observers(tree: Tree | ArrayLike, width: int | None = None) -> NDArray[np.uint8]:
    """Which nodes attend to each node, as bits: bit i of row j, lowest first, says that j is node i or an ancestor of it.

    Takes a Tree or parents with -1 for roots; uint8 [width, width / 8 rounded up]. Nodes up to `width` that the tree does
    not have attend to themselves only. Raises ValueError if a parent does not precede its child.
    """
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


def _check_budget(budget: int) -> None:
    if budget < 0:
        raise ValueError(f"budget must not be negative, got {budget}")
