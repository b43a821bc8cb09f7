"""Prefill budget: when a chunk of a prompt is prefilled beside running sequences, and its size.

Every decode step earns time for prefilling, and a chunk runs when its expected time has been earned. What can be earned ahead is
limited to what fits between two tokens, so one balance gives both promises: the share of time that sequences keep, and the
longest gap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Protocol

from ..engine.batches import BatchSizes

# prefill time per decode time, on a GPU: sequences keep a third of their calm speed; on a CPU: 1.3 times slower
SHARE = {True: 1.95, False: 0.3}
MAX_GAP = 0.15  # seconds between two tokens, a chunk and the step, at most
GAP_STEPS = 3  # or so many decode steps, where those are longer
MARGIN = 0.9  # of that gap is planned: a chunk that takes 10 % longer than expected keeps the promise too
SIZES = {True: (256, 4096), False: (16, 256)}  # smallest and largest chunk: worth its pass, and no long stall
# no prompt overtakes one that arrived 1 / AGEING times its prefill time before
AGEING = 0.125
RECENT = 64  # chunks that costs are known from: a size that was slow once is tried again


class Prompt(Protocol):
    """A prompt that is not prefilled yet."""

    @property
    def remaining(self) -> int:
        """Tokens to prefill."""

    @property
    def since(self) -> float:
        """Its arrival, in seconds."""

    @property
    def is_scoring(self) -> bool:
        """Whether the prompt scorer takes it in, whose chunks take other times than the target's."""


class ChunkCosts:
    """Seconds that chunks of a prompt take, by their tokens."""

    def __init__(self) -> None:
        self._chunks = deque[tuple[int, float]](maxlen=RECENT)  # tokens and seconds
        self._costs = list[tuple[float, float]]()  # the same, a median for each power of two, ascending

    def took(self, tokens: int, seconds: float) -> None:
        """A chunk took so long."""
        self._chunks.append((tokens, seconds))
        sizes = sorted({n.bit_length() for n, _ in self._chunks})
        groups = [[chunk for chunk in self._chunks if chunk[0].bit_length() == size] for size in sizes]
        self._costs = [(median(n for n, _ in group), median(s for _, s in group)) for group in groups]

    def seconds(self, tokens: int) -> float:
        """Expected seconds of a chunk: on the line through its two measured neighbours, 0 if none is known."""
        if not self._costs or tokens <= self._costs[0][0]:
            return self._costs[0][1] if self._costs else 0.0
        above = next((i for i, (n, _) in enumerate(self._costs) if n >= tokens), len(self._costs) - 1)
        (n0, s0), (n1, s1) = self._costs[above - 1] if above else (0.0, 0.0), self._costs[above]
        return s1 + (tokens - n1) * max(s1 - s0, 0.0) / (n1 - n0)


class PrefillBudget:
    """Time for prompts beside decoding sequences. It has no clock: callers say how long things took."""

    def __init__(self, is_gpu: bool) -> None:
        self._share = SHARE[is_gpu]
        self._least, self._most = SIZES[is_gpu]
        # seconds; a median ignores one that built a graph
        self._steps = deque([MAX_GAP / GAP_STEPS] * 5, maxlen=5)
        self._costs = {is_scoring: ChunkCosts() for is_scoring in (False, True)}
        self._balance = self._limit  # seconds of prefilling that decoding sequences may wait for now

    def choose(self, prompts: Sequence[Prompt], n_decoding: int, now: float) -> tuple[int, int] | None:
        """Which prompt's next chunk runs now.

        Args:
            prompts: those that can be prefilled, in any order.
            n_decoding: sequences that would wait for the chunk.
            now: on the clock of `Prompt.since`.

        Returns:
            The index of a prompt and the tokens of its chunk, or None: decode a step first.
        """
        if not n_decoding:
            self._balance = self._limit
        if not prompts:
            return None

        def urgency(prompt: Prompt) -> float:
            costs = self._costs[prompt.is_scoring]
            size = self._size(costs) if n_decoding else self._most
            per_token = costs.seconds(size) / size or 1e-3  # any value orders by length until one is known
            return (AGEING * (now - prompt.since)) ** 2 - (prompt.remaining * per_token) ** 2

        chosen = max(prompts, key=urgency)
        costs = self._costs[chosen.is_scoring]
        tokens = BatchSizes(self._size(costs) if n_decoding else self._most).next(chosen.remaining)
        index = next(i for i, prompt in enumerate(prompts) if prompt is chosen)
        # a chunk that never fits, or of unknown cost, runs once all that can be earned is there
        needed = min(costs.seconds(tokens) or self._limit, self._limit)
        return None if n_decoding and self._balance < needed else (index, tokens)

    def prefilled(
        self, tokens: int, seconds: float, decoding: bool, is_warm: bool = True, is_scoring: bool = False
    ) -> None:
        """A chunk took so long.

        Args:
            tokens: of the chunk.
            seconds: until the device was done.
            decoding: whether sequences waited for it.
            is_warm: False if a graph was built for it, which tells nothing of the next one.
            is_scoring: The prompt scorer read it.
        """
        costs = self._costs[is_scoring]
        if decoding:  # limited: a machine that slept in a chunk must not hold up prompts for hours
            self._balance -= min(seconds, max(2 * costs.seconds(tokens), self._limit))
        if is_warm:
            costs.took(tokens, seconds)

    def decoded(self, seconds: float, n: int) -> None:
        """A step of n sequences took so long."""
        if not n:
            return
        self._steps.append(seconds)
        self._earn(seconds)

    def joined(self, tokens: int, seconds: float, is_warm: bool = True) -> float:
        """A chunk and a step took so long in one pass.

        Returns:
            What of it is the step's: the shortest that was measured lately.
        """
        step = min(*self._steps, seconds)
        self.prefilled(tokens, seconds - step, True, is_warm)
        self._earn(step)
        return step

    def _earn(self, step: float) -> None:
        self._balance = min(self._balance + self._share * step, self._limit)

    def lent(self, seconds: float) -> None:
        """Decoding sequences waited so long for work that is no prompt of theirs."""
        self._balance -= seconds

    @property
    def _limit(self) -> float:
        """Seconds of chunks that fit between two steps."""
        step = median(self._steps)
        return MARGIN * max(MAX_GAP, GAP_STEPS * step) - step

    def _size(self, costs: ChunkCosts) -> int:
        """Tokens of a chunk that sequences may wait for: a multiple of the smallest, so that few graphs are built."""
        size = self._least
        while size < self._most and 0 < costs.seconds(size + self._least) <= self._limit:
            size += self._least
        return size
