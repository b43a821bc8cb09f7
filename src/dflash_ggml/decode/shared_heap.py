"""One heap over the candidates of several trees, each of which is taken from its front."""

from __future__ import annotations

from collections.abc import Sequence


def best_first(gains: Sequence[list[float]], most: int) -> list[tuple[int, float]]:
    """Best first over several lists: (list, gain) of up to `most` entries, each list in its own order.

    An entry that is worth more than one before it lifts that one: what stands together is taken by its mean, so that any number
    of entries has as large a sum as lists that must be taken from the front allow, but for those cut within such a run.
    """
    entries = [(-key, i, at) for i, one in enumerate(gains) for at, key in enumerate(_falling(one))]
    entries.sort()  # as the keys fall, the order in which a heap of the fronts would give them
    return [(i, gains[i][at]) for _, i, at in entries[: max(most, 0)]]


def _falling(gains: list[float]) -> list[float]:
    """The means of adjacent entries, pooled until they fall."""
    if sorted(gains, reverse=True) == gains:
        return gains
    pools: list[tuple[float, int]] = []
    for gain in gains:
        total, count = gain, 1
        while pools and pools[-1][0] * count < total * pools[-1][1]:
            before, n = pools.pop()
            total, count = total + before, count + n
        pools.append((total, count))
    return [total / count for total, count in pools for _ in range(count)]
