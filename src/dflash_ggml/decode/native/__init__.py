"""The inner loops of the host's part of a step, in C: ``ffi`` and ``lib``.

A step of one text on a fast GPU takes some ten milliseconds, and growing a tree, calibrating it and counting what came of it
took 0.25 to 0.4 of them in Python: a microsecond for each node in each of several loops, while the device waits. So these
loops are C, and what decides (`adaptive`, the step) stays Python. The other design was more functions in the ggml binding's
shims: one extension less to build, but this room is pure logic and imports no device code, and a change of a tree's order
would mean linking ggml anew.

The C is portable C11 without state of its own: what is kept lives in structs that Python objects own. The wrappers beside it
check sizes, once, so that no function reads or writes outside of its arrays; indices inside of arrays are checked in C. Every
header is read twice, by the compiler and by cffi (`build_ffi`), so a declaration cannot differ from its function. Sums are made
in float64 and in the order of the formulas, without fused operations: every compiler gives the same trees with the same libm.
"""

from __future__ import annotations

from ._native import ffi, lib

__all__ = ["ffi", "lib"]
