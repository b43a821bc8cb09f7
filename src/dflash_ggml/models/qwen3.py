"""Target `qwen3`: Qwen3, dense, every size. Softmax attention in every layer, so a sequence's state is its K/V rows.

Shapes are in ggml's order; D = embedding length, n = columns of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..files.gguf import GGUFFile
from ..ggml.bindings import Tensor
from ..ggml.graph import Graph
from ..state.spec import KvLayer, StateSpec
from ..state.state import TargetState
from .attention import attention
from .checks import MAX_HEADS, MAX_LAYERS
from .experts import Experts, FeedForward
from .feed_forward import Dense
from .layers import Taps, columns_of, declare_outputs, pass_bytes, ring_view_rows, ring_views
from .reading import (
    Keys,
    biases_beside,
    check_file,
    common_fields,
    normalise_scales,
    scales_beside,
    split_qkv,
)
from .rope import FACTORS, Rope, read_yarn
from .target import Batch, Target
from .tensors import attention_tensors, outer_tensors, with_scales


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3(Target):
    """Sizes of the model. All layers are alike; subclasses differ in their feed-forward layers (`ffn`), in norms of heads and in
    positions.

    Attributes:
        rope_full, rope_near: Rotary embedding in full-attention layers, and in window layers.
    """

    normed: ClassVar[bool] = True  # queries and keys, per head
    normed_behind: ClassVar[bool] = False  # of the outputs of attention and feed-forward layers
    biased: ClassVar[bool] = False  # whether matrices may have biases
    second_norm: ClassVar[str] = "ffn_norm.weight"  # of the input of a feed-forward layer
    floats: ClassVar[str] = ""  # end of the names of matrices that must be float32, if there are any

    n_ff: int  # width of a feed-forward layer, or of one expert
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope_full: Rope
    rope_near: Rope
    scales: tuple[str, ...] = ()  # the `.scale` tensors [1] of matrices (NVFP4)
    biases: tuple[str, ...] = ()  # the `.bias` tensors [rows] of matrices
    softcap: float = 0.0  # soft bound of the logits, 0 for none
    seen: tuple[int | None, ...] = ()  # the layers' windows, if any has one
    experts: Experts | None = None
    joined: frozenset[int] = frozenset()  # blocks with gate and up of an expert as one matrix in the file

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Qwen3:
        """Read and check keys and tensors.

        Raises:
            ModelFileError: A key or tensor is missing or wrong; it names it.
        """
        keys = Keys(file)
        n, common = keys.count("block_count", MAX_LAYERS), common_fields(keys)
        heads = cls._read_heads(keys, n)
        n_heads = max(heads)
        d = keys.count("attention.key_length", default=common["n_embd"] // n_heads)
        own = cls._read_own(keys, heads, d)
        params = cls(
            n_layers=n,
            n_heads=n_heads,
            n_kv_heads=keys.one("attention.head_count_kv", MAX_HEADS, default=n_heads, n=n),
            head_dim=d,
            rope_theta=own["rope_full"].theta,
            **own,
            **cls._read_ffn(keys, n),
            **common,
        )
        keys.check(
            ("attention.head_count_kv", n_heads % params.n_kv_heads == 0, f"a divisor of {n_heads}"),
            ("attention.key_length", d % 2 == 0 and d > 0, "an even number"),
            keys.is_("attention.value_length", d, f"the key length {d}"),
            keys.is_("rope.dimension_count", params.rope_full.n_rot, f"the whole head, {d}"),
        )
        normalise_scales(file)
        split_qkv(file, heads, params.n_kv_heads, d)
        shapes = params.tensors()
        matrices = [name for name, shape in shapes.items() if len(shape) > 1]
        params = replace(
            params,
            scales=scales_beside(file, matrices),
            biases=biases_beside(file, matrices) if cls.biased else (),
        )
        check_file(file, params.tensors(), cls._ignored, cls.floats)
        return params

    @staticmethod
    def _ignored(name: str) -> bool:
        """Whether the file may contain a tensor that the graph does not use."""
        return False

    @classmethod
    def _read_heads(cls, keys: Keys, n: int) -> tuple[int, ...]:
        """Query heads of each of `n` layers."""
        return (keys.one("attention.head_count", MAX_HEADS, n=n),) * n

    @classmethod
    def _read_own(cls, keys: Keys, heads: Sequence[int], d: int) -> dict[str, Any]:
        """Read fields of rotary embedding, windows and related models' additions.

        Args:
            heads: Query heads of each layer.
            d: Elements of a head.
        """
        theta = keys.number("rope.freq_base", default=10000.0)
        rope = Rope(d, theta, read_yarn(keys.file, f"{keys.arch}.rope.scaling."))
        return {"rope_full": rope, "rope_near": rope}

    @classmethod
    def _read_ffn(cls, keys: Keys, n: int) -> dict[str, Any]:
        """Read the fields of `ffn`; n: layers."""
        return {"n_ff": keys.one("feed_forward_length", n=n)}

    @property
    def ffn(self) -> FeedForward:
        """The feed-forward layer of every block."""
        return self.experts or Dense(self.n_embd, self.n_ff)

    def block(self, i: int) -> tuple[int, FeedForward]:
        """Query heads and the feed-forward layer of a block."""
        return self.n_heads, self.ffn

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape (ggml order) of every tensor that the graph uses."""
        d = self.n_embd
        shapes = outer_tensors(d, self.n_vocab, self.tied_head)
        norms: tuple[str, ...] = ("attn_norm.weight", self.second_norm)
        if self.normed_behind:
            norms += ("post_attention_norm.weight", "post_ffw_norm.weight")
        for i in range(self.n_layers):
            heads, ffn = self.block(i)
            layer = attention_tensors(d, heads, self.n_kv_heads, self.head_dim, normed=self.normed)
            layer |= dict.fromkeys(norms, (d,)) | ffn.tensors(i in self.joined)
            shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
        return with_scales(shapes, self.scales) | {
            n: shapes[n.removesuffix("bias") + "weight"][1:] for n in self.biases
        }

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Window in tokens of each layer; None: full attention."""
        return self.seen or (None,) * self.n_layers

    def ropes(self, weights: Mapping[str, Tensor]) -> tuple[Rope, Rope]:
        """Rotary embedding in full-attention layers and in window layers, with the file's divisors."""
        factors = weights.get(FACTORS)
        return self.rope_full._replace(factors=factors), self.rope_near._replace(factors=factors)

    @property
    def embedding_scale(self) -> float:
        """Factor of embeddings."""
        return 1.0

    @property
    def attention_scale(self) -> float | None:
        """Scale of attention scores; None: 1 / sqrt(head_dim)."""
        return None

    def state_spec(self) -> StateSpec:
        """K/V of every layer, in a ring for window layers."""
        return StateSpec(tuple(KvLayer(self.n_kv_heads, self.head_dim, window) for window in self.windows))

    def scratch_bytes(self, columns: int, rows: int, n_taps: int) -> int:
        """The widest layer, the rows of a window, the features, and the mask of a pass of few columns."""
        kv = self.n_kv_heads * self.head_dim
        widest = max(self.block(i)[1].per_column for i in range(self.n_layers))
        per_column = widest + (4 + n_taps) * self.n_embd
        per_column += 2 * self.n_heads * self.head_dim + 4 * kv
        gathered = 2 * kv * ring_view_rows(self.windows, columns)
        return pass_bytes(columns, rows, per_column, n_taps * self.n_embd, gathered)

    def build(self, batch: Batch, state: TargetState, weights: Mapping[str, Tensor]) -> Graph:
        """See Target.build. Also the inputs of the rings of window layers."""
        g, w, eps = (
            Graph(state.device, 512 + sum(48 + self.block(i)[1].nodes for i in range(self.n_layers))),
            weights,
            self.rms_eps,
        )
        columns = columns_of(g, batch)
        taps = Taps(g, columns, state)
        rope_full, rope_near = self.ropes(w)
        views = ring_views(g, columns, state)
        sizes: dict[str, Any] = {"kv_heads": self.n_kv_heads, "head_dim": self.head_dim, "eps": eps}
        sizes["scale"] = self.attention_scale
        x = g.get_rows(w["token_embd.weight"], columns.ids)
        if self.embedding_scale != 1:
            x = g.scale(x, self.embedding_scale)
        for i, window in enumerate(self.windows):
            name, seen = f"blk.{i}.", columns if window is None else views[window]
            y = g.expand(g.rms_norm(x, eps, w[name + "attn_norm.weight"]))
            rope, (heads, ffn) = rope_full if window is None else rope_near, self.block(i)
            y = attention(g, w, name + "attn_", y, seen, state.cache(i), rope, heads=heads, **sizes)
            taps.flush()
            if self.normed_behind:
                y = g.rms_norm(y, eps, w[name + "post_attention_norm.weight"])
            x = g.add(x, y)
            y = g.rms_norm(x, eps, w[name + self.second_norm])
            y = ffn.build(g, w, name, y)
            if self.normed_behind:
                y = g.rms_norm(y, eps, w[name + "post_ffw_norm.weight"])
            x = g.add(x, y)
            taps.take(i, x)
        taps.finish()
        declare_outputs(g, w, self.head_name, x, eps, batch, self.softcap)
        return g
