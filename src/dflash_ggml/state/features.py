"""Features of the target's tapped layers, kept per column until the draft takes them in.

A column holds the features of one token, [taps * D]: a tree's node has the column of its index, a plain step uses one that no
unseen token occupies.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from typing import Any

from ..ggml.bindings import Tensor
from ..ggml.device import F32, Device
from ..ggml.graph import Graph
from ..ggml.store import Store


class Features:
    """Memory for the features of `width` tokens, `row` float32 each; empty without a draft that needs them."""

    def __init__(self, device: Device, row: int, width: int) -> None:
        self.device, self.width = device, width if row else 0
        self._store = Store(device, 1)
        self.tensor: Any = None
        if self.width:
            self.tensor = self._store.tensor(F32, row, width, name="features")
            self._store.allocate()

    def columns(self, g: Graph, x: Tensor, tap: int, n: int) -> Tensor:
        """View [D, n] of tap number `tap` in the first n columns."""
        d = x.ne[0]
        return g.view(self.tensor, (d, n), (self.tensor.nb[1],), offset=tap * d * 4)

    def put(self, g: Graph, x: Tensor, tap: int, column: Tensor) -> Tensor:
        """Write the rows x [D, n] of tap number `tap` to the columns that the int32 tensor `column` [n] names."""
        d = x.ne[0]
        home = g.view(self.tensor, (d, self.width), (self.tensor.nb[1],), offset=tap * d * 4)
        return g.expand(g.set_rows(home, x, column))

    def free(self, taken: Collection[int], n: int) -> list[int]:
        """n columns that are not in `taken`, or as many as there are."""
        first = len(taken)  # columns are used cyclically
        if n == 1 and first < self.width and first not in taken:
            return [first]
        return list(islice((column for column in range(self.width) if column not in taken), n))

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._store.nbytes

    def close(self) -> None:
        """Free the memory."""
        self._store.close()
