"""Attention of drafted blocks of one or many sequences: for each column, the ranges of rows that it sees.

The mask is computed on the device from the ranges. One that stays there, as for a lone tree (ResidentMask), would not help: the
columns belong to different sequences every time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..ggml.bindings import Tensor
from ..ggml.device import I32
from ..ggml.graph import Graph
from ..ggml.operations import MOST_SPANS
from .kv import under


def of_blocks(
    g: Graph, n_kv: Sequence[int], block: int, blocks: int, pieces: Sequence[int]
) -> list[Callable[..., Tensor]]:
    """Attention functions for each group of a context (see `under`), for so many blocks of columns; `fill` sets the inputs.

    Args:
        n_kv: Rows of each group.
        pieces: Ranges of a column in it.
    """
    n = block * blocks
    masks = [g.range_mask(g.input(f"mask{i}", I32, n, 2 * p), n_kv[i]) for i, p in enumerate(pieces)]
    if blocks > MOST_SPANS:
        return [under(mask) for mask in masks]
    seqs = g.input("seqs", I32, 3, blocks)
    spans = [g.input(f"spans{i}", I32, 2, blocks) for i in range(len(pieces))]

    def over(mask, span) -> Callable[..., Tensor]:
        return lambda g, q, keys, values, scale: g.attention(q, keys, values, mask, scale, seqs, span)

    return [over(mask, span) for mask, span in zip(masks, spans)]


def fill(graph: Graph, group: int, ranges: NDArray[np.int32]) -> None:
    """Set the ranges of rows that each column sees.

    Args:
        group: Number of the group of layers.
        ranges: int32 [pieces, 2, blocks, block], for each piece the first row that a column sees, and the one after the last.
    """
    _, _, blocks, block = ranges.shape
    graph.inputs[f"mask{group}"].array[:] = ranges.reshape(-1, blocks * block)
    if "seqs" not in graph.inputs:
        return
    seqs = graph.inputs["seqs"].array.reshape(blocks, 3)
    seqs[:, 0], seqs[:, 1], seqs[:, 2] = 0, np.arange(blocks) * block, block
    spans = graph.inputs[f"spans{group}"].array.reshape(blocks, 2)
    some = ranges[:, 0] < ranges[:, 1]
    spans[:, 0] = np.where(some, ranges[:, 0], np.iinfo(np.int32).max).min((0, 2))
    spans[:, 1] = np.where(some, ranges[:, 1], 0).max((0, 2))
