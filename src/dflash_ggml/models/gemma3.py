"""Target `gemma3`: Gemma 3, 270M to 27B, text only. The blocks of `qwen3` with norms on both sides of their layers, GELU, and
five window layers for each full-attention layer.

Shapes are in ggml's order; D = embedding length, n = columns of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .feed_forward import Dense
from .qwen3 import Qwen3
from .reading import Keys, windows
from .rope import Rope, read_stretch

_PERIOD = 6  # default period of the full-attention layers
_SCALED_BY_WIDTH = 62  # layers of the 27B, the only size with scores scaled by D / heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3(Qwen3):
    """Sizes of the model."""

    normed_behind: ClassVar[bool] = True
    longest_answer: ClassVar[int] = 8192

    @classmethod
    def _read_own(cls, keys: Keys, heads: Sequence[int], d: int) -> dict[str, Any]:
        stretch, yarn = read_stretch(keys.file, f"{keys.arch}.rope.scaling.")
        keys.check(("attn_logit_softcapping", not keys.switched("attn_logit_softcapping"), "0"))
        return {
            "rope_full": Rope(d, keys.number("rope.freq_base", default=10000.0), yarn, stretch),
            "rope_near": Rope(d, keys.number("rope.freq_base_swa", default=10000.0)),
            "seen": windows(keys, len(heads), _PERIOD, last=True),
            "softcap": keys.switched("final_logit_softcapping"),
        }

    @property
    def ffn(self) -> Dense:
        """The feed-forward layer, with GELU."""
        return Dense(self.n_embd, self.n_ff, gelu=True)

    @property
    def embedding_scale(self) -> float:
        """Factor of embeddings: the square root of the width."""
        return self.n_embd**0.5

    @property
    def attention_scale(self) -> float | None:
        """Scale of attention scores; None for the usual one (all sizes but 27B)."""
        return (self.n_embd // self.n_heads) ** -0.5 if self.n_layers == _SCALED_BY_WIDTH else None
