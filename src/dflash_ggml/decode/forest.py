"""Trees of one or more sequences verified in one pass: each has a block of columns, followed by padding."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

from .sequence import Sequence
from .tree import Tree, verify_width


class Forest:
    """A tree for each sequence, their columns concatenated in one pass.

    Args:
        columns: Width of the pass; None: the smallest width that has a graph.

    Attributes:
        firsts: Column of each root.
        widths: Columns of each tree.
        used: Columns of all trees.
        width: Columns of the pass.
        blocks: Each sequence with its tree and its columns.
    """

    __slots__ = ("_arrays", "blocks", "firsts", "sequences", "trees", "used", "width", "widths")

    def __init__(self, sequences: Items[Sequence], trees: Items[Tree], columns: int | None = None) -> None:
        self.sequences, self.trees = tuple(sequences), tuple(trees)
        self.used = 0
        self.widths: list[int] = []  # list[int]() takes longer than all of this with one tree
        self.firsts: list[int] = []
        self.blocks: list[tuple[Sequence, Tree, slice]] = []
        for sequence, tree in zip(self.sequences, self.trees):
            first, width = self.used, tree.width
            self.used += width
            self.widths.append(width)
            self.firsts.append(first)
            self.blocks.append((sequence, tree, slice(first, self.used)))
        self.width = verify_width(self.used - 1) if columns is None else columns
        self._arrays: tuple[NDArray[np.int32], NDArray[np.int32]] | None = None

    @property
    def arrays(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Tokens and parents, int32 [used], of the concatenated trees; parents are counted from their root."""
        if self._arrays is None:
            if len(self.trees) == 1:
                self._arrays = self.trees[0].tokens, self.trees[0].parents
            else:
                self._arrays = (
                    np.concatenate([tree.tokens for tree in self.trees]),
                    np.concatenate([tree.parents for tree in self.trees]),
                )
        return self._arrays
