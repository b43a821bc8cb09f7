"""State specification: the per-sequence state of a model, layer by layer.

A list with an entry per layer (docs/decisions/0008): heads and windows may differ per layer, recurrent layers are optional, and a
layer finds its state by its own number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from ..errors import ConfigError
from ..ggml.device import F16
from .kv_type import KvType, row_bytes
from .rotation import rotation_bytes

COPY_BYTES = 256 << 20  # FATTN_RANGES_COPY_BYTES


@dataclass(frozen=True, slots=True)
class KvLayer:
    """An attention layer: one row of keys and one of values per token.

    Attributes:
        window: How many tokens it sees (None: all).
    """

    heads: int
    head_dim: int
    window: int | None = None

    @property
    def row(self) -> int:
        """Elements of a row of keys, and of one of values."""
        return self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Conv:
    """A causal convolution over `channels`: its window is the last `kernel` - 1 inputs."""

    kernel: int
    channels: int


@dataclass(frozen=True, slots=True)
class Delta:
    """A gated delta net: a state [dim, dim] per value head."""

    dim: int
    k_heads: int
    v_heads: int

    @property
    def factors(self) -> int:
        """Elements that a tree node stores for its commit: u of each value head, k of each key head, the decay G."""
        return self.dim * (self.v_heads + self.k_heads) + self.v_heads


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A layer with a state of constant size, float32: a convolution's window and a delta net."""

    conv: Conv
    delta: Delta


@dataclass(frozen=True)
class StateSpec:
    """The layers of a model in order.

    Attributes:
        sides: Side of each layer; empty if all are on the first.
        n_ranks: Above 1, the parts of all layers on the first device come first, then those on the second.

    Raises:
        ConfigError: Recurrent layers have several shapes, which no operation supports.
    """

    layers: tuple[KvLayer | Recurrent, ...]
    sides: tuple[int, ...] = ()
    n_ranks: int = 1

    def __post_init__(self) -> None:
        if len(set(self.recurrent)) > 1:
            raise ConfigError("state: recurrent layers of several shapes in one model are not supported")

    @cached_property
    def kv(self) -> tuple[KvLayer, ...]:
        """The attention layers, in order."""
        return tuple(layer for layer in self.layers if isinstance(layer, KvLayer))

    @cached_property
    def recurrent(self) -> tuple[Recurrent, ...]:
        """The recurrent layers, in order; all of one shape."""
        return tuple(layer for layer in self.layers if isinstance(layer, Recurrent))

    @property
    def windows(self) -> tuple[int, ...]:
        """The distinct windows of attention layers, in order."""
        return tuple(sorted({layer.window for layer in self.kv if layer.window is not None}))

    def with_window(self, window: int | None) -> StateSpec:
        """The attention layers with this window (None: full attention)."""
        return self._some(lambda layer, side: isinstance(layer, KvLayer) and layer.window == window)

    def on(self, side: int) -> StateSpec:
        """The layers on a side."""
        return self._some(lambda layer, of: of == side)

    def _some(self, wanted: Callable[[KvLayer | Recurrent, int], bool]) -> StateSpec:
        found = [i for i, layer in enumerate(self.layers) if wanted(layer, self.side(i))]
        sides = tuple(self.side(i) for i in found) if self.sides else ()
        return StateSpec(tuple(self.layers[i] for i in found), sides, self.n_ranks)

    def side(self, layer: int) -> int:
        """The side of a layer."""
        return self.sides[layer] if self.sides else 0

    @cached_property
    def kind_index(self) -> tuple[int, ...]:
        """For each layer, its index among its own kind: attention layers of one window, recurrent ones of one side."""
        seen: dict[object, int] = {}
        found = []
        for i, layer in enumerate(self.layers):
            kind = (KvLayer, layer.window) if isinstance(layer, KvLayer) else (Recurrent, self.side(i))
            found.append(seen.get(kind, 0))
            seen[kind] = found[-1] + 1
        return tuple(found)

    def kv_bytes(self, rows: int, kv_type: KvType) -> int:
        """Bytes of a cache of `rows` rows over all attention layers."""
        a_row = sum(row_bytes(type_, layer.row) for layer in self.kv for type_ in (kv_type.k, kv_type.v))
        return rows * a_row + rotation_bytes((layer.head_dim for layer in self.kv), kv_type)

    def f16_copy(self, rows: int, kv_type: KvType, by_heads: bool = False) -> int:
        """Scratch bytes of the float16 copy that a GPU makes of a layer's `rows` rows for attention of many columns.

        Args:
            by_heads: It copies as many heads at a time as COPY_BYTES allow, at least one.
        """
        a_row = 2 * rows * ((kv_type.k != F16) + (kv_type.v != F16))
        sizes = ((a_row * layer.row, a_row * layer.head_dim) for layer in self.kv)
        return max(
            (min(whole, max(COPY_BYTES, one)) if by_heads else whole for whole, one in sizes), default=0
        )
