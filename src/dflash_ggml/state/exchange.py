"""What is moved on the device when texts change places: what it keeps of two lanes, or a text's cache rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..ggml.device import F32, I32, Device
from ..ggml.graph import Graph


@dataclass(frozen=True, slots=True)
class PerLane:
    """Float32 words of `tensor` that every lane has some of: lane i `shape`, with `strides` in bytes beyond the first dimension,
    from byte first + i * step on."""

    tensor: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    step: int
    first: int = 0

    def of(self, g: Graph, lane: int):
        """What a lane has, a view."""
        return g.view(self.tensor, self.shape, self.strides, offset=self.first + lane * self.step)


def exchange_graph(device: Device, parts: Iterable[PerLane], a: int, b: int) -> Graph:
    """Graph that lets two lanes have what the other one had, part by part, so that little lies elsewhere meanwhile."""
    parts = list(parts)
    g = Graph(device, 6 * len(parts) + 2)
    for part in parts:
        one, other = part.of(g, a), part.of(g, b)
        kept = g.expand(g.cont(one))
        g.expand(g.copy(other, one))
        g.expand(g.copy(kept, other))
    return g


def carry_graph(device: Device, caches: Iterable[Any], n: int) -> Graph:
    """Graph that copies n rows of each cache [row, n_rows], as words, so that none is rounded again: from the input `from`, int32
    [n], to `to`. All of a cache are read before the first is written, so that the two may overlap."""
    caches = list(caches)
    g = Graph(device, 4 * len(caches) + 2)
    source, target = g.input("from", I32, n), g.input("to", I32, n)
    for t in caches:
        words = g.rows_as(t, F32, t.nb[1] // 4)
        g.expand(g.set_rows(words, g.get_rows(words, source), target))
    return g
