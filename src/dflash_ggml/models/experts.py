"""Mixture of experts: a feed-forward layer of which a router picks a few experts per token, with an optional shared expert.

Shapes in ggml's order; D = embedding length, E = experts, k = experts per token, F = width of an expert, n = columns. Nodes are
in the order that ggml's CUDA backend fuses: router to weights, gate with up, weights with sum.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..files.gguf import GGUFFile
from ..ggml.bindings import Tensor
from ..ggml.graph import Graph
from .feed_forward import Dense, gated_layer, matmul

Scoring = Literal["softmax", "sigmoid", "chosen"]

# columns from which host matrices are copied to the device, instead of sending columns to the host
COPY_COLUMNS = 128

_LEAST_SUM = 2.0**-14  # least sum of a token's weights, the divisor
_LARGEST = 3e38
_ALPHA = 1.702  # factor of the clamped SwiGLU
_EXPERTS = re.compile(r"blk\.(\d{1,6})\.ffn_(?:gate|up|down|gate_up)_exps\.(?:weight|scale|bias)")


@dataclass(frozen=True, slots=True)
class Experts:
    """Sizes of a layer's experts and rules of its router.

    Scores are the softmax over all experts, the sigmoid of each, or the softmax over the chosen ones.

    Attributes:
        n_ff_shared: Width of the shared expert, 0 without one.
        gated_shared: Whether the shared expert has a sigmoid gate.
        biased: Whether a bias per expert is added to the scores for choosing (not for weighting).
        normalised: Whether the chosen experts' weights sum to one.
        scale: Factor of the weights after that.
        limit: Bound of a clamped SwiGLU's inputs, 0 for a plain one.
        gelu: Whether the activation is GELU, not SiLU.
        factor: Of the logits, before a softmax over all experts.
    """

    n_embd: int
    n_experts: int
    n_used: int
    n_ff: int
    n_ff_shared: int = 0
    gated_shared: bool = True
    scoring: Scoring = "softmax"
    biased: bool = False
    normalised: bool = True
    scale: float = 1.0
    limit: float = 0.0
    gelu: bool = False
    factor: float = 1.0

    def tensors(self, joined: bool = False) -> dict[str, tuple[int, ...]]:
        """Name within the block -> shape of every tensor.

        Args:
            joined: Whether gate and up of an expert are one matrix, gate rows first.
        """
        d, e, f, s = self.n_embd, self.n_experts, self.n_ff, self.n_ff_shared
        shapes: dict[str, tuple[int, ...]] = {"ffn_gate_inp.weight": (d, e)}
        if self.biased:
            shapes["exp_probs_b.bias"] = (e,)
        if joined:
            shapes["ffn_gate_up_exps.weight"] = (d, 2 * f, e)
        else:
            shapes |= {"ffn_gate_exps.weight": (d, f, e), "ffn_up_exps.weight": (d, f, e)}
        shapes["ffn_down_exps.weight"] = (f, d, e)
        if s:
            shapes |= {
                "ffn_gate_shexp.weight": (d, s),
                "ffn_up_shexp.weight": (d, s),
                "ffn_down_shexp.weight": (s, d),
            }
            if self.gated_shared:
                shapes["ffn_gate_inp_shexp.weight"] = (d,)
        return shapes

    def build(self, g: Graph, w: Mapping[str, Tensor], name: str, y: Tensor) -> Tensor:
        """See Dense."""
        return mixture(g, w, name, y, self)

    @property
    def per_column(self) -> int:
        """Estimated scratch memory of a column, in numbers."""
        # gate, up and their product, or the product and the output
        routed = self.n_used * max(3 * self.n_ff, self.n_ff + self.n_embd)
        if self.limit:  # those with a limit have biases
            routed += self.n_used * max(2 * self.n_ff, self.n_embd)
        return routed + 2 * self.n_experts + 3 * self.n_ff_shared

    @property
    def nodes(self) -> int:
        """Upper bound of the layer's graph nodes."""
        return 48 + 2 * self.n_used


FeedForward = Dense | Experts


def joined_blocks(file: GGUFFile, n: int) -> frozenset[int]:
    """The first n blocks' numbers whose gate and up of an expert are one matrix in the file."""
    return frozenset(i for i in range(n) if f"blk.{i}.ffn_gate_up_exps.weight" in file.tensors)


def expert_block(name: str) -> int | None:
    """The block whose expert matrices a tensor holds; None for any other tensor."""
    match = _EXPERTS.fullmatch(name)
    return int(match[1]) if match else None


def mixture(
    g: Graph, w: Mapping[str, Tensor], name: str, y: Tensor, experts: Experts, routed: Tensor | None = None
) -> Tensor:
    """Build the layer of the tensors with prefix `name`; y [D, n] -> [D, n]. routed [D, n]: input of the router instead of y.

    A `.scale` [E] of the experts' matrices (NVFP4 files) scales their outputs; a `.bias` [rows, E] is added. Experts in host
    memory are computed there; for many columns a layer's matrices are copied to the device instead.
    """
    if routed is None:
        logits = matmul(g, w, f"{name}ffn_gate_inp", y)
    else:  # a router's `.scale` applies to its input
        y = g.expand(y)  # nothing may lie between router and experts
        logits = g.mul_mat(w[f"{name}ffn_gate_inp.weight"], routed)
    ids, weights = _route(g, w, name, logits, experts)
    shared, like = None, w[f"{name}ffn_gate_inp.weight"]
    if not g.is_on_host(w[f"{name}ffn_down_exps.weight"]):
        out = _outputs(g, w, f"{name}ffn_", y, experts, ids)
    elif y.ne[1] >= COPY_COLUMNS:
        out = _outputs(g, w, f"{name}ffn_", y, experts, ids, like)
    else:
        sent, sent_ids = g.to_host(y, ids)
        if experts.n_ff_shared:  # a GPU computes this while the host computes the experts
            shared = g.expand(_shared(g, w, name, y, experts))
        # weighted on the device: each small node on the host costs a barrier of all its threads
        out = g.to_device(_outputs(g, w, f"{name}ffn_", sent, experts, sent_ids), like)
    out = _weighted(g, out, weights)
    if not experts.n_ff_shared:
        return out
    return g.add(out, _shared(g, w, name, y, experts) if shared is None else shared)


def _shared(g: Graph, w: Mapping[str, Tensor], name: str, y, experts: Experts):
    """The shared expert: y [D, n] -> [D, n]."""
    out = gated_layer(g, w, name, y, "_shexp")
    if experts.gated_shared:
        out = g.mul(out, g.sigmoid(matmul(g, w, f"{name}ffn_gate_inp_shexp", y)))
    return out


def _route(g: Graph, w: Mapping[str, Tensor], name: str, logits, experts: Experts) -> tuple[Tensor, Tensor]:
    """The experts of each column, int32 [k, n], and their weights [1, k, n]; logits [E, n]."""
    e, k, n = experts.n_experts, experts.n_used, logits.ne[1]
    scores = logits
    if experts.scoring != "chosen":
        scores = g.softmax(logits, experts.factor) if experts.scoring == "softmax" else g.sigmoid(logits)
    picking = g.add(scores, w[f"{name}exp_probs_b.bias"]) if experts.biased else scores
    if not g.device.is_gpu and (experts.biased or experts.scoring != "softmax"):
        # the CPU's sort may read out of bounds if only some scores are NaN; softmax makes all or none NaN
        picking = g.clamp(picking, -_LARGEST, _LARGEST)
    ids = g.top_k(picking, k)
    weights = g.get_rows(g.reshape(scores, 1, e, n), ids)
    if experts.scoring == "chosen":
        weights = g.reshape(g.softmax(g.reshape(weights, k, n)), 1, k, n)
    elif experts.normalised:
        weights = g.reshape(weights, k, n)
        total = g.clamp(g.sum_rows(weights), _LEAST_SUM, float("inf"))
        weights = g.reshape(g.div(weights, total), 1, k, n)
    if experts.scale != 1:
        weights = g.scale(weights, experts.scale)
    return ids, g.expand(weights)


def _outputs(g: Graph, w: Mapping[str, Tensor], name: str, y, experts: Experts, ids, like=None):
    """Outputs of the experts `ids`: y [D, n] -> [D, k, n].

    Args:
        like: A weight of the device to which matrices in host memory are copied; None: they stay where they are.
    """
    d, f, k, n = experts.n_embd, experts.n_ff, experts.n_used, y.ne[1]
    x = g.reshape(y, d, 1, n)
    if f"{name}gate_up_exps.weight" in w:
        both = _expert_matmul(g, w, f"{name}gate_up_exps", x, ids, like)
        gate, up = (g.view(both, (f, k, n), (both.nb[1], both.nb[2]), offset=i * f * 4) for i in (0, 1))
    else:
        gate, up = (_expert_matmul(g, w, f"{name}{part}_exps", x, ids, like) for part in ("gate", "up"))
    if experts.limit:
        hidden = g.clamped_swiglu(gate, up, _ALPHA, experts.limit)
    else:
        hidden = (g.geglu if experts.gelu else g.swiglu)(gate, up)
    hidden = g.expand(hidden)  # ordered after the use of the earlier matrices
    return _expert_matmul(g, w, f"{name}down_exps", hidden, ids, like)


def _weighted(g: Graph, out, weights):
    """The weighted sum of the experts' outputs: out [D, k, n], weights [1, k, n] -> [D, n]."""
    d, k, n = out.ne[0], out.ne[1], out.ne[2]
    out = g.expand(g.mul(out, weights))
    parts = [g.expand(g.view(out, (d, n), (out.nb[2],), offset=i * out.nb[1])) for i in range(k)]
    if k == 1:
        return g.cont(parts[0])
    total = parts[0]
    for part in parts[1:]:
        total = g.expand(g.add(total, part))
    return total


def _expert_matmul(g: Graph, w: Mapping[str, Tensor], name: str, x, ids, like):
    """`mul_mat_id` of the matrices `ids` [k, n] of `name` and x [d, 1 or k, n] -> [rows, k, n]; like as in `_outputs`."""
    matrix, scale, bias = (w.get(f"{name}.{part}") for part in ("weight", "scale", "bias"))
    if like is not None:
        matrix, scale, bias = (t if t is None else g.to_device(t, like) for t in (matrix, scale, bias))
    y = g.mul_mat_id(matrix, x, ids)
    if scale is not None:
        e, n = scale.ne[0], ids.ne[1]
        y = g.mul(y, g.get_rows(g.repeat(g.reshape(scale, 1, e), 1, e, n), ids))
    return y if bias is None else g.add_id(y, bias, ids)
