"""Batch sizes of prefill.

Full batches, then pieces of few widths, since every width is a graph to build: padded columns would do with fewer still, but
the recurrent layers would take the padding in. A machine that is slow, or a model that is large, gets smaller batches, so that
the caller gets progress and can cancel.
"""

from __future__ import annotations

CHOICES = (4096, 2048, 1024, 512)  # tokens of a full batch on a GPU, as memory allows
CPU_BATCH = 256  # bench/notes-prefill.md
SLOWEST, QUICK = 0.5, 0.24  # seconds: longer batches are made smaller, and while they are shorter larger
FINEST = 8
# (at least, multiple): what is left goes in pieces of few widths; finer ones save a pass a prompt (bench/notes-serving.md)
_GRAINS = ((1024, 256), (64, 64), (FINEST, FINEST))
_FIRST = {True: 1024, False: 128}  # tokens to begin with where the clock decides, on a GPU and on the CPU
_LEAST = 32  # what no clock goes below: weights would be read for too few tokens


def besides(n: int) -> int:
    """Columns that n sequences that decode take in the pass of a prompt: multiples, so that few graphs are built."""
    return -(-n // FINEST) * FINEST


class BatchSizes:
    """Sizes of the passes of a prompt.

    Args:
        most: Tokens of a full batch.
        paced: Whether the clock may lower that.
        flat: From so many tokens on a pass takes about as long whatever its size, so that what is left over goes into
            one (None: no such number).
    """

    def __init__(self, most: int, paced: bool = False, is_gpu: bool = False, flat: int | None = None) -> None:
        self.most, self.paced, self.flat = most, paced and flat is None, flat
        self.limit = min(most, _FIRST[is_gpu]) if self.paced else most

    def next(self, left: int) -> int:
        """Tokens of the next pass when `left` are still to come; a number that it gave once it gives again."""
        if left >= self.limit:
            return self.limit
        if self.flat is not None and left >= self.flat:
            return left - left % FINEST
        return next((left - left % grain for least, grain in _GRAINS if left >= least), left)

    def beside(self, left: int, others: int, most: int) -> int:
        """The same in a pass with the columns of so many sequences that decode: the widths of `next` are of all columns, at most
        `most` of them unless that is too few."""
        columns = besides(others)
        return max(self.next(min(left + columns, most)) - columns, min(left, FINEST))

    def took(self, n: int, seconds: float) -> None:
        """A pass of `n` tokens took so long."""
        if not self.paced or n < self.limit:
            return
        if seconds > SLOWEST:
            fits = int(n * SLOWEST / seconds)
            self.limit = max(min(1 << (fits.bit_length() - 1), n) if fits else 0, min(_LEAST, self.most))
        elif seconds < QUICK:
            self.limit = min(2 * n, self.most)
