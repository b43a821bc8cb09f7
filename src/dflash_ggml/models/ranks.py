"""Halves of every layer on two devices: which part of a tensor of the file each rank has.

A matrix in front of the heads, or of a feed-forward layer's width, gives its rows; one behind them its columns, so that the
matmul of a rank gives one part of a sum (`TargetState.summed`). What is small, and the embedding, both have; the output matrix is
the first's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ..errors import ConfigError
from ..ggml.bindings import Tensor, ffi, lib
from ..ggml.weights import Source


class Cut(NamedTuple):
    """Dimension `dim` of a tensor is so many equal pieces side by side, of each of which every rank has a share."""

    dim: int
    pieces: int = 1


def name_of(name: str, rank: int) -> str:
    """What a tensor of a rank's is called."""
    return f"rank{rank}.{name}" if rank else name


def rank_of(name: str) -> int:
    """The rank whose tensor this is."""
    return int(name[4 : name.index(".")]) if name.startswith("rank") else 0


def of_rank(weights: Mapping[str, Tensor], rank: int) -> Mapping[str, Tensor]:
    """The tensors of a rank, by the names that its graph knows."""
    begin = name_of("", rank)
    return {name[len(begin) :]: t for name, t in weights.items() if rank_of(name) == rank}


def is_of_all(name: str) -> bool:
    """Whether every rank has a tensor, or a part of it."""
    return not name.startswith("output")


def part_of(name: str, s: Source, cut: Cut, rank: int, n_ranks: int) -> Source:
    """The part of a file's tensor that a rank has; its bytes may lie apart.

    Raises:
        ConfigError: Blocks of weights would be divided.
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
