"""Inner loops of a step on the host, in C: ``ffi`` and ``lib``.

In Python, growing a tree, calibrating it and counting results took 0.25 to 0.4 ms of a 10 ms step while the device waits; these
loops are C, and decisions stay in Python (docs/decisions/0007).

The C is portable C11 without global state: state is in structs owned by Python objects. The wrappers check sizes once, so that no
function accesses memory outside its arrays; indices inside arrays are checked in C. Both the compiler and cffi (`build_ffi`) read
the headers, so a declaration cannot differ from its function. Sums are float64, in the order of the formulas and without fused
operations: every compiler gives the same trees with the same libm.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

VERSION = 6  # of the declarations, as in version.h

try:
    from ._native import ffi, lib

    if lib.NATIVE_VERSION != VERSION:
        raise ImportError(f"built with version {lib.NATIVE_VERSION} of its declarations, not {VERSION}")
except (ImportError, AttributeError) as error:  # AttributeError: built without a version
    raise ImportError(
        "the compiled part of dflash_ggml.decode is missing or of other sources: make build, or pip install "
        "--force-reinstall --no-deps .",
        name=__name__,
    ) from error

__all__ = ["NONE", "doubles", "ffi", "floats", "ints", "lib", "octets"]

NONE = ffi.NULL
_INTS, _FLOATS, _DOUBLES, _BYTES = (
    ffi.typeof(f"{name}[]") for name in ("int32_t", "float", "double", "uint8_t")
)


def ints(array: ArrayLike) -> Any:
    """An array's memory as int32, kept alive by the returned object; an array of another type is copied."""
    return ffi.from_buffer(_INTS, np.ascontiguousarray(array, np.int32))


def floats(array: ArrayLike) -> Any:
    """As `ints`, float32."""
    return ffi.from_buffer(_FLOATS, np.ascontiguousarray(array, np.float32))


def doubles(array: ArrayLike) -> Any:
    """As `ints`, float64."""
    return ffi.from_buffer(_DOUBLES, np.ascontiguousarray(array, np.float64))


def octets(array: ArrayLike) -> Any:
    """As `ints`, uint8."""
    return ffi.from_buffer(_BYTES, np.ascontiguousarray(array, np.uint8))
