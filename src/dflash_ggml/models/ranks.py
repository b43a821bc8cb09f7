"""Tensor parallelism on two devices: the part of each of the file's tensors that a rank has.

Matrices that produce heads, or the width of a feed-forward layer, are split by rows; those that consume them by columns, so
that a rank's matmul gives one summand (`TargetState.summed`). Small tensors and the embedding are replicated; the output matrix
is on the first rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ..errors import ConfigError
from ..ggml.bindings import Tensor, ffi, lib
from ..ggml.weights import Source


class Cut(NamedTuple):
    """A split along dimension `dim`, which consists of `pieces` equal parts, each divided among the ranks."""

    dim: int
    pieces: int = 1


def name_of(name: str, rank: int) -> str:
    """Name of a rank's tensor."""
    return f"rank{rank}.{name}" if rank else name


def rank_of(name: str) -> int:
    """The rank of a tensor's name."""
    return int(name[4 : name.index(".")]) if name.startswith("rank") else 0


def of_rank(weights: Mapping[str, Tensor], rank: int) -> Mapping[str, Tensor]:
    """The tensors of a rank, by their names in its graph."""
    begin = name_of("", rank)
    return {name[len(begin) :]: t for name, t in weights.items() if rank_of(name) == rank}


def is_on_every_rank(name: str) -> bool:
    """Whether every rank has the tensor or a part of it."""
    return not name.startswith("output")


def part_of(name: str, s: Source, cut: Cut, rank: int, n_ranks: int) -> Source:
    """A rank's part of a file's tensor; its bytes may be discontiguous.

    Raises:
        ConfigError: The split would divide quantisation blocks.
    """
    shape = list(s.shape)
    unit = cut.pieces * n_ranks
    block = lib.ggml_blck_size(s.type) if cut.dim == 0 else 1
    if shape[cut.dim] % (unit * block):
        kind = ffi.string(lib.ggml_type_name(s.type)).decode()
        raise ConfigError(
            f"split_mode tensor: {name}, {shape[cut.dim]} wide, cannot be halved between blocks of {kind}; share whole layers "
            "(-sm layer)"
        )
    data = np.frombuffer(s.data, np.uint8).reshape(-1, lib.ggml_row_size(s.type, shape[0]))
    if cut.dim == 0:
        data = data.reshape(len(data), cut.pieces, n_ranks, -1)[:, :, rank]
    else:
        data = data.reshape(cut.pieces, n_ranks, -1)[:, rank]
    shape[cut.dim] //= n_ranks
    return Source(s.type, tuple(shape), data)
