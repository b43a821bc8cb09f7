"""Target `gemma3`: Gemma 3, 270M to 27B, text only. The blocks of `qwen3` with norms on both sides of their layers, GELU, and
five layers with a window for each one that sees everything.

Shapes are in ggml's order; D = embedding length, n = columns of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..ggml.bindings import Tensor
from .layers import Dense
from .qwen3 import Qwen3
from .reading import Keys, windows
from .rope import Rope, read_stretch

_PERIOD = 6  # of the layers that see everything, where a file does not say
_SCALED_BY_WIDTH = 62  # layers of the 27B, the only size whose scores are scaled by D / heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3(Qwen3):
    """Sizes of the model.

    Attributes:
        stretch: How far positions are stretched in layers that see everything.
        theta_window: Base of the rotation in layers with a window.
    """

    normed_behind: ClassVar[bool] = True
    longest_answer: ClassVar[int] = 8192

    theta_window: float = 10000.0

    @classmethod
    def _read_own(cls, keys: Keys, n: int) -> dict[str, Any]:
        stretch, yarn = read_stretch(keys.file, f"{keys.arch}.rope.scaling.")
        keys.hold(("attn_logit_softcapping", not keys.switched("attn_logit_softcapping"), "0"))
        return {
            "stretch": stretch,
            "yarn": yarn,
            "theta_window": keys.number("rope.freq_base_swa", default=10000.0),
            "seen": windows(keys, n, _PERIOD, last=True),
            "softcap": keys.switched("final_logit_softcapping"),
        }

    @property
    def ffn(self) -> Dense:
        """The feed-forward layer, with GELU."""
        return Dense(self.n_embd, self.n_ff, gelu=True)

    @property
    def embedding_scale(self) -> float:
        """The root of the width, which embeddings are multiplied with."""
        return self.n_embd**0.5

    @property
    def attention_scale(self) -> float | None:
        """The 27B's scale of scores, None for the usual one."""
        return (self.n_embd // self.n_heads) ** -0.5 if self.n_layers == _SCALED_BY_WIDTH else None

    def rope_window(self, weights: Mapping[str, Tensor]) -> Rope:
        """The same of layers with a window, whose positions are not stretched."""
        return Rope(self.head_dim, self.theta_window)
