"""Target `qwen3moe`: Qwen3 with many experts: 30B-A3B, Coder-30B-A3B, 235B-A22B. The attention of `qwen3`, other
feed-forward layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .experts import Experts, joined_blocks
from .qwen3 import Qwen3
from .qwen35moe import MAX_EXPERTS
from .reading import Keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Moe(Qwen3):
    """Sizes of the model; all layers have the same experts, and no shared one."""

    @classmethod
    def _read_ffn(cls, keys: Keys, n: int) -> dict[str, Any]:
        n_experts = keys.count("expert_count", MAX_EXPERTS)
        n_used = keys.one("expert_used_count", n_experts, n=n)
        n_ff = keys.expert_width(n_used, n)
        experts = Experts(keys.count("embedding_length"), n_experts, n_used, n_ff)
        return {"n_ff": n_ff, "experts": experts, "joined": joined_blocks(keys.file, n)}
