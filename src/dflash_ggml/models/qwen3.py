"""Target `qwen3`: Qwen3, dense, every size. Softmax attention in every layer, so a sequence is its K/V rows.

Shapes are in ggml's order; D = embedding length, n = columns of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..files.gguf import GGUFFile
from ..ggml.device import NARROW_COLUMNS
from ..ggml.graph import Graph
from ..ggml.operations import Yarn
from ..state.spec import KvLayer, StateSpec
from ..state.state import TargetState
from .attention import attention
from .checks import MAX_HEADS, MAX_LAYERS
from .feed_forward import FeedForward, scale_shape
from .layers import APPENDED, Columns, Dense, Taps, declare_outputs
from .reading import Keys, check_file, scales_beside, settle_scales, split_qkv, vocabulary_size
from .rope import Rope, read_yarn
from .target import Batch, Target
from .tensors import attention_tensors, outer_tensors


@dataclass(frozen=True, slots=True)
class Qwen3(Target):
    """Sizes of the model. All layers are alike; relatives differ in their feed-forward layers (`ffn`)."""

    n_layers: int
    n_embd: int
    n_ff: int  # width of a feed-forward layer, or of one expert
    n_vocab: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope_theta: float
    yarn: Yarn | None
    rms_eps: float
    n_ctx_train: int
    tied_head: bool  # the file has no `output.weight`: the embedding is the output matrix
    scales: tuple[str, ...] = ()  # the `.scale` tensors [1] that the file has beside matrices (NVFP4)

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Qwen3:
        """Read and check keys and tensors. Raises `ModelFileError` that names the key or tensor at fault."""
        keys = Keys(file)
        n, n_embd = keys.count("block_count", MAX_LAYERS), keys.count("embedding_length")
        n_heads = keys.one("attention.head_count", MAX_HEADS, n=n)
        params = cls(
            n_layers=n,
            n_embd=n_embd,
            n_vocab=vocabulary_size(file),
            n_heads=n_heads,
            n_kv_heads=keys.one("attention.head_count_kv", MAX_HEADS, default=n_heads, n=n),
            head_dim=keys.count("attention.key_length", default=n_embd // n_heads),
            rope_theta=keys.number("rope.freq_base", default=10000.0),
            yarn=read_yarn(file, f"{file.arch}.rope.scaling."),
            rms_eps=keys.number("attention.layer_norm_rms_epsilon"),
            n_ctx_train=keys.count("context_length", 1 << 31),
            tied_head="output.weight" not in file.tensors,
            **cls._read_ffn(keys, n),
        )
        d = params.head_dim
        keys.hold(
            ("attention.head_count_kv", n_heads % params.n_kv_heads == 0, f"a divisor of {n_heads}"),
            ("attention.key_length", d % 2 == 0 and d > 0, "an even number"),
            (
                "attention.value_length",
                keys.count("attention.value_length", default=d) == d,
                f"the key length {d}",
            ),
            (
                "rope.dimension_count",
                keys.count("rope.dimension_count", default=d) == d,
                f"the whole head, {d}",
            ),
        )
        settle_scales(file)
        split_qkv(file, [n_heads] * n, params.n_kv_heads, d)
        shapes = params.tensors()
        params = replace(params, scales=scales_beside(file, (n for n, s in shapes.items() if len(s) > 1)))
        check_file(file, params.tensors())
        return params

    @classmethod
    def _read_ffn(cls, keys: Keys, n: int) -> dict[str, Any]:
        """The fields that say what `ffn` is; n: layers."""
        return {"n_ff": keys.one("feed_forward_length", n=n)}

    @property
    def ffn(self) -> FeedForward:
        """The feed-forward layer of every block."""
        return Dense(self.n_embd, self.n_ff)

    @property
    def joined(self) -> frozenset[int]:
        """Blocks whose gate and up matrices are one (see FeedForward.tensors)."""
        return frozenset()

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape (ggml order) of every tensor that the graph uses."""
        d = self.n_embd
        shapes = outer_tensors(d, self.n_vocab, self.tied_head)
        layer = {
            "attn_norm.weight": (d,),
            **attention_tensors(d, self.n_heads, self.n_kv_heads, self.head_dim),
            "ffn_norm.weight": (d,),
        }
        ffn = {joined: self.ffn.tensors(joined) for joined in (False, True)}
        for i in range(self.n_layers):
            block = layer | ffn[i in self.joined]
            shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
        return shapes | {
            name: scale_shape(shapes[name.removesuffix("scale") + "weight"]) for name in self.scales
        }

    def state_spec(self) -> StateSpec:
        """K/V of every layer."""
        return StateSpec((KvLayer(self.n_kv_heads, self.head_dim),) * self.n_layers)

    def scratch_bytes(self, columns: int, rows: int, n_taps: int) -> int:
        """The widest layer, the features, and the mask of a pass of few columns."""
        per_column = self.ffn.per_column + (4 + n_taps) * self.n_embd
        per_column += 2 * (self.n_heads + 2 * self.n_kv_heads) * self.head_dim
        appended = 2 * n_taps * self.n_embd * min(columns, APPENDED)
        return 4 * (columns * per_column + appended) + 2 * rows * min(columns, NARROW_COLUMNS)

    def build(self, batch: Batch, state: TargetState, weights: Mapping[str, Any]) -> Graph:
        """See Target.build."""
        g, w, eps = (
            Graph(state.device, 512 + (40 + self.ffn.nodes) * self.n_layers),
            weights,
            self.rms_eps,
        )
        columns = Columns(g, batch)
        taps = Taps(g, batch, columns, state)
        rope = Rope(self.head_dim, self.rope_theta, self.yarn)
        sizes = {"heads": self.n_heads, "kv_heads": self.n_kv_heads, "head_dim": self.head_dim}
        x = g.get_rows(w["token_embd.weight"], columns.ids)
        for i in range(self.n_layers):
            name = f"blk.{i}."
            y = g.expand(g.rms_norm(x, eps, w[name + "attn_norm.weight"]))
            y = attention(g, w, name + "attn_", y, columns, state.cache(i), rope, **sizes, eps=eps)
            taps.settle()
            x = g.add(y, x)
            y = g.rms_norm(x, eps, w[name + "ffn_norm.weight"])
            x = g.add(self.ffn.build(g, w, name, y), x)
            taps.take(i, x)
        taps.finish()
        declare_outputs(g, w, self.head_name, x, eps, batch)
        return g
