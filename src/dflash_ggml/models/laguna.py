"""Target `laguna`: Poolside's Laguna XS.2, XS-2.1, S-2.1 and M.1. Layers that see everything among layers with a window, and
experts.

Shapes are in ggml's order; D = embedding length, n = columns of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..files.gguf import GGUFFile
from ..ggml.device import NARROW_COLUMNS
from ..ggml.graph import Graph
from ..state.memory import padded
from ..state.ring import TILE
from ..state.spec import KvLayer, StateSpec
from ..state.state import TargetState
from .attention import attention
from .checks import MAX_HEADS, MAX_LAYERS
from .experts import Experts, mixture
from .feed_forward import scale_shape
from .layers import APPENDED, Taps, columns_of, declare_outputs, swiglu
from .reading import Keys, check_file, scales_beside, settle_scales, split_qkv, vocabulary_size, windows
from .rope import Rope, read_yarn
from .target import Batch, Target
from .tensors import attention_tensors, outer_tensors

_SIGMOID = 2  # of the kinds of routers that files number
_PERIOD = 4  # of the layers that see everything, where a file does not list them


@dataclass(frozen=True, slots=True)
class Laguna(Target):
    """Sizes of the model. heads, windows, gates: per layer query heads, tokens that it sees (None: all), and the width of
    its output gate. The first `n_dense` layers have one feed-forward layer, `n_ff` wide, the others experts."""

    n_layers: int
    n_embd: int
    n_ff: int
    n_vocab: int
    heads: tuple[int, ...]
    n_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    gates: tuple[int, ...]
    n_dense: int
    experts: Experts
    rope: Rope
    rope_window: Rope
    rms_eps: float
    n_ctx_train: int
    tied_head: bool  # the file has no `output.weight`: the embedding is the output matrix
    scales: tuple[str, ...] = ()  # the `.scale` tensors that the file has beside matrices (NVFP4)

    @property
    def rope_theta(self) -> float:  # type: ignore[override]
        """The base of the layers that see everything."""
        return self.rope.theta

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Laguna:
        """Read and check keys and tensors. Raises `ModelFileError` that names the key or tensor at fault."""
        keys = Keys(file)
        n, n_embd = keys.count("block_count", MAX_LAYERS), keys.count("embedding_length")
        heads = keys.counts("attention.head_count", n, MAX_HEADS)
        n_kv_heads = keys.one("attention.head_count_kv", MAX_HEADS, n=n)
        d = keys.count("attention.key_length")
        rope = Rope(
            keys.count("rope.dimension_count", default=d),
            keys.number("rope.freq_base", default=10000.0),
            read_yarn(file, f"{file.arch}.rope.scaling."),
        )
        rope_window = Rope(
            keys.count("rope.dimension_count_swa", default=rope.n_rot),
            keys.number("rope.freq_base_swa", default=rope.theta),
        )
        keys.hold(
            ("attention.head_count", all(h % n_kv_heads == 0 for h in heads), f"multiples of {n_kv_heads}"),
            (
                "attention.value_length",
                keys.count("attention.value_length", default=d) == d,
                f"the key length {d}",
            ),
            ("rope.dimension_count", rope.n_rot in range(2, d + 1, 2), "even, within a head"),
            ("rope.dimension_count_swa", rope_window.n_rot in range(2, d + 1, 2), "even, within a head"),
            (
                "expert_gating_func",
                keys.count("expert_gating_func", default=_SIGMOID) == _SIGMOID,
                "2 (sigmoid)",
            ),
            ("router_logit_softcapping", not file.get(f"{file.arch}.router_logit_softcapping", float), "0"),
            ("expert_shared_count", keys.count("expert_shared_count", default=1) == 1, "1"),
        )
        settle_scales(file)
        split_qkv(file, heads, n_kv_heads, d)
        n_ff_expert = keys.one("expert_feed_forward_length", n=n)
        n_experts = keys.count("expert_count")
        normalised = file.get(f"{file.arch}.expert_weights_norm", bool)
        is_scaled = file.get(f"{file.arch}.expert_weights_scale", float) not in (None, 0)
        params = cls(
            n_layers=n,
            n_embd=n_embd,
            n_ff=keys.one("feed_forward_length", n=n),
            n_vocab=vocabulary_size(file),
            heads=heads,
            n_kv_heads=n_kv_heads,
            head_dim=d,
            windows=windows(keys, n, _PERIOD),
            gates=tuple(_gate(file, i, h, d) for i, h in enumerate(heads)),
            n_dense=keys.count("leading_dense_block_count", n, 0),
            experts=Experts(
                n_embd=n_embd,
                n_experts=n_experts,
                n_used=keys.one("expert_used_count", n_experts, n=n),
                n_ff=n_ff_expert,
                n_ff_shared=keys.count("expert_shared_feed_forward_length", default=n_ff_expert),
                gated_shared=False,
                scoring="sigmoid",
                biased=True,
                normalised=normalised is not False,
                scale=keys.number("expert_weights_scale") if is_scaled else 1.0,
            ),
            rope=rope,
            rope_window=rope_window,
            rms_eps=keys.number("attention.layer_norm_rms_epsilon"),
            n_ctx_train=keys.count("context_length", 1 << 31),
            tied_head="output.weight" not in file.tensors,
        )
        shapes = params.tensors()
        params = replace(params, scales=scales_beside(file, (n for n, s in shapes.items() if len(s) > 1)))
        check_file(file, params.tensors(), floats="ffn_gate_inp.weight")
        return params

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape (ggml order) of every tensor that the graph uses."""
        d = self.n_embd
        shapes = outer_tensors(d, self.n_vocab, self.tied_head)
        dense = {
            "ffn_gate.weight": (d, self.n_ff),
            "ffn_up.weight": (d, self.n_ff),
            "ffn_down.weight": (self.n_ff, d),
        }
        for i, (heads, gate) in enumerate(zip(self.heads, self.gates)):
            layer = {
                "attn_norm.weight": (d,),
                **attention_tensors(d, heads, self.n_kv_heads, self.head_dim),
                "attn_gate.weight": (d, gate),
                "ffn_norm.weight": (d,),
                **(dense if i < self.n_dense else self.experts.tensors()),
            }
            shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
        for name in self.scales:
            shapes[name] = scale_shape(shapes[name.removesuffix("scale") + "weight"])
        return shapes

    def state_spec(self) -> StateSpec:
        """K/V of every layer, of those with a window in a ring."""
        return StateSpec(tuple(KvLayer(self.n_kv_heads, self.head_dim, window) for window in self.windows))

    def scratch_bytes(self, columns: int, rows: int, n_taps: int) -> int:
        """The widest layer, the rows of a window, the features, and the mask of a pass of few columns."""
        e, kv = self.experts, self.n_kv_heads * self.head_dim
        per_column = max(3 * self.n_ff, e.per_column) + (4 + n_taps) * self.n_embd
        per_column += 3 * max(self.heads) * self.head_dim + 4 * kv
        window = max((w for w in self.windows if w is not None), default=0)
        gathered = 2 * kv * padded(window + TILE + columns, 256) if window else 0
        appended = 2 * n_taps * self.n_embd * min(columns, APPENDED)
        return 4 * (columns * per_column + appended + gathered) + 2 * rows * min(columns, NARROW_COLUMNS)

    def build(self, batch: Batch, state: TargetState, weights: Mapping[str, Any]) -> Graph:
        """See Target.build. Of layers with a window also the inputs of their rings."""
        g, w, eps = (
            Graph(state.device, 256 + (48 + self.experts.nodes) * self.n_layers),
            weights,
            self.rms_eps,
        )
        columns = columns_of(g, batch)
        taps = Taps(g, columns, state)
        near = {
            ring.window: ring.build(g, columns.n, columns.positions, columns.is_tree, columns.seqs)
            for ring in state.rings
        }
        x = g.get_rows(w["token_embd.weight"], columns.ids)
        for i, (heads, window) in enumerate(zip(self.heads, self.windows)):
            name = f"blk.{i}."
            y = g.expand(g.rms_norm(x, eps, w[name + "attn_norm.weight"]))
            y = attention(
                g,
                w,
                name + "attn_",
                y,
                columns if window is None else near[window],
                state.cache(i),
                self.rope if window is None else self.rope_window,
                heads=heads,
                kv_heads=self.n_kv_heads,
                head_dim=self.head_dim,
                eps=eps,
            )
            taps.settle()
            x = g.add(y, x)
            y = g.rms_norm(x, eps, w[name + "ffn_norm.weight"])
            y = swiglu(g, w, name, y) if i < self.n_dense else mixture(g, w, name, y, self.experts)
            x = g.add(y, x)
            taps.take(i, x)
        taps.finish()
        declare_outputs(g, w, self.head_name, x, eps, batch)
        return g


def _gate(file: GGUFFile, layer: int, heads: int, head_dim: int) -> int:
    """Width of a layer's output gate: per head, or per element."""
    info = file.tensors.get(f"blk.{layer}.attn_gate.weight")
    return heads * head_dim if info is not None and info.shape[-1] == heads * head_dim else heads
