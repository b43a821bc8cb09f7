"""Target `laguna`: Poolside's Laguna XS.2, XS-2.1, S-2.1 and M.1. Full-attention layers among window layers, and experts.

Shapes are in ggml's order; D = embedding length, n = columns of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..files.gguf import GGUFFile
from .checks import MAX_HEADS
from .experts import Experts, FeedForward
from .feed_forward import Dense
from .qwen3 import Qwen3
from .reading import Keys, windows
from .rope import Rope, read_yarn

_SIGMOID = 2  # router kinds by their number in files
_PERIOD = 4  # default period of the full-attention layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Laguna(Qwen3):
    """Sizes of the model. The first `n_dense` layers have a dense feed-forward layer of width `n_ff`, the others experts.

    Attributes:
        heads: Query heads per layer (`n_heads`: the most).
        gates: Width of the output gate per layer.
    """

    floats: ClassVar[str] = "ffn_gate_inp.weight"

    heads: tuple[int, ...]
    gates: tuple[int, ...]
    n_dense: int

    @classmethod
    def _read_heads(cls, keys: Keys, n: int) -> tuple[int, ...]:
        return keys.counts("attention.head_count", n, MAX_HEADS)

    @classmethod
    def _read_own(cls, keys: Keys, heads: Sequence[int], d: int) -> dict[str, Any]:
        file, n = keys.file, len(heads)
        kv = keys.one("attention.head_count_kv", MAX_HEADS, n=n)
        full = Rope(
            keys.count("rope.dimension_count", default=d),
            keys.number("rope.freq_base", default=10000.0),
            read_yarn(file, f"{file.arch}.rope.scaling."),
        )
        near = Rope(
            keys.count("rope.dimension_count_swa", default=full.n_rot),
            keys.number("rope.freq_base_swa", default=full.theta),
        )
        keys.check(
            ("attention.head_count", all(h % kv == 0 for h in heads), f"multiples of {kv}"),
            ("rope.dimension_count", full.n_rot in range(2, d + 1, 2), "even, within a head"),
            ("rope.dimension_count_swa", near.n_rot in range(2, d + 1, 2), "even, within a head"),
        )
        return {
            "heads": heads,
            "gates": tuple(_gate(file, i, h, d) for i, h in enumerate(heads)),
            "rope_full": full,
            "rope_near": near,
            "seen": windows(keys, n, _PERIOD),
        }

    @classmethod
    def _read_ffn(cls, keys: Keys, n: int) -> dict[str, Any]:
        file = keys.file
        keys.check(
            keys.is_("expert_gating_func", _SIGMOID, "2 (sigmoid)"),
            ("router_logit_softcapping", not file.get(f"{file.arch}.router_logit_softcapping", float), "0"),
            keys.is_("expert_shared_count", 1, "1"),
        )
        n_ff_expert = keys.one("expert_feed_forward_length", n=n)
        n_experts = keys.count("expert_count")
        experts = Experts(
            n_embd=keys.count("embedding_length"),
            n_experts=n_experts,
            n_used=keys.one("expert_used_count", n_experts, n=n),
            n_ff=n_ff_expert,
            n_ff_shared=keys.count("expert_shared_feed_forward_length", default=n_ff_expert),
            gated_shared=False,
            scoring="sigmoid",
            biased=True,
            normalised=file.get(f"{file.arch}.expert_weights_norm", bool) is not False,
            scale=keys.switched("expert_weights_scale") or 1.0,
        )
        n_dense = keys.count("leading_dense_block_count", n, 0)
        return {"n_ff": keys.one("feed_forward_length", n=n), "n_dense": n_dense, "experts": experts}

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


def _gate(file: GGUFFile, layer: int, heads: int, head_dim: int) -> int:
    """Width of a layer's output gate: one value per head or per element."""
    info = file.tensors.get(f"blk.{layer}.attn_gate.weight")
    return heads * head_dim if info is not None and info.shape[-1] == heads * head_dim else heads
