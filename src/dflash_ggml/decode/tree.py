"""Draft trees: DDTree's best-first expansion, chains, and the ancestors that each node attends to.

Best-first expansion follows DDTree (arXiv 2604.12989): a draft block gives one distribution per depth, all
conditioned on the same context, so the probability of a path is the product of its tokens' probabilities. It
never rises with depth, hence the `budget` most probable paths are closed under prefixes and form a tree,
found with one heap.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .candidates import Candidates
from .lookup import Evidence, Merged
from .native import NONE, doubles, ffi, floats, ints, lib, octets

BEST_FIRST: int = lib.BEST_FIRST
CHAIN_SEED: int = lib.CHAIN_SEED
SPINE: int = lib.SPINE
DRAFT, LOOKUP = 1, 2  # bits of `Tree.sources`
_FLOATS = ffi.typeof("float *")
_INITIAL_NODES = 4096  # arrays of a tree are for as many at first, and enlarged as needed


@dataclass(slots=True)  # frozen ones take three times as long to make, and every step makes some
class Tree:
    """A draft tree; index 0 is the root (the pending token), and every parent precedes its children.

    Attributes:
        tokens, parents, depths: int32 [width]; parents[0] = -1 and depths[0] = 0.
        log_probs: float32 [width], log-probability of the path from the root under the draft, 0 at the root.
        sources: uint8 [width], which sources proposed each node, bits DRAFT and LOOKUP, 0 at the root; None: one source
            made all of it.
        evidence: What the probabilities of a merged tree rest on.
        native: Pointers to parents, depths and log_probs, for a tree that C has grown.
    """

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    depths: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    sources: NDArray[np.uint8] | None = None
    evidence: Evidence | None = None
    native: tuple[Any, Any, Any] | None = field(default=None, init=False, compare=False, repr=False)

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
        return _with_native(Tree(*parts, sources, self.evidence), self.native)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle without `native`, whose pointers are to this tree's arrays."""
        return Tree, (self.tokens, self.parents, self.depths, self.log_probs, self.sources, self.evidence)

    def arrays(self) -> tuple[Any, Any, Any]:
        """Parents, depths and log_probs for C.

        Raises:
            ValueError: They are not of one length.
        """
        if self.native is not None:
            return self.native
        n = self.width
        if not n == len(self.parents) == len(self.depths) == len(self.log_probs):
            raise ValueError(f"parents, depths and log_probs must all be of {n} nodes")
        return ints(self.parents), ints(self.depths), floats(self.log_probs)


def _with_native(tree: Tree, native: tuple[Any, Any, Any] | None) -> Tree:
    tree.native = native
    return tree


_ROOT = np.array([-1], np.int32), np.zeros(1, np.int32), np.zeros(1, np.float32)
_ROOT_NATIVE = ints(_ROOT[0]), ints(_ROOT[1]), floats(_ROOT[2])
for _part in _ROOT:
    _part.flags.writeable = False  # all such trees have these


def root_only(token: int) -> Tree:
    """The tree of the pending token alone."""
    return _with_native(Tree(np.array([token], np.int32), *_ROOT), _ROOT_NATIVE)


def verify_width(nodes: int) -> int:
    """Columns of a verify pass over `nodes` nodes and the root: exact up to 8, then multiples of 8 (kernel tiles)."""
    width = nodes + 1
    return width if width <= 8 else -(-width // 8) * 8


def expand(root: int, candidates: Candidates | Merged, budget: int, chain_seed: bool = False) -> Tree:
    """The `budget` most probable paths that `candidates` offers, in falling order of probability.

    Ties go to the smaller depth, then to the parent that was added first, then to the smaller rank. The tree has fewer
    nodes only if the candidates run out; paths of probability 0 are never added.

    Args:
        root: The pending token.
        candidates: What a draft, prompt lookup or both propose.
        budget: The most nodes beside the root.
        chain_seed: The spine (rank 0 of depths 1 to min(L, budget)) becomes nodes 1, 2, ...; then the rank-1 siblings
            of all spine nodes are queued, and expansion goes on best-first from there. Only the spine may be out of order.

    Raises:
        ValueError: budget < 0.
    """
    return grow(root, candidates, budget, CHAIN_SEED if chain_seed else BEST_FIRST)


def grow(root: int, candidates: Candidates | Merged, budget: int, order: int) -> Tree:
    """`expand` and `spine`, in C.

    Args:
        root: The pending token.
        candidates: Those of a draft, or merged with those of prompt lookup.
        budget: The most nodes beside the root.
        order: BEST_FIRST, CHAIN_SEED or SPINE.

    Raises:
        ValueError: budget < 0.
    """
    if budget < 0:
        raise ValueError(f"budget must not be negative, got {budget}")
    # a tree of a smaller budget is the beginning of one of a larger, so arrays can grow with the tree
    room = min(budget, _INITIAL_NODES)
    while (tree := _grown(root, candidates, room, order)).n_nodes == room < budget:
        room = min(budget, 4 * room)
    return tree


def _grown(root: int, candidates: Candidates | Merged, budget: int, order: int) -> Tree:
    """`grow` with arrays for the whole budget."""
    merged = candidates if isinstance(candidates, Merged) else None
    draft = candidates if not isinstance(candidates, Merged) else candidates.draft
    block = np.empty((4 if merged is None else 5, budget + 1), np.int32)
    rests, sources = NONE, NONE
    if merged is not None:
        evidence = Evidence(block[4], np.empty(budget + 1), merged.rates.trust)
        bits = np.empty(budget + 1, np.uint8)
        rests, sources = doubles(evidence.rests), octets(bits)
    memory, width = ints(block), budget + 1
    into = root, budget, memory, rests, sources
    lookup = (NONE, NONE) if merged is None else (merged.lookup.native, merged.rates.native)
    n = lib.tree_grow(*into, NONE if draft is None else draft.native, *lookup, order)
    if n < 0:
        raise MemoryError(f"no memory for a tree of {budget} nodes")
    tokens, parents, depths, log_probs = block[:4, :n]
    found = (None, None) if merged is None else (bits[:n], evidence)
    tree = Tree(tokens, parents, depths, log_probs.view(np.float32), *found)
    # the array keeps its memory, and the tree the array
    return _with_native(tree, (memory + width, memory + 2 * width, ffi.cast(_FLOATS, memory + 3 * width)))


def spine(root: int, candidates: Candidates | Merged, length: int) -> Tree:
    """The chain of best candidates, at most `length` long.

    Raises:
        ValueError: length < 0.
    """
    return grow(root, candidates, length, SPINE)


def observers(tree: Tree | ArrayLike, width: int | None = None) -> NDArray[np.uint8]:
    """Which nodes attend to each node, as bits: bit i of row j, lowest first, says that j is node i or an ancestor of it.

    Takes a Tree or parents with -1 for roots; uint8 [width, width / 8 rounded up]. Nodes up to `width` that the tree
    does not have attend to themselves only.

    Raises:
        ValueError: A parent does not precede its child.
    """
    parents = tree.arrays()[0] if isinstance(tree, Tree) else ints(tree)
    n = tree.width if isinstance(tree, Tree) else len(parents)
    width = width or n
    if width < n:
        raise ValueError(f"{n} nodes do not fit a width of {width}")
    bits = np.zeros((width, (width + 7) // 8), np.uint8)
    node = lib.tree_observers(n, parents, width, octets(bits))
    if node >= 0:
        raise ValueError(
            f"parents[{node}] = {parents[node]}: a parent must come before its child (-1 = none)"
        )
    return bits
