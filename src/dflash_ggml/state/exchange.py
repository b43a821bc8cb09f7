"""Two texts that change lanes: what the device keeps of each lane, and the graph that swaps it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..ggml.device import Device
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
