"""Target `gpt-oss`: gpt-oss-20b and -120b. The blocks of `qwen3moe` without norms of heads, with biases on every matrix, an
attention sink per head, and windows in every other layer, from the first on.

ggml rounds the band of pairs that YaRN interpolates to whole pairs, as llama.cpp does; the checkpoints' own code does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from .qwen3moe import Qwen3Moe
from .reading import Keys, windows

LIMIT = 7.0  # bound of the inputs of the experts' SwiGLU
_PERIOD = 2  # default period of the full-attention layers


@dataclass(frozen=True, slots=True, kw_only=True)
class GptOss(Qwen3Moe):
    """Sizes of the model."""

    normed: ClassVar[bool] = False
    second_norm: ClassVar[str] = "post_attention_norm.weight"

    @classmethod
    def _read_own(cls, keys: Keys, heads: Sequence[int], d: int) -> dict[str, Any]:
        found = super(GptOss, cls)._read_own(keys, heads, d)
        return found | {"seen": windows(keys, len(heads), _PERIOD, last=True)}

    @classmethod
    def _read_ffn(cls, keys: Keys, n: int) -> dict[str, Any]:
        found = super(GptOss, cls)._read_ffn(keys, n)
        experts = replace(found["experts"], scoring="chosen", limit=LIMIT)
        return found | {"experts": experts}

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape (ggml order) of every tensor that the graph uses."""
        shapes = super(GptOss, self).tensors()
        matrices = {n: shape for n, shape in shapes.items() if n.startswith("blk.") and len(shape) > 1}
        biases = {n.removesuffix("weight") + "bias": shape[1:] for n, shape in matrices.items()}
        sinks = {f"blk.{i}.attn_sinks.weight": (self.n_heads,) for i in range(self.n_layers)}
        return shapes | biases | sinks
