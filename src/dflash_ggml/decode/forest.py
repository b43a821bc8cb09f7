"""Trees of several sequences that one pass verifies, side by side: each has a block of columns, behind them is padding."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

from .sequence import Sequence
from .tree import Tree, verify_width


@dataclass(frozen=True, slots=True)
class Forest:
    """A tree for each sequence. firsts: the column of each root. width: columns of the pass."""

    sequences: tuple[Sequence, ...]
    trees: tuple[Tree, ...]
    firsts: tuple[int, ...]
    width: int

    @classmethod
    def of(cls, sequences: Items[Sequence], trees: Items[Tree]) -> Forest:
        """The trees in this order."""
        firsts, total = [], 0
        for tree in trees:
            firsts.append(total)
            total += tree.width
        return cls(tuple(sequences), tuple(trees), tuple(firsts), verify_width(total - 1))

    def blocks(self) -> Iterator[tuple[Sequence, Tree, slice]]:
        """Each sequence with its tree and its columns."""
        for sequence, tree, first in zip(self.sequences, self.trees, self.firsts):
            yield sequence, tree, slice(first, first + tree.width)
