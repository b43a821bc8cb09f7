"""Target `qwen35moe`: Qwen3.5 and later with experts, every size. The layers of `qwen35` with another feed-forward part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..files.gguf import GGUFFile
from .experts import Experts, joined_blocks
from .qwen35 import Qwen35
from .reading import Keys

MAX_EXPERTS = 1 << 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35Moe(Qwen35):
    """Sizes of the model: those of `Qwen35`, with `experts`, the same in every layer, plus a shared expert."""

    @classmethod
    def _read_ffn(cls, file: GGUFFile, trunk: int) -> dict[str, Any]:
        keys = Keys(file)
        n_experts = keys.count("expert_count", MAX_EXPERTS)
        n_used = keys.one("expert_used_count", n_experts)
        groups = keys.count("expert_group_count", MAX_EXPERTS, 0, default=0)
        if groups > 1:
            raise file.error(
                f"key '{file.arch}.expert_group_count': {groups} groups of experts are not supported"
            )
        n_ff, shared = keys.expert_width(n_used), "expert_shared_feed_forward_length"
        experts = Experts(
            n_embd=keys.count("embedding_length"),
            n_experts=n_experts,
            n_used=n_used,
            n_ff=n_ff,
            n_ff_shared=keys.one(shared if keys.has(shared) else "feed_forward_length"),
        )
        return {"n_ff": n_ff, "experts": experts, "joined": joined_blocks(file, trunk)}
