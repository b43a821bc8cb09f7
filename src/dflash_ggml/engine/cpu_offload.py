"""Experts kept in host memory: which layers, and their size in either memory.

They are those of the first layers, as llama.cpp counts them. A token reads few of them, so the CPU can compute them; for prefill
batches a layer's matrices are copied to the GPU temporarily ("lent"), which reserves memory for the largest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..files.gguf import GGUFFile
from ..ggml.host import free_memory
from ..ggml.weights import Weights
from ..models.experts import LENT, expert_block
from ..state.memory import KeptExperts


def kept_names(names: Iterable[str], layers: int) -> list[str]:
    """The tensors of the experts of the first `layers` layers."""
    return [name for name in names if (block := expert_block(name)) is not None and block < layers]


def expert_sizes(file: GGUFFile, n_layers: int) -> list[int]:
    """Bytes of the experts of each layer of a file; none of a model without."""
    sizes = [0] * n_layers
    for name, info in file.tensors.items():
        block = expert_block(name)
        if block is not None and block < n_layers:
            sizes[block] += info.nbytes
    return sizes if any(sizes) else []


def kept_experts(weights: Weights, layers: int) -> KeptExperts | None:
    """What the host keeps of declared weights."""
    return KeptExperts(layers, weights.kept_bytes, free_memory()) if weights.kept_bytes else None


def lent_bytes(sizes: Mapping[str, int], n_batch: int) -> int:
    """Device memory for the kept matrices that are lent at a time to passes of `n_batch` columns: gate and up of a
    layer, or down.

    Args:
        sizes: Of the kept tensors, by name.
    """
    if n_batch < LENT:
        return 0
    lent: dict[tuple[int | None, bool], int] = {}
    for name, size in sizes.items():
        at = expert_block(name), "ffn_down" in name
        lent[at] = lent.get(at, 0) + size
    return max(lent.values(), default=0)


def fewest_layers(sizes: list[int], missing: int) -> int:
    """Layers, from the first, whose experts take at least `missing` bytes; all if none do."""
    taken = 0
    for layer, size in enumerate(sizes):
        if taken >= missing:
            return layer
        taken += size
    return len(sizes)
