"""The acceptance walk: the nodes of a verified tree that match the target's own tokens.

Every emitted token is the target's own choice at a visited node; the tree only decides how many choices one
verify pass can serve. The draft's probabilities play no part, so the target's distribution is kept exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .tree import Tree


@dataclass(slots=True)
class Accepted:
    """The outcome of a walk: the visited path and the tokens that it emits.

    `tokens` has those of path[1:] and one more, the bonus token: emitted now, root of the next tree.

    Attributes:
        path: Visited nodes, root first: exactly what is committed.
        tokens: What is emitted, in order.
        stopped: The bonus is a token at which `stop` ended the walk.
        last: The drafted node of such a bonus, if there is one.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]
    stopped: bool = False
    last: int | None = None

    @property
    def kept(self) -> tuple[int, ...]:
        """Nodes whose tokens are kept, the root first."""
        return self.path if self.last is None else (*self.path, self.last)

    @property
    def n_accepted(self) -> int:
        """Draft tokens among the emitted ones."""
        return len(self.kept) - 1


def walk(tree: Tree, choose: Callable[[int], int], stop: Callable[[int], bool] | None = None) -> Accepted:
    """Follow the target's choices from the root until no child carries the chosen token.

    choose(node) returns the target's token after that node; it is called once per visited node, in
    order, and never for a node off the path. stop(token) is called once per emitted token, in order;
    True ends the walk with that token as the bonus, even if a child carries it. Of children with equal tokens
    the first is taken.
    """
    node, token, last = 0, int(choose(0)), None
    path, tokens, stopped = [node], [token], stop is not None and stop(token)
    # children come after their parent: one scan over the nodes meets the whole path
    for child, (parent, carried) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)):
        if parent == node and carried == token:
            if stopped:
                last = child
                break
            node, token = child, int(choose(child))
            path.append(node)
            tokens.append(token)
            stopped = stop is not None and stop(token)
    return Accepted(tuple(path), tuple(tokens), bool(stopped), last)


def greedy(tree: Tree, argmax: NDArray[np.int32], stop: Callable[[int], bool] | None = None) -> Accepted:
    """The walk at temperature 0.

    Args:
        tree: The drafted tree.
        argmax: int32 [>= width], the target's best token after each node.
        stop: Ends the walk at a token.

    Raises:
        ValueError: argmax is shorter than the tree is wide.
    """
    if len(argmax) < tree.width:
        raise ValueError(f"argmax has {len(argmax)} entries for a tree of width {tree.width}")
    return followed(tree.parents.tolist(), tree.tokens.tolist(), argmax.tolist(), stop)


def followed(
    parents: list[int], carries: list[int], choices: list[int], stop: Callable[[int], bool] | None = None
) -> Accepted:
    """`greedy` on lists: the parent of each node, its token, and the target's best token after it."""
    # as `walk`, without a call per node: the target's choices do not depend on what has been emitted
    node, token = 0, choices[0]
    path, tokens = [0], [token]
    for child, (parent, carried) in enumerate(zip(parents, carries, strict=True)):
        if parent == node and carried == token:
            node, token = child, choices[child]
            path.append(node)
            tokens.append(token)
    if stop is not None:
        for n, token in enumerate(tokens, start=1):
            if stop(token):
                return Accepted(tuple(path[:n]), tuple(tokens[:n]), True, path[n] if n < len(path) else None)
    return Accepted(tuple(path), tuple(tokens))
