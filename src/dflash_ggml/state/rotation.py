"""Hadamard rotations for quantised caches: they spread outliers over a head, which reduces the quantisation error.

A quantised cache stores H k instead of k and H v instead of v, with H orthonormal, symmetric and so its own inverse.
Queries are multiplied by H too, which leaves the scores unchanged, and so is the output of attention. Keys are rotated
over a whole head, values over 64 elements of it, as in llama.cpp.

The rotation is a matmul with a small constant matrix that carries ggml's hint that it is a Hadamard matrix
(docs/decisions/0008): CPU and CUDA replace it by their fast transform, every other device multiplies.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..ggml.bindings import Tensor
from ..ggml.device import F32, Device
from ..ggml.graph import Graph
from ..ggml.store import Store
from .kv_type import KvType, is_quantised

_KEYS, _VALUES = 512, 64  # the widest rotations


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotations of one layer's keys and values: matrices [w, w], None for unrotated rows."""

    keys: Tensor | None = None
    values: Tensor | None = None

    def of_keys(self, g: Graph, x: Tensor) -> Tensor:
        """Rotate queries or keys x [head_dim, heads, n], contiguous."""
        return _rotate(g, self.keys, x)

    def of_values(self, g: Graph, x: Tensor) -> Tensor:
        """Rotate values x [row, n], or rotate attention's output x [head_dim, heads, n] back. Contiguous."""
        return _rotate(g, self.values, x)


class Rotations:
    """The rotation matrices of a cache's layers, on the device."""

    def __init__(self, device: Device, head_dims: Iterable[int], kv_type: KvType) -> None:
        widths = _widths(head_dims, kv_type)
        self._kv_type = kv_type
        self.store = Store(device, len(widths))
        self._matrices = {w: self.store.tensor(F32, w, w, name="rotation") for w in widths}
        self.store.allocate()
        for w, matrix in self._matrices.items():
            device.write(matrix, hadamard(w))

    def of(self, head_dim: int) -> Rotation:
        """The rotations of a layer with heads of `head_dim` values."""
        k, v = _pair(head_dim, self._kv_type)
        return Rotation(self._matrices.get(k), self._matrices.get(v))


def rotation_bytes(head_dims: Iterable[int], kv_type: KvType) -> int:
    """Bytes of `Rotations` with these arguments."""
    return sum(4 * w * w for w in _widths(head_dims, kv_type))


def hadamard(n: int) -> np.ndarray:
    """The orthonormal Hadamard matrix of Sylvester's order, float32 [n, n].

    Args:
        n: A power of two.
    """
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return (h / np.sqrt(n)).astype(np.float32)


def _widths(head_dims: Iterable[int], kv_type: KvType) -> list[int]:
    return sorted({w for d in head_dims for w in _pair(d, kv_type) if w})


def _pair(head_dim: int, kv_type: KvType) -> tuple[int, int]:
    """Widths of the rotations of keys and of values, 0 for none: powers of two that divide the head."""
    power = head_dim & -head_dim
    return (
        min(power, _KEYS) if is_quantised(kv_type.k) else 0,
        min(power, _VALUES) if is_quantised(kv_type.v) else 0,
    )


def _rotate(g: Graph, matrix, x):
    """Multiply each group of w values of x by `matrix` [w, w]; the shape stays."""
    if matrix is None:
        return x
    w = matrix.ne[0]
    if x.ne[0] == w:
        return g.hadamard(matrix, x)
    shape = (x.ne[0], x.ne[1], x.ne[2])
    return g.reshape(g.hadamard(matrix, g.reshape(x, w, shape[0] // w * shape[1], shape[2])), *shape)
