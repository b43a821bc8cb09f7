"""Trees of several sequences that one pass verifies, side by side: each has a block of columns, behind them is padding."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from .sequence import Sequence
from .tree import Tree, verify_width

Block = tuple[Sequence, Tree, slice]


@dataclass(frozen=True, slots=True)
class Forest:
    """A tree for each sequence. firsts: the column of each root; widths: columns of each. width: columns of the pass.

    tokens, parents: int32 [sum of widths], tree behind tree; parents are counted from their root. blocks: each sequence with its
    tree and its columns.
    """

    sequences: tuple[Sequence, ...]
    trees: tuple[Tree, ...]
    firsts: tuple[int, ...]
    widths: tuple[int, ...]
    width: int
    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    blocks: tuple[Block, ...]

    @classmethod
    def of(cls, sequences: Items[Sequence], trees: Items[Tree]) -> Forest:
        """The trees in this order."""
        widths = [tree.width for tree in trees]
        *firsts, total = accumulate(widths, initial=0)
        columns = map(slice, firsts, [first + width for first, width in zip(firsts, widths)])
        return cls(
            tuple(sequences),
            tuple(trees),
            tuple(firsts),
            tuple(widths),
            verify_width(total - 1),
            np.concatenate([tree.tokens for tree in trees]),
            np.concatenate([tree.parents for tree in trees]),
            tuple(zip(sequences, trees, columns)),
        )

    @property
    def used(self) -> int:
        """Columns that are a tree's."""
        return len(self.tokens)
