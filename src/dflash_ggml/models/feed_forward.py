"""The contract of feed-forward layers: dense, or a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ..ggml.bindings import Tensor
from ..ggml.graph import Graph


class FeedForward(Protocol):
    """A feed-forward layer's kind and sizes. D = embedding length, n = columns."""

    def tensors(self, joined: bool = False) -> dict[str, tuple[int, ...]]:
        """Name within the block -> shape of every tensor.

        Args:
            joined: Whether gate and up are one matrix, if the kind supports that.
        """

    def build(self, g: Graph, w: Mapping[str, Tensor], name: str, y: Tensor) -> Tensor:
        """Build the layer of the tensors with prefix `name`; y [D, n] -> [D, n]."""

    @property
    def per_column(self) -> int:
        """Estimated scratch memory of a column, in numbers."""

    @property
    def nodes(self) -> int:
        """Upper bound of the layer's graph nodes."""


def scale_shape(shape: tuple[int, ...]) -> tuple[int]:
    """Shape of the `.scale` of a matrix, or of stacked matrices (one each)."""
    return (shape[2],) if len(shape) == 3 else (1,)
