"""Target `qwen3moe`: Qwen3 with many experts: 30B-A3B, Coder-30B-A3B, 235B-A22B. The attention of `qwen3`, other
feed-forward layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .experts import Experts
from .qwen3 import Qwen3
from .qwen35moe import MAX_EXPERTS
from .reading import Keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Moe(Qwen3):
    """Sizes of the model; all layers have as many experts of one width, and none that is shared."""

    experts: Experts

    @property
    def ffn(self) -> Experts:
        return self.experts

    @classmethod
    def _read_ffn(cls, keys: Keys) -> dict[str, Any]:
        n_experts = keys.count("expert_count", MAX_EXPERTS)
        n_used = keys.count("expert_used_count", n_experts)
        key = "expert_feed_forward_length"
        n_ff = keys.count(key) if keys.has(key) else max(1, keys.count("feed_forward_length") // n_used)
        return {"n_ff": n_ff, "experts": Experts(keys.count("embedding_length"), n_experts, n_used, n_ff)}
