"""Target `qwen35moe`: Qwen3.5 and later with many experts, every size. The mixers of `qwen35`, other feed-forward layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..files.gguf import GGUFFile
from .checks import in_range
from .experts import Experts
from .qwen35 import Qwen35, read_count

MAX_EXPERTS = 1 << 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35Moe(Qwen35):
    """Sizes of the trunk; all layers have as many experts of one width, and one that is shared."""

    experts: Experts
    together: frozenset[int] = frozenset()  # blocks whose file has gate and up of an expert as one matrix

    @property
    def ffn(self) -> Experts:
        return self.experts

    @property
    def joined(self) -> frozenset[int]:
        return self.together

    @classmethod
    def _read_ffn(cls, file: GGUFFile, trunk: int) -> dict[str, Any]:
        n_experts = read_count(file, "expert_count", MAX_EXPERTS)
        n_used = _one(file, "expert_used_count", n_experts)
        groups = read_count(file, "expert_group_count", MAX_EXPERTS, 0, default=0)
        if groups > 1:
            raise file.error(
                f"key '{file.arch}.expert_group_count': {groups} groups of experts are not supported"
            )
        keys = ("expert_feed_forward_length", "expert_shared_feed_forward_length")
        known = [f"{file.arch}.{key}" in file.metadata for key in keys]
        n_ff = _one(file, keys[0]) if known[0] else max(1, read_count(file, "feed_forward_length") // n_used)
        experts = Experts(
            n_embd=read_count(file, "embedding_length"),
            n_experts=n_experts,
            n_used=n_used,
            n_ff=n_ff,
            n_ff_shared=read_count(file, keys[1] if known[1] else "feed_forward_length"),
        )
        together = (i for i in range(trunk) if f"blk.{i}.ffn_gate_up_exps.weight" in file.tensors)
        return {"n_ff": n_ff, "experts": experts, "together": frozenset(together)}


def _one(file: GGUFFile, key: str, high: int | None = None) -> int:
    """A number that holds for all blocks: written once, or for each block, which must then agree."""
    name = f"{file.arch}.{key}"
    if not isinstance(file.metadata.get(name), (list, np.ndarray)):
        return read_count(file, key) if high is None else read_count(file, key, high)
    found = sorted(set(file.require_array(name, int)))
    if len(found) != 1:
        raise file.error(f"key {name!r}: {found} (expected one number for all blocks)")
    return in_range(file.error, f"key {name!r}", found[0], 1, high or 1 << 20)
