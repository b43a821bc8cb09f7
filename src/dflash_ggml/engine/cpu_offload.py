"""Weights kept in host memory: experts by layers, with their size in either memory, and embeddings.

Experts are those of the first layers, as llama.cpp counts them. A token reads few of them, so the CPU can compute them; for
prefill batches a layer's matrices are copied to the GPU temporarily, which reserves memory for the largest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..files.gguf import GGUFFile
from ..ggml.device import Device
from ..ggml.host import free_memory
from ..ggml.pages import kernels_read_host
from ..ggml.weights import GATHERED, Weights
from ..models.experts import COPY_COLUMNS, expert_block
from ..models.target import Target
from ..state.memory import HostExperts


def host_names(names: Iterable[str], layers: int) -> list[str]:
    """The tensors of the experts of the first `layers` layers."""
    return [name for name in names if (block := expert_block(name)) is not None and block < layers]


def embeddings(device: Device, target: Target, names: Iterable[str]) -> list[str]:
    """The matrices that a single CUDA device can read in host memory: a pass looks up a row for each token, and multiplies with
    none of them (docs/decisions/0013)."""
    alone = sum(side is not device.host for side in device.sides) == 1
    if not alone or not kernels_read_host(device.info.name):
        return []
    return [name for name in names if name in GATHERED and name != target.head_name]


def expert_sizes(file: GGUFFile, n_layers: int) -> list[int]:
    """Bytes of the experts of each layer of a file; none of a model without."""
    sizes = [0] * n_layers
    for name, info in file.tensors.items():
        block = expert_block(name)
        if block is not None and block < n_layers:
            sizes[block] += info.nbytes
    return sizes if any(sizes) else []


def host_experts(weights: Weights, layers: int) -> HostExperts | None:
    """Experts of declared weights that stay in host memory; None without."""
    return HostExperts(layers, weights.host_bytes, free_memory()) if weights.host_bytes else None


def copied_bytes(sizes: Mapping[str, int], n_batch: int) -> int:
    """Device memory for the matrices in host memory that a pass of `n_batch` columns copies at a time: gate and up of a
    layer, or down.

    Args:
        sizes: Of the tensors in host memory, by name.
    """
    if n_batch < COPY_COLUMNS:
        return 0
    copied: dict[tuple[int | None, bool], int] = {}
    for name, size in sizes.items():
        at = expert_block(name), "ffn_down" in name
        copied[at] = copied.get(at, 0) + size
    return max(copied.values(), default=0)


def fewest_layers(sizes: list[int], missing: int) -> int:
    """Layers, from the first, whose experts take at least `missing` bytes; all if none do."""
    taken = 0
    for layer, size in enumerate(sizes):
        if taken >= missing:
            return layer
        taken += size
    return len(sizes)
