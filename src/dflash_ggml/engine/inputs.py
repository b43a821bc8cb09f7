"""Graph inputs shared by the target's passes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ..decode.reduced import WATCHED, Watch
from ..decode.sequence import Sequence
from ..decode.tree import Tree, observers
from ..ggml.graph import Graph


def fill_span(graph: Graph, sequence: Sequence, columns: int, name: str = "") -> None:
    """Set the span of rows that a pass of one sequence sees, if its graph has that input.

    Args:
        name: What the inputs' names begin with.
    """
    if f"{name}span" in graph.inputs:
        graph.inputs[f"{name}span"].array[:] = sequence.first_row, sequence.rows(columns).stop
        graph.inputs[f"{name}spanned"].array[:] = 0, 0, columns


def own_columns(tree: Tree, width: int) -> NDArray[np.bool_]:
    """Visibility among a tree's columns, bool [width, width]; padding columns see themselves."""
    return unpacked(observers(tree, width), width)


def unpacked(seen_by: NDArray[np.uint8], width: int) -> NDArray[np.bool_]:
    """Visibility from bits (observers of each column, [width, width / 8]) as a matrix [width, width]: what each column sees."""
    return np.unpackbits(seen_by, axis=1, bitorder="little")[:, :width].T.astype(bool)


def fill_watches(graph: Graph, watches: Iterable[tuple[slice, Watch | None]]) -> None:
    """The inputs of a reduction, by columns; unused entries name token 0."""
    temperatures = graph.inputs["temperature"].array.reshape(-1)
    ids = graph.inputs["watch"].array.reshape(-1, WATCHED)
    temperatures[:], ids[:] = 1.0, 0
    for columns, watch in watches:
        if watch is not None:
            temperatures[columns] = max(watch.temperature, 1e-30)
            ids[columns, : len(watch.ids)] = watch.ids
