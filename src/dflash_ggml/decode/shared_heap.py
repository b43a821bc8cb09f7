"""One heap over the candidates of several trees, each cut from its front.

An entry that is worth more than one before it lifts that one: entries that are joined so count by their mean. Any number of
entries then has as large a sum as lists that must be taken from the front allow, but for those cut within such a run.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from .native import doubles, ffi, lib

_INTS, _DOUBLES = ffi.typeof("int32_t[]"), ffi.typeof("double[]")


def shares(
    gains: NDArray[np.float64],
    widths: Items[int],
    counts: Items[int],
    room: int,
    ends: Items[int],
    ms: Items[float],
    flat: float = 0.0,
) -> list[int]:
    """How many entries of each list are taken, from its front: so many as are worth most per millisecond.

    Args:
        gains: What each entry is worth, list after list, of these widths.
        counts: Entries that are in anyhow.
        room: Entries beside those.
        ends: Numbers of entries beside those that fill a pass, rising.
        ms: What a step with so many takes.
        flat: An end that saves less than this share of the time of a wider one is left out.

    Raises:
        ValueError: For numbers outside of their ranges.
    """
    n, firsts = len(widths), [0, *accumulate(widths)]
    if not n or len(counts) != n or not ends or len(ms) != len(ends) or len(gains) != firsts[-1]:
        raise ValueError(
            f"{n} lists with {len(counts)} counts, {len(gains)} gains for {firsts[-1]}, {len(ends)} ends with {len(ms)} times"
        )
    taken = ffi.new(_INTS, counts)
    limits = len(ends), ffi.new(_INTS, ends), ffi.new(_DOUBLES, ms), flat
    found = lib.heap_shares(n, doubles(gains), ffi.new(_INTS, firsts), taken, room, *limits)
    if found == -1:
        raise MemoryError(f"a heap of {len(gains)} entries")
    if found < 0:
        raise ValueError(
            f"widths {list(widths)}, counts {list(counts)} or ends {list(ends)} are out of range"
        )
    return ffi.unpack(taken, n)
