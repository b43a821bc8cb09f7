"""Generator of the C source of the cffi module ``dflash_ggml.decode.native._native`` (called by CMake).

usage: build_ffi.py OUTPUT.c
"""

from __future__ import annotations

import argparse
from pathlib import Path

import cffi

MODULE = "dflash_ggml.decode.native._native"
FOLDER = Path(__file__).resolve().parent
HEADERS = (  # each after those it builds on
    "version.h",
    "lookup_rates.h",
    "lookup.h",
    "calibration.h",
    "drafts.h",
    "trees.h",
    "shared_heap.h",
    "ngram_index.h",
    "glance.h",
)


def make_ffi() -> cffi.FFI:
    """An FFI with every declaration, ready to emit C code."""
    ffi = cffi.FFI()
    for name in HEADERS:
        ffi.cdef((FOLDER / name).read_text(encoding="utf-8"))
    ffi.set_source(
        MODULE,
        "#include <stddef.h>\n#include <stdint.h>\n" + "".join(f'#include "{name}"\n' for name in HEADERS),
    )
    return ffi


def main() -> None:
    """Write the C source of the binding to the path that is the one argument."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    make_ffi().emit_c_code(str(parser.parse_args().output))


if __name__ == "__main__":
    main()
