"""Attention window while decoding: a column sees only the first tokens of the sequence and the last ones.

The rows that a pass reads are gathered into separate tensors, so that no offset in a graph depends on the position
(docs/decisions/0008). A token sees as far back in a tree as when it is decoded alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..ggml.bindings import Tensor
from ..ggml.device import F16, I32
from ..ggml.graph import Graph
from .kv_type import KvType, row_bytes
from .mask import HIDDEN
from .memory import padded
from .spec import StateSpec

SINKS = 64  # first tokens that stay visible: attention sinks


class DecodeWindow:
    """The window of decode passes: the first `sinks` tokens of a sequence and the last `tokens`, each column's own included."""

    def __init__(self, tokens: int, sinks: int = SINKS) -> None:
        self.tokens, self.sinks = tokens, sinks

    def hides(self, end: int) -> bool:
        """Whether the window hides anything from the token before position `end`."""
        return end > self.tokens + self.sinks

    def _rows(self, columns: int) -> int:
        """Rows that a pass gathers, its own included."""
        return padded(self.sinks + self.tokens + columns, 256)

    def nbytes(self, columns: int, spec: StateSpec, kv_type: KvType) -> int:
        """Estimated scratch bytes of the rows that a pass of so many columns gathers for a layer, and of its mask."""
        widest = max((layer.row for layer in spec.kv), default=0)
        a_row = row_bytes(kv_type.k, widest) + row_bytes(kv_type.v, widest)
        return self._rows(columns) * (a_row + 2 * columns)

    def build(self, g: Graph, columns: int) -> tuple[Tensor, Tensor]:
        """Inputs of graph `g`, which `fill` provides: the rows int32 [n] that it gathers, and the mask over them, float16
        [n, columns]."""
        n = self._rows(columns)
        return g.input("window rows", I32, n), g.input("window mask", F16, n, columns)

    def fill(
        self, graph: Graph, first: int, start: int, depths: NDArray[np.int32], own: NDArray[np.bool_]
    ) -> None:
        """Set the inputs for columns from position `start` on of a sequence whose cache rows begin at `first`.

        Args:
            depths: int32 [columns], depth of each column below the first.
            own: bool [columns, columns], whether a column sees another.
        """
        columns = len(depths)
        rows, mask = graph.inputs["window rows"].array, graph.inputs["window mask"].array
        mask = mask.reshape(columns, -1)
        positions = np.arange(start + self.sinks + columns - len(rows), start)
        last = slice(self.sinks, len(rows) - columns)
        rows[: self.sinks] = np.arange(first, first + self.sinks)
        rows[last] = first + np.maximum(positions, 0)
        rows[last.stop :] = np.arange(first + start, first + start + columns)
        seen = (positions >= self.sinks) & (positions > start + depths[:, None] - self.tokens)
        mask[:, : self.sinks] = np.where(np.arange(self.sinks) < start, np.float16(0), HIDDEN)
        mask[:, last] = np.where(seen, np.float16(0), HIDDEN)
        near = (depths[:, None] - depths < self.tokens) | (start + depths < self.sinks)
        mask[:, last.stop :] = np.where(own & near, np.float16(0), HIDDEN)
