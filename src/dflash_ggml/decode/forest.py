"""Trees of one or many sequences that one pass verifies: each has a block of columns, behind them is padding."""

from __future__ import annotations

from collections.abc import Sequence as Items
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from .sequence import Sequence
from .tree import Tree, verify_width


class Forest:
    """A tree for each sequence.

    Attributes:
        firsts: Column of each root.
        widths: Columns of each tree.
        used: Columns of all trees; width: of the pass.
        blocks: Each sequence with its tree and its columns.
    """

    __slots__ = ("_arrays", "blocks", "firsts", "sequences", "trees", "used", "width", "widths")

    def __init__(self, sequences: Items[Sequence], trees: Items[Tree]) -> None:
        self.sequences, self.trees = tuple(sequences), tuple(trees)
        self.widths = [tree.width for tree in trees]
        *self.firsts, self.used = accumulate(self.widths, initial=0)
        self.width = verify_width(self.used - 1)
        ends = [first + width for first, width in zip(self.firsts, self.widths)]
        self.blocks = list(zip(self.sequences, self.trees, map(slice, self.firsts, ends)))

        self._arrays: tuple[NDArray[np.int32], NDArray[np.int32]] | None = None

    @property
    def arrays(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Tokens and parents, int32 [used], tree behind tree; parents are counted from their root."""
        if self._arrays is None:
            if len(self.trees) == 1:
                self._arrays = self.trees[0].tokens, self.trees[0].parents
            else:
                self._arrays = (
                    np.concatenate([tree.tokens for tree in self.trees]),
                    np.concatenate([tree.parents for tree in self.trees]),
                )
        return self._arrays
