"""How many tokens of a prompt go into one pass.

Full batches, then pieces of few widths, since every width is a graph to build: padded columns would do with fewer still, but
the recurrent layers would take the padding in. A machine that is slow, or a model that is large, gets smaller batches, so that
whoever waits hears of progress and can cancel.
"""

from __future__ import annotations

CHOICES = (4096, 2048, 1024, 512)  # tokens of a full batch on a GPU, as memory allows
CPU_BATCH = 512
SLOWEST, QUICK = 0.5, 0.2  # seconds: longer batches are made smaller, and while they are shorter larger
_GRAINS = (256, 8)  # pieces of what is left are multiples of these
_FIRST_CPU, _LEAST = 128, 32  # tokens that a CPU begins with, and that no clock goes below


class BatchSizes:
    """Sizes of the passes of a prompt. most: tokens of a full batch. paced: whether the clock may lower that.

    narrow: columns up to which the device has kernels for few columns, 0 if none: what is less than 256 goes there.
    """

    def __init__(self, most: int, paced: bool = False, is_gpu: bool = False, narrow: int = 0) -> None:
        self.most, self.paced, self.narrow = most, paced, narrow
        self.limit = min(most, _FIRST_CPU) if paced and not is_gpu else most

    def next(self, left: int) -> int:
        """Tokens of the next pass when `left` are still to come; a number that it gave once it gives again."""
        if left >= self.limit:
            return self.limit
        if self.narrow <= left < _GRAINS[0] and self.narrow:
            return self.narrow
        return next((left - left % grain for grain in _GRAINS if left >= grain), left)

    def took(self, n: int, seconds: float) -> None:
        """A pass of `n` tokens took so long."""
        if not self.paced or n < self.limit:
            return
        if seconds > SLOWEST:
            fits = int(n * SLOWEST / seconds)
            self.limit = max(min(1 << (fits.bit_length() - 1), n) if fits else 0, min(_LEAST, self.most))
        elif seconds < QUICK:
            self.limit = min(2 * n, self.most)
