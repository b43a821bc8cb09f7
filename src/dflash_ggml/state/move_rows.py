"""Moves of a sequence's cache rows on the device."""

from __future__ import annotations

from collections.abc import Iterable

from ..ggml.bindings import Tensor
from ..ggml.device import F32, I32, Device
from ..ggml.graph import Graph


def move_graph(device: Device, caches: Iterable[Tensor], n: int) -> Graph:
    """Graph that copies n rows of each cache [row, n_rows] from the input `from`, int32 [n], to `to`.

    Rows are copied as raw words, without rounding. All rows of a cache are read before the first is written, so the ranges may
    overlap.
    """
    caches = list(caches)
    g = Graph(device, 4 * len(caches) + 2)
    source, target = g.input("from", I32, n), g.input("to", I32, n)
    for t in caches:
        words = g.rows_as(t, F32, t.nb[1] // 4)
        g.expand(g.set_rows(words, g.get_rows(words, source), target))
    return g
