"""Reference of the shared heap in Python, for the C of `decode/native`."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace
from itertools import accumulate


def best_first(gains: Sequence[list[float]], most: int) -> list[tuple[int, float]]:
    """Best first over several lists: (list, gain) of up to `most` entries, each list in its own order; what stands together is
    taken by its mean, so that means fall."""
    keys, taken = [_falling(one) for one in gains], list[tuple[int, float]]()
    heap = [(-of[0], i, 0) for i, of in enumerate(keys) if of]
    heapify(heap)
    while heap and len(taken) < most:
        _, i, at = heap[0]
        taken.append((i, gains[i][at]))
        if at + 1 < len(keys[i]):
            heapreplace(heap, (-keys[i][at + 1], i, at + 1))
        else:
            heappop(heap)
    return taken


def _falling(gains: list[float]) -> list[float]:
    """The means of adjacent entries, pooled until they fall."""
    pools: list[tuple[float, int]] = []
    for gain in gains:
        total, count = gain, 1
        while pools and pools[-1][0] * count < total * pools[-1][1]:
            before, n = pools.pop()
            total, count = total + before, count + n
        pools.append((total, count))
    return [total / count for total, count in pools for _ in range(count)]


def best_end(sums: list[float], ends: Sequence[int], ms: Sequence[float], flat: float) -> int:
    """How many entries are worth most per millisecond. sums: what a step with so many is worth; ends: those that fill a pass."""
    most, wider = len(sums) - 1, float("inf")
    last = next((i for i, end in enumerate(ends) if end >= most), len(ends) - 1)
    rates: list[tuple[float, int]] = []
    for end, took in list(zip(ends, ms))[last::-1]:
        if took < (1 - flat) * wider:
            wider = max(took, 1e-9)
            rates.append((sums[min(end, most)] / wider, -min(end, most)))
    return -max(rates)[1]


def shares(
    gains: Sequence[list[float]],
    counts: list[int],
    room: int,
    ends: Sequence[int],
    ms: Sequence[float],
    flat: float = 0.0,
) -> list[int]:
    """See `shared_heap.shares`."""
    taken = best_first([one[count:] for one, count in zip(gains, counts)], room)
    worth = 0.0
    for one, count in zip(gains, counts):
        worth += _sum(one[:count])
    sums = list(accumulate([gain for _, gain in taken], initial=worth))
    found = list(counts)
    for i, _ in taken[: best_end(sums, ends, ms, flat)]:
        found[i] += 1
    return found


def _sum(numbers: Sequence[float]) -> float:
    """From the left, each sum rounded: `sum` has another way since Python 3.12."""
    return list(accumulate(numbers, initial=0.0))[-1]
