"""Feed-forward layers: one wide layer, or many experts of which a token uses a few."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ..ggml.bindings import Tensor
from ..ggml.graph import Graph


class FeedForward(Protocol):
    """A kind of feed-forward layer with its sizes. D = embedding length, n = columns."""

    def tensors(self, joined: bool = False) -> dict[str, tuple[int, ...]]:
        """Name within the block -> shape of every tensor.

        Args:
            joined: Gate and up are one matrix, where the kind allows that.
        """

    def build(self, g: Graph, w: Mapping[str, Tensor], name: str, y: Tensor) -> Tensor:
        """The layer behind tensors that begin with `name`; y [D, n] -> [D, n]."""

    @property
    def per_column(self) -> int:
        """About how many numbers of scratch memory a column takes."""

    @property
    def nodes(self) -> int:
        """At most how many nodes of a graph it takes."""


def scale_shape(shape: tuple[int, ...]) -> tuple[int]:
    """Shape of the `.scale` beside a matrix, or beside several, which have one each."""
    return (shape[2],) if len(shape) == 3 else (1,)
