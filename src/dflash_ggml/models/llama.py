"""Target `llama`: Llama 2 and 3, SmolLM2, TinyLlama, Mistral 7B and Nemo, and others of this architecture. The blocks of
`qwen3` without norms of heads; rotary pairs are adjacent dimensions.

Shapes are in ggml's order; D = embedding length, n = columns of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .qwen3 import Qwen3
from .reading import Keys, windows
from .rope import FACTORS, Rope, read_stretch


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama(Qwen3):
    """Sizes of the model.

    Attributes:
        factors: Whether the file has a divisor for each rotary pair.
    """

    normed: ClassVar[bool] = False
    biased: ClassVar[bool] = True
    # instruction-tuned without reasoning, most for 8,192 tokens in total
    longest_answer: ClassVar[int] = 4096

    factors: bool = False

    @classmethod
    def _read_own(cls, keys: Keys, heads: Sequence[int], d: int) -> dict[str, Any]:
        file, experts = keys.file, "expert_count"
        has_experts = bool(keys.has(experts) and keys.count(experts, low=0))
        keys.check(
            (experts, not has_experts, "0: models with experts are not supported in this architecture"),
            ("attention.scale", not file.get(f"{keys.arch}.attention.scale", float), "0"),
        )
        stretch, yarn = read_stretch(file, f"{keys.arch}.rope.scaling.")
        rope = Rope(d, keys.number("rope.freq_base", default=10000.0), yarn, stretch, adjacent=True)
        return {
            "rope_full": rope,
            "rope_near": rope,
            "factors": FACTORS in file.tensors,
            "seen": windows(keys, len(heads)),
        }

    @staticmethod
    def _ignored(name: str) -> bool:
        return name.endswith("attn_rot_embd.weight")  # angles stored by old converters

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape (ggml order) of every tensor that the graph uses."""
        factors = {FACTORS: (self.head_dim // 2,)} if self.factors else {}
        return super(Llama, self).tensors() | factors
