"""Target `laguna`: Poolside's Laguna XS.2, XS-2.1, S-2.1 and M.1. Full-attention layers among window layers, and experts.

Shapes are in ggml's order; D = embedding length, n = columns of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..files.gguf import GGUFFile
from ..ggml.bindings import Tensor
from .checks import MAX_HEADS, MAX_LAYERS
from .experts import Experts, FeedForward
from .feed_forward import Dense
from .qwen3 import Qwen3
from .reading import Keys, check_file, normalise_scales, scales_beside, split_qkv, vocabulary_size, windows
from .rope import Rope, read_yarn

_SIGMOID = 2  # router kinds by their number in files
_PERIOD = 4  # default period of the full-attention layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Laguna(Qwen3):
    """Sizes of the model. The first `n_dense` layers have a dense feed-forward layer of width `n_ff`, the others experts.

    Attributes:
        heads: Query heads per layer (`n_heads`: the most).
        gates: Width of the output gate per layer.
        rope_full, rope_near: Rotary embedding in full-attention layers, and in window layers.
    """

    heads: tuple[int, ...]
    gates: tuple[int, ...]
    n_dense: int
    rope_full: Rope
    rope_near: Rope

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Laguna:
        """Read and check keys and tensors.

        Raises:
            ModelFileError: A key or tensor is missing or wrong; it names it.
        """
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
        rope_near = Rope(
            keys.count("rope.dimension_count_swa", default=rope.n_rot),
            keys.number("rope.freq_base_swa", default=rope.theta),
        )
        keys.check(
            ("attention.head_count", all(h % n_kv_heads == 0 for h in heads), f"multiples of {n_kv_heads}"),
            keys.is_("attention.value_length", d, f"the key length {d}"),
            ("rope.dimension_count", rope.n_rot in range(2, d + 1, 2), "even, within a head"),
            ("rope.dimension_count_swa", rope_near.n_rot in range(2, d + 1, 2), "even, within a head"),
            keys.is_("expert_gating_func", _SIGMOID, "2 (sigmoid)"),
            ("router_logit_softcapping", not file.get(f"{file.arch}.router_logit_softcapping", float), "0"),
            keys.is_("expert_shared_count", 1, "1"),
        )
        normalise_scales(file)
        split_qkv(file, heads, n_kv_heads, d)
        n_ff_expert = keys.one("expert_feed_forward_length", n=n)
        n_experts = keys.count("expert_count")
        normalised = file.get(f"{file.arch}.expert_weights_norm", bool)
        params = cls(
            n_layers=n,
            n_embd=n_embd,
            n_ff=keys.one("feed_forward_length", n=n),
            n_vocab=vocabulary_size(file),
            n_heads=max(heads),
            heads=heads,
            n_kv_heads=n_kv_heads,
            head_dim=d,
            seen=windows(keys, n, _PERIOD),
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
                scale=keys.switched("expert_weights_scale") or 1.0,
            ),
            rope_full=rope,
            rope_near=rope_near,
            rope_theta=rope.theta,
            yarn=rope.yarn,
            rms_eps=keys.number("attention.layer_norm_rms_epsilon"),
            n_ctx_train=keys.count("context_length", 1 << 31),
            tied_head="output.weight" not in file.tensors,
        )
        shapes = params.tensors()
        params = replace(params, scales=scales_beside(file, (n for n, s in shapes.items() if len(s) > 1)))
        check_file(file, params.tensors(), floats="ffn_gate_inp.weight")
        return params

    def block(self, i: int) -> tuple[int, FeedForward]:
        """Query heads and the feed-forward layer of a block."""
        return self.heads[i], Dense(self.n_embd, self.n_ff) if i < self.n_dense else self.ffn

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape (ggml order) of every tensor that the graph uses."""
        gates = {f"blk.{i}.attn_gate.weight": (self.n_embd, gate) for i, gate in enumerate(self.gates)}
        return super(Laguna, self).tensors() | gates

    def scratch_bytes(self, columns: int, rows: int, n_taps: int) -> int:
        """As in the base class, plus the gates."""
        gates = 4 * columns * self.n_heads * self.head_dim
        return super(Laguna, self).scratch_bytes(columns, rows, n_taps) + gates

    def rope(self, weights: Mapping[str, Tensor]) -> Rope:
        """Rotary embedding of the heads."""
        return self.rope_full

    def rope_window(self, weights: Mapping[str, Tensor]) -> Rope:
        """Rotary embedding of window layers."""
        return self.rope_near


def _gate(file: GGUFFile, layer: int, heads: int, head_dim: int) -> int:
    """Width of a layer's output gate: one value per head or per element."""
    info = file.tensors.get(f"blk.{layer}.attn_gate.weight")
    return heads * head_dim if info is not None and info.shape[-1] == heads * head_dim else heads
