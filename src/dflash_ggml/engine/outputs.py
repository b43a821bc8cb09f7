"""Outputs of the target's passes: chosen tokens, reduced logits, and full logits on demand."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..decode.reduced import ReducedRows, Watch
from ..decode.sampling import BLOCK
from ..ggml.device import Device
from ..ggml.graph import Graph
from ..models.target import Target
from ..state.state import TargetState


class PassOutputs:
    """Reads the outputs of a target's graphs; they are valid until the next pass runs."""

    device: Device
    target: Target
    state: TargetState

    def choices(self, graph: Graph) -> np.ndarray:
        """The target's best token after each column of a pass, int32."""
        return self.device.read(graph.outputs["choice"])

    def without_numbers(self, graph: Graph, choices: NDArray[np.int32], first: int = 0) -> list[int]:
        """Which of these choices, of the columns from `first` on, come from NaN logits: for those the CPU picks 0, a GPU -1."""
        if min(choices.tolist()) > 0:  # checked in every pass, and numpy is slow for so few
            return []
        return [i for i in np.flatnonzero(choices <= 0).tolist() if self.is_nan(graph, first + i)]

    def is_nan(self, graph: Graph, column: int = 0) -> bool:
        """Whether a column's logits are NaN: one NaN among the values that they are made from makes all of them so.

        Raises:
            DeviceError: They are NaN because one of two ranks did not answer the other.
        """
        offset = 4 * self.target.n_vocab * column
        is_nan = bool(np.isnan(self.device.read(graph.outputs["logits"], 1, offset=offset)[0]))
        if is_nan and self.state.mailboxes is not None:
            self.state.mailboxes.check()
        return is_nan

    def logits_row(self, graph: Graph, column: int = 0) -> np.ndarray:
        """One column of a pass's logits, float32 [n_vocab], a copy; read it before the next pass runs."""
        n = self.target.n_vocab
        return self.device.read(graph.outputs["logits"], n, offset=4 * n * column)

    def hidden_rows(self, graph: Graph) -> np.ndarray:
        """The hidden states of a linear pass with that output, float32 [tokens, n_embd]."""
        return self.device.read(graph.outputs["hidden"]).reshape(-1, self.target.n_embd)

    def reduced(self, graph: Graph, watch: Watch) -> ReducedRows:
        """The reduced logits of all columns of a pass run with `watch`, in one read."""
        return ReducedRows(self.reduced_rows(graph), watch, self.target.n_vocab)

    def reduced_rows(self, graph: Graph) -> np.ndarray:
        """The reduced logits as float32 [columns, values per column]."""
        output = graph.outputs["reduced"]
        return self.device.read(output).reshape(output.ne[1], output.ne[0])

    def logits_block(self, graph: Graph, column: int, block: int) -> np.ndarray:
        """Block `block` of a column's logits (blocks as in `Reduced.masses`), float32, a copy; read before the next pass runs."""
        n, first = self.target.n_vocab, BLOCK * block
        return self.device.read(
            graph.outputs["logits"], min(BLOCK, n - first), offset=4 * (n * column + first)
        )
