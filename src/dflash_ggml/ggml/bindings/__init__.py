"""The compiled binding of the vendored ggml: ``ffi`` and ``lib``.

Everything above this package goes through :mod:`dflash_ggml.ggml.graph`, which checks shapes first: a check that
fails inside ggml ends the process.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from dflash_ggml.ggml.bindings.variants import load_variant

load_variant(__name__)  # first: later imports find this one

from dflash_ggml.ggml.bindings import callbacks  # noqa: E402
from dflash_ggml.ggml.bindings._bindings import ffi, lib  # noqa: E402

__all__ = ["Tensor", "ffi", "lib"]

Tensor: TypeAlias = Any  # a `struct ggml_tensor *`: cffi has one type for all pointers

_missing = lib.dflash_missing_cpu_feature()
if _missing != ffi.NULL:
    raise ImportError(
        f"dflash-ggml was compiled for a CPU with {ffi.string(_missing).decode()}, which this one lacks: "
        "build it on this machine, or anywhere with -C cmake.define.DFLASH_PORTABLE=ON",
        name=__name__,
    )
callbacks.install()
