"""Types of K/V caches, by name, and the bytes of their rows."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from ..ggml.bindings import ffi, lib
from ..ggml.device import BF16, F16, F32

KV_TYPES: dict[str, int] = {
    "f32": F32,
    "f16": F16,
    "bf16": BF16,
    "q8_0": lib.GGML_TYPE_Q8_0,
    "q5_1": lib.GGML_TYPE_Q5_1,
    "q5_0": lib.GGML_TYPE_Q5_0,
    "q4_1": lib.GGML_TYPE_Q4_1,
    "q4_0": lib.GGML_TYPE_Q4_0,
}


@dataclass(frozen=True, slots=True)
class KvType:
    """ggml types of the keys and of the values of a cache."""

    k: int
    v: int

    @classmethod
    def named(cls, k: str, v: str) -> KvType:
        """The pair of types with these names, keys of `KV_TYPES`."""
        return cls(KV_TYPES[k], KV_TYPES[v])

    def check(self, head_dim: int, of: str) -> None:
        """Refuse types whose blocks do not divide a head.

        Args:
            head_dim: Values of a head.
            of: Whose cache it is, for the message.

        Raises:
            ConfigError: It names the option.
        """
        for option, type_ in (("type_k", self.k), ("type_v", self.v)):
            if head_dim % lib.ggml_blck_size(type_):
                raise ConfigError(
                    f"{option}: {_name(type_)} has blocks of {lib.ggml_blck_size(type_)} values, which do not divide the "
                    f"{of}'s head dimension {head_dim}; take f16"
                )

    def __str__(self) -> str:
        return _name(self.k) if self.k == self.v else f"K {_name(self.k)}, V {_name(self.v)}"


def is_quantised(type_: int) -> bool:
    """Whether a ggml type is quantised, in blocks with a shared scale."""
    return lib.ggml_blck_size(type_) > 1


def stored_row(type_: int, row: int) -> int:
    """Elements stored for a row of `row` elements: padded by a block if needed for whole words, in which rows are moved."""
    return row + (lib.ggml_row_size(type_, row) % 4 != 0) * lib.ggml_blck_size(type_)


def row_bytes(type_: int, row: int) -> int:
    """Bytes that a row of `row` elements takes in a cache."""
    return lib.ggml_row_size(type_, stored_row(type_, row))


def _name(type_: int) -> str:
    return ffi.string(lib.ggml_type_name(type_)).decode()
