"""Target `gemma4`: Gemma 4, text only: 12B, 31B, 26B-A4B with experts beside the feed-forward layer, E2B and E4B with embeddings
per layer and layers that share keys and values.

Shapes are in ggml's order; D = embedding length, n = columns of a batch, P = width of a layer's own embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..files.gguf import GGUFFile
from ..ggml.bindings import Tensor
from ..ggml.graph import Graph
from ..state.kv import LayerCache
from ..state.ring import RingView
from ..state.spec import KvLayer, StateSpec
from ..state.state import TargetState
from .checks import MAX_HEADS, MAX_LAYERS
from .experts import Experts, mixture
from .feed_forward import Dense, gated_layer, matmul
from .layers import Columns, Taps, columns_of, declare_outputs, pass_bytes, ring_view_rows, ring_views
from .qwen3moe import MAX_EXPERTS
from .reading import Keys, check_file, common_fields, normalise_scales, scales_beside, windows
from .rope import FACTORS, Rope, read_stretch
from .target import Batch, Target
from .tensors import attention_tensors, outer_tensors, with_scales

_PERIOD = 6  # default period of the full-attention layers
_TABLE = "per_layer_token_embd.weight"


@dataclass(frozen=True, slots=True)
class Kind:
    """Sizes of window layers, or of full-attention layers; the latter's rotary pairs have divisors in the file."""

    head_dim: int
    rope: Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4(Target):
    """Sizes of the model; tuples are per layer.

    Attributes:
        n_ff: Width of the feed-forward layer.
        heads, kv_heads: Heads of queries, and of keys and values.
        windows: See `reading.windows`.
        valued: Whether a layer has a matrix of values; otherwise its keys are the values.
        scaled: Whether its output is scaled.
        mixed: Whether it has experts beside its feed-forward layer.
        fused_experts: Whether their gate and up are one matrix.
        n_own: Number of first layers with keys and values; the others use those of the last of their kind.
        n_per_layer: P, 0 without.
        softcap: Soft bound of the logits, 0 for none.
    """

    n_ff: tuple[int, ...]
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    windows: tuple[int | None, ...]
    valued: tuple[bool, ...]
    scaled: tuple[bool, ...]
    mixed: tuple[bool, ...]
    fused_experts: tuple[bool, ...]
    n_own: int
    n_per_layer: int
    full: Kind
    near: Kind
    experts: Experts | None
    softcap: float
    scales: tuple[str, ...] = ()  # the `.scale` tensors of matrices (NVFP4)

    def kind(self, layer: int) -> Kind:
        """Sizes of a layer's kind."""
        return self.full if self.windows[layer] is None else self.near

    def source(self, layer: int) -> int:
        """The layer whose keys and values a layer uses."""
        own = range(min(layer + 1, self.n_own))
        return next(i for i in reversed(own) if i == layer or self.windows[i] == self.windows[layer])

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Gemma4:
        """Read and check keys and tensors.

        Raises:
            ModelFileError: A key or tensor is missing or wrong; it names it.
        """
        keys = Keys(file)
        n, common = keys.count("block_count", MAX_LAYERS), common_fields(keys)
        heads = keys.counts("attention.head_count", n, MAX_HEADS)
        kv_heads = keys.counts("attention.head_count_kv", n, MAX_HEADS)
        d = keys.count("attention.key_length")
        d_near = keys.count("attention.key_length_swa", default=d)
        n_near = keys.count("rope.dimension_count_swa", default=d_near)
        n_own = n - keys.count("attention.shared_kv_layers", n - 1, 0, default=0)
        seen = windows(keys, n, _PERIOD, last=True)
        stretch, yarn = read_stretch(file, f"{keys.arch}.rope.scaling.")
        theta = keys.number("rope.freq_base", default=10000.0)
        divides = all(h % kv == 0 for h, kv in zip(heads, kv_heads))
        has_keys = set(seen[n_own:]) <= set(seen[:n_own])
        keys.check(
            ("attention.head_count", divides, "multiples of head_count_kv"),
            keys.is_("attention.value_length", d, f"the key length {d}"),
            keys.is_("attention.value_length_swa", d_near, f"the key length {d_near}"),
            ("attention.key_length", d % 2 == 0, "even"),
            keys.is_("rope.dimension_count", d, f"the whole head, {d}"),
            ("rope.dimension_count_swa", n_near in range(2, d_near + 1, 2), "even, within a head"),
            ("attention.shared_kv_layers", has_keys, "fewer, so that each kind of layer has one with keys"),
        )
        normalise_scales(file)

        def has(name: str) -> tuple[bool, ...]:
            return tuple(f"blk.{i}.{name}" in file.tensors for i in range(n))

        mixed = has("ffn_gate_inp.weight")
        experts = None
        if any(mixed):
            n_experts = keys.count("expert_count", MAX_EXPERTS)
            n_used = keys.one("expert_used_count", n_experts, n=n)
            width = keys.one("expert_feed_forward_length", n=n)
            n_embd = common["n_embd"]
            experts = Experts(n_embd, n_experts, n_used, width, factor=n_embd**-0.5, gelu=True)
        params = cls(
            n_layers=n,
            n_ff=keys.counts("feed_forward_length", n, 1 << 24),
            heads=heads,
            kv_heads=kv_heads,
            windows=seen,
            valued=has("attn_v.weight"),
            scaled=has("layer_output_scale.weight"),
            mixed=mixed,
            fused_experts=has("ffn_gate_up_exps.weight"),
            n_own=n_own,
            n_per_layer=keys.count("embedding_length_per_layer_input", low=0, default=0),
            full=Kind(d, Rope(d, theta, yarn, stretch)),
            near=Kind(d_near, Rope(n_near, keys.number("rope.freq_base_swa", default=10000.0))),
            rope_theta=theta,
            experts=experts,
            softcap=keys.switched("final_logit_softcapping"),
            **common,
        )
        matrices = (
            name for name, s in params.tensors().items() if len(s) > 1 and "ffn_gate_inp." not in name
        )
        params = replace(params, scales=scales_beside(file, matrices))
        check_file(file, params.tensors(), params._ignored, floats="ffn_gate_inp.weight")
        return params

    def _ignored(self, name: str) -> bool:
        """Whether a tensor is an unused key or value matrix, of a layer that uses those of another."""
        _, _, part = name.partition("blk.")
        layer, _, part = part.partition(".")
        return part.startswith(("attn_k", "attn_v")) and layer.isdigit() and int(layer) >= self.n_own

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape (ggml order) of every tensor that the graph uses."""
        d, p = self.n_embd, self.n_per_layer
        shapes = outer_tensors(d, self.n_vocab, self.tied_head)
        if None in self.windows:
            shapes[FACTORS] = (self.full.head_dim // 2,)
        if p:
            shapes |= {
                _TABLE: (p * self.n_layers, self.n_vocab),
                "per_layer_model_proj.weight": (d, p * self.n_layers),
                "per_layer_proj_norm.weight": (p,),
            }
        for i in range(self.n_layers):
            shapes |= {f"blk.{i}.{name}": shape for name, shape in self._layer(i).items()}
        return with_scales(shapes, self.scales)

    def _layer(self, i: int) -> dict[str, tuple[int, ...]]:
        d, p = self.n_embd, self.n_per_layer
        shapes = attention_tensors(d, self.heads[i], self.kv_heads[i], self.kind(i).head_dim)
        if i >= self.n_own:
            del shapes["attn_k.weight"], shapes["attn_k_norm.weight"]
        if i >= self.n_own or not self.valued[i]:
            del shapes["attn_v.weight"]
        norms: tuple[str, ...] = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        shapes |= Dense(d, self.n_ff[i]).tensors()
        if self.scaled[i]:
            shapes["layer_output_scale.weight"] = (1,)
        if p:
            shapes |= {"inp_gate.weight": (d, p), "proj.weight": (p, d), "post_norm.weight": (d,)}
        if self.mixed[i] and self.experts is not None:
            shapes |= {"ffn_gate_inp.scale": (d,), **self.experts.tensors(self.fused_experts[i])}
            norms += ("post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2")
        return shapes | {f"{name}.weight": (d,) for name in norms}

    def state_spec(self) -> StateSpec:
        """K/V of the layers with their own, in a ring for window layers."""
        own = range(self.n_own)
        return StateSpec(
            tuple(KvLayer(self.kv_heads[i], self.kind(i).head_dim, self.windows[i]) for i in own)
        )

    def scratch_bytes(self, columns: int, rows: int, n_taps: int) -> int:
        """The widest layer, the embeddings of all layers, the rows of a window, the features, and the mask of a pass of few
        columns."""
        layers = range(self.n_layers)
        q = max(self.heads[i] * self.kind(i).head_dim for i in layers)
        kv = max(self.kv_heads[i] * self.kind(i).head_dim for i in layers)
        experts = self.experts.per_column + 2 * self.n_embd if self.experts else 0
        per_column = 3 * max(self.n_ff) + experts + (5 + n_taps) * self.n_embd + 3 * q + 4 * kv
        per_column += 3 * self.n_per_layer * self.n_layers
        gathered = 2 * kv * ring_view_rows(self.windows, columns)
        return pass_bytes(columns, rows, per_column, n_taps * self.n_embd, gathered)

    def build(self, batch: Batch, state: TargetState, weights: Mapping[str, Tensor]) -> Graph:
        """See Target.build. Also the inputs of the rings of window layers."""
        experts = self.experts.nodes if self.experts else 0
        g, w, eps = Graph(state.device, 512 + (64 + experts) * self.n_layers), weights, self.rms_eps
        columns = columns_of(g, batch)
        taps = Taps(g, columns, state)
        views = ring_views(g, columns, state)
        factors = w.get(FACTORS)
        x = g.scale(g.get_rows(w["token_embd.weight"], columns.ids), self.n_embd**0.5)
        own = self._own_embeddings(g, w, columns.ids, x) if self.n_per_layer else None
        caches: list[LayerCache] = []
        for i, window in enumerate(self.windows):
            name, source = f"blk.{i}.", self.source(i)
            y = g.expand(g.rms_norm(x, eps, w[name + "attn_norm.weight"]))
            cache = state.cache(i) if source == i else caches[source]
            rope = self.full.rope._replace(factors=factors) if window is None else self.near.rope
            seen = columns if window is None else views[window]
            y, cache = self._attention(g, w, i, y, seen, cache, rope)
            caches.append(cache)
            taps.flush()
            x = g.add(g.rms_norm(y, eps, w[name + "post_attention_norm.weight"]), x)
            y = g.rms_norm(self._ffn(g, w, i, x), eps, w[name + "post_ffw_norm.weight"])
            x = g.add(y, x)
            if own is not None:
                y = g.gelu(matmul(g, w, name + "inp_gate", x))
                y = g.mul(y, g.view(own, (own.ne[0], own.ne[2]), (own.nb[2],), offset=i * own.nb[1]))
                x = g.add(g.rms_norm(matmul(g, w, name + "proj", y), eps, w[name + "post_norm.weight"]), x)
            if self.scaled[i]:
                x = g.mul(x, w[name + "layer_output_scale.weight"])
            taps.take(i, x)
        taps.finish()
        declare_outputs(g, w, self.head_name, x, eps, batch, self.softcap)
        return g

    def _own_embeddings(self, g: Graph, w: Mapping[str, Tensor], ids, x):
        """The per-layer embeddings [P, layers, n]: by table, and from the tokens' embeddings x [D, n]."""
        p, n = self.n_per_layer, x.ne[1]
        table = g.scale(g.reshape(g.get_rows(w[_TABLE], ids), p, self.n_layers, n), p**0.5)
        made = g.reshape(matmul(g, w, "per_layer_model_proj", x), p, self.n_layers, n)
        made = g.rms_norm(g.scale(made, self.n_embd**-0.5), self.rms_eps, w["per_layer_proj_norm.weight"])
        return g.expand(g.scale(g.add(made, table), 0.5**0.5))

    def _attention(
        self,
        g: Graph,
        w: Mapping[str, Tensor],
        i: int,
        y,
        columns: Columns | RingView,
        cache: LayerCache,
        rope: Rope,
    ) -> tuple[Tensor, LayerCache]:
        """Attention over the cache, after writing the columns' rows if it is the layer's own; y [D, n] -> [D, n], and the cache
        after that. Values are normalised, scores not scaled."""
        d, n, heads, kv_heads = self.kind(i).head_dim, columns.n, self.heads[i], self.kv_heads[i]
        name = f"blk.{i}.attn_"
        own = i < self.n_own
        q = g.reshape(g.expand(matmul(g, w, name + "q", y)), d, heads, n)
        if own:
            k = g.reshape(g.expand(matmul(g, w, name + "k", y)), d, kv_heads, n)
            v = g.reshape(g.expand(matmul(g, w, name + "v", y)), d, kv_heads, n) if self.valued[i] else k
        # q first: one kernel then computes all three
        q = rope.rotate(g, g.rms_norm(q, self.rms_eps, w[name + "q_norm.weight"]), columns.positions)
        q = cache.queries(g, q)
        if own:
            v = g.reshape(g.rms_norm(v, self.rms_eps), d * kv_heads, n)
            k = rope.rotate(g, g.rms_norm(k, self.rms_eps, w[name + "k_norm.weight"]), columns.positions)
            cache = cache.write(g, k, v, columns.rows)
        o = cache.attend(g, q, columns.attend, columns.n_kv, columns.gathered, scale=1.0)
        return matmul(g, w, name + "output", g.reshape(o, d * heads, n)), cache

    def _ffn(self, g: Graph, w: Mapping[str, Tensor], i: int, x):
        """The feed-forward layer of x [D, n] before its last norm, plus its experts -> [D, n]."""
        name, eps = f"blk.{i}.", self.rms_eps
        y = gated_layer(g, w, name, g.rms_norm(x, eps, w[name + "ffn_norm.weight"]), gelu=True)
        if not self.mixed[i] or self.experts is None:
            return y
        y = g.rms_norm(y, eps, w[name + "post_ffw_norm_1.weight"])
        routed = g.rms_norm(x, eps, w[name + "ffn_gate_inp.scale"])
        inner = g.rms_norm(x, eps, w[name + "pre_ffw_norm_2.weight"])
        z = mixture(g, w, name, inner, self.experts, routed)
        return g.add(y, g.rms_norm(z, eps, w[name + "post_ffw_norm_2.weight"]))
