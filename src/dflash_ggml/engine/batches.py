"""Batch sizes of prefill.

Full batches first, then the remainder in a few fixed widths, since each width needs a graph of its own; padding would corrupt
the recurrent state. Slow machines and large models get smaller batches, so that the caller sees progress and can cancel.
"""

from __future__ import annotations

CHOICES = (4096, 2048, 1024, 512)  # tokens of a full batch on a GPU, as memory allows
CPU_BATCH = 256  # bench/notes-prefill.md
SLOWEST, QUICK = 0.5, 0.24  # seconds: above the first batches shrink, below the second they grow
FINEST = 8
# (at least, multiple): widths of the remainder; the fine ones save a pass per prompt (bench/notes-serving.md)
_GRAINS = ((1024, 256), (64, 64), (FINEST, FINEST))
_FIRST = {True: 1024, False: 128}  # tokens of the first batch when paced, on a GPU and on the CPU
_LEAST = 32  # smallest paced batch: below it weights are read for too few tokens


def joined_columns(n: int) -> int:
    """Columns of n decoding sequences in a prefill pass, rounded up so that few graphs are built."""
    return -(-n // FINEST) * FINEST


class BatchSizes:
    """Sizes of prefill passes.

    Args:
        most: Tokens of a full batch.
        paced: Whether measured pass times may lower that.
        flat: Tokens from which the pass time no longer depends on the size, so that the whole remainder is one pass
            (None: it always depends).
    """

    def __init__(self, most: int, paced: bool = False, is_gpu: bool = False, flat: int | None = None) -> None:
        self.most, self.paced, self.flat = most, paced and flat is None, flat
        self.limit = min(most, _FIRST[is_gpu]) if self.paced else most

    def next(self, left: int) -> int:
        """Tokens of the next pass when `left` remain; the same answer for the same state."""
        if left >= self.limit:
            return self.limit
        if self.flat is not None and left >= self.flat:
            return left - left % FINEST
        return next((left - left % grain for least, grain in _GRAINS if left >= least), left)

    def joined(self, left: int, others: int, most: int) -> int:
        """As `next`, in a pass that also decodes `others` sequences: at most `most` columns, unless that leaves too few."""
        columns = joined_columns(others)
        return max(self.next(min(left + columns, most)) - columns, min(left, FINEST))

    def took(self, n: int, seconds: float) -> None:
        """Record the seconds of a pass of `n` tokens."""
        if not self.paced or n < self.limit:
            return
        if seconds > SLOWEST:
            fits = int(n * SLOWEST / seconds)
            self.limit = max(min(1 << (fits.bit_length() - 1), n) if fits else 0, min(_LEAST, self.most))
        elif seconds < QUICK:
            self.limit = min(2 * n, self.most)
