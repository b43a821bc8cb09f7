"""Matrix products and dense feed-forward layers. D = embedding length, n = columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..ggml.bindings import Tensor
from ..ggml.graph import Graph


def matmul(g: Graph, w: Mapping[str, Tensor], name: str, y: Tensor) -> Tensor:
    """The matrix `name` times y [D, n], times its `.scale` [1] and plus its `.bias` [rows], if present: [rows, n]."""
    return matmuls(g, w, (name,), y)[0]


def matmuls(g: Graph, w: Mapping[str, Tensor], names: Sequence[str], y: Tensor) -> list[Tensor]:
    """`matmul` for several matrices of one input.

    They are adjacent in the graph, so that the GPU converts the input once, and fuses scales that follow.
    """
    found = {name: g.mul_mat(w[f"{name}.weight"], y) for name in names}
    scaled = [name for name in names if f"{name}.scale" in w]
    for name in scaled:
        g.expand(found[name])
    for name in scaled:
        found[name] = g.expand(g.mul(found[name], w[f"{name}.scale"]))
    return [g.add(x, w[f"{name}.bias"]) if f"{name}.bias" in w else x for name, x in found.items()]


def gated_layer(
    g: Graph, w: Mapping[str, Tensor], name: str, y: Tensor, end: str = "", gelu: bool = False
) -> Tensor:
    """The feed-forward layer down(act(gate y) * up y), of matrices with names ending in `end`; y [D, n] -> [D, n].

    Args:
        gelu: Whether the activation is GELU, not SiLU.
    """
    gate, up = matmuls(g, w, (f"{name}ffn_gate{end}", f"{name}ffn_up{end}"), y)
    return matmul(g, w, f"{name}ffn_down{end}", (g.geglu if gelu else g.swiglu)(gate, up))


@dataclass(frozen=True, slots=True)
class Dense:
    """A dense feed-forward layer of width `n_ff`.

    Attributes:
        gelu: Whether the activation is GELU, not SiLU.
    """

    n_embd: int
    n_ff: int
    gelu: bool = False

    def tensors(self, joined: bool = False) -> dict[str, tuple[int, ...]]:
        """Name within the block -> shape of every tensor; `joined` is for experts."""
        d, f = self.n_embd, self.n_ff
        return {"ffn_gate.weight": (d, f), "ffn_up.weight": (d, f), "ffn_down.weight": (f, d)}

    def build(self, g: Graph, w: Mapping[str, Tensor], name: str, y: Tensor) -> Tensor:
        """Build the layer of the tensors with prefix `name`; y [D, n] -> [D, n]."""
        return gated_layer(g, w, name, y, gelu=self.gelu)

    @property
    def per_column(self) -> int:
        """Estimated scratch memory of a column, in numbers."""
        return 3 * self.n_ff

    @property
    def nodes(self) -> int:
        """Upper bound of the layer's graph nodes."""
        return 8
