"""Attention masks of passes whose columns belong to several sequences: for each column, the ranges of rows that it sees.

A mask that stays on the device, as SlotMask is, gains nothing here: columns belong to other sequences every time, and so all of
it changes. It is written there from the ranges.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..ggml.device import I32
from ..ggml.graph import Graph


def build(g: Graph, name: str, n_kv: int, columns: int, pieces: int):
    """The mask float16 [n_kv, columns] as part of graph `g`; `fill` provides its input. pieces: ranges of a column."""
    return g.range_mask(g.input(name, I32, columns, 2 * pieces), n_kv)


def fill(graph: Graph, name: str, ranges: NDArray[np.int32]) -> None:
    """ranges: int32 [pieces, 2, columns], the rows from and to before which each column sees, of each of its ranges."""
    graph.inputs[name].array[:] = ranges.reshape(-1, ranges.shape[2])
