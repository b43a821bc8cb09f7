"""Tensor descriptions of model files, and the storage of ggml's types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import NamedTuple


class GGMLType(NamedTuple):
    """Storage of a ggml type: `block` elements take `nbytes` bytes."""

    name: str
    block: int
    nbytes: int


F32, F16, BF16 = 0, 1, 30

# `general.file_type` of a GGUF file, by llama.cpp's numbering
_FILE_TYPES = (
    "F32 F16 Q4_0 Q4_1 - - - Q8_0 Q5_0 Q5_1 Q2_K Q3_K_S Q3_K_M Q3_K_L Q4_K_S Q4_K_M Q5_K_S Q5_K_M Q6_K IQ2_XXS IQ2_XS "
    "Q2_K_S IQ3_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ3_M IQ2_S IQ2_M IQ4_XS IQ1_M BF16"
)
FILE_TYPES = _FILE_TYPES.split()


@cache
def ggml_types() -> Mapping[int, GGMLType]:
    """The types of the linked ggml, by number.

    Read from ggml itself instead of a second table, at the first tensor, so that importing this module needs no compiled
    binding.
    """
    from ..ggml.bindings import ffi, lib

    types = {}
    for code in range(lib.GGML_TYPE_COUNT):
        if block := lib.ggml_blck_size(code):  # 0: a removed type
            name = ffi.string(lib.ggml_type_name(code)).decode()
            types[code] = GGMLType(name, block, lib.ggml_type_size(code))
    return MappingProxyType(types)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a model file. `shape` is in ggml order: dimension 0 is contiguous."""

    name: str
    type: int
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    nbytes: int

    @property
    def type_name(self) -> str:
        """ggml's name of the element type."""
        return ggml_types()[self.type].name


def tensor_nbytes(type: int, shape: Sequence[int]) -> int:
    """Bytes of a contiguous tensor; dimension 0 must be a multiple of the type's block."""
    kind = ggml_types()[type]
    nbytes = kind.nbytes * (shape[0] // kind.block)
    for n in shape[1:]:
        nbytes *= n
    return nbytes
