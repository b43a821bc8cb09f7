"""A drafted tree that was not verified: the plain steps behind it say what would have come of it.

A draft is a small part of a drafted step where the target is small too (CPU, demo pair: 1.5 of 7 ms, beside plain steps of 1.7).
So what promises too little is not verified, and yet tells as much as a step that was: the target's own tokens, drawn without it,
walk the tree one by one. Nothing of the text depends on it.
"""

from __future__ import annotations

from .accept import Accepted
from .sequence import Sequence
from .tree import Tree
from .widths import Cut


class Unverified:
    """tree: all of it that was grown; cut: what would have been verified of it; block: columns of its draft."""

    __slots__ = ("_path", "_start", "block", "cut", "tree")

    def __init__(self, tree: Tree, cut: Cut, block: int, start: int) -> None:
        """`start`: tokens committed before its root."""
        self.tree, self.cut, self.block = tree, cut, block
        self._start, self._path = start, [0]

    def follow(self, sequence: Sequence) -> Accepted | None:
        """What a walk would have given, once the text has left the tree; None before that."""
        parents, carries, path = self.tree.parents, self.tree.tokens, self._path
        while True:
            at = self._start + len(path)
            if at < sequence.n_tokens:
                token = sequence.tokens[at]
            elif at == sequence.n_tokens and sequence.pending is not None:
                token = sequence.pending
            else:
                return None
            below = ((parents == path[-1]) & (carries == token)).nonzero()[0]
            if not len(below):
                tokens = (*carries[path[1:]].tolist(), token)
                return Accepted(tuple(path), tokens)
            path.append(int(below[0]))

    def kept(self, accepted: Accepted) -> int:
        """Tokens that the step would have given."""
        return 1 + sum(0 < node <= self.cut.nodes for node in accepted.path)
