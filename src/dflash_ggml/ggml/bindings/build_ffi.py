"""Generator of the C source of the cffi module ``dflash_ggml.ggml.bindings._bindings`` (called by CMake).

usage: build_ffi.py OUTPUT.c [--cuda]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import cffi

MODULE = "dflash_ggml.ggml.bindings._bindings"
CDEF_DIR = Path(__file__).resolve().parent / "cdef"
CUDA_CDEF = "90_cuda.h"


def cdef_files(cuda: bool) -> list[Path]:
    """Declaration files in the order in which cffi must read them (types first)."""
    return [path for path in sorted(CDEF_DIR.glob("*.h")) if cuda or path.name != CUDA_CDEF]


def make_ffi(cuda: bool = False) -> cffi.FFI:
    """An FFI with every declaration of this build, ready to emit C code."""
    ffi = cffi.FFI()
    for path in cdef_files(cuda):
        ffi.cdef(path.read_text(encoding="utf-8"))
    includes = ['#include "shims.h"']
    if cuda:
        includes.append('#include "ggml-cuda.h"')
    ffi.set_source(MODULE, "\n".join(includes) + "\n")
    return ffi


def main() -> None:
    """Write the C source of the binding to the path that is the one argument."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--cuda", action="store_true", help="also bind the CUDA entry points")
    args = parser.parse_args()
    make_ffi(args.cuda).emit_c_code(str(args.output))


if __name__ == "__main__":
    main()
