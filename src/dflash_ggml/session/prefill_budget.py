"""Prefill budget: when a chunk of a prompt is prefilled beside running sequences, and its size.

Every decode step adds time to a balance, and a chunk runs once the balance covers its expected time. The balance is capped at
what fits between two tokens, so it guarantees both the sequences' share of time and the longest gap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from ..engine.batches import BatchSizes
from .generation import Generation

# prefill time per decode time; on a GPU sequences keep a third of their usual speed, on a CPU 1 / 1.3
SHARE = {True: 1.95, False: 0.3}
MAX_GAP = 0.15  # longest gap between two tokens, in seconds: a chunk and a step
GAP_STEPS = 3  # or so many decode steps, if longer
MARGIN = 0.9  # planned share of that gap: a chunk may take 10 % longer than expected
SIZES = {True: (256, 4096), False: (16, 256)}  # smallest and largest chunk: efficient, and no long stall
# no prompt overtakes one that arrived more than 1 / AGEING of its prefill time earlier
AGEING = 0.125
RECENT = 64  # chunks kept for the costs: a size that was slow once is tried again


class ChunkCosts:
    """Expected seconds of prefill chunks, by tokens."""

    def __init__(self) -> None:
        self._chunks = deque[tuple[int, float]](maxlen=RECENT)  # tokens and seconds
        self._costs = list[tuple[float, float]]()  # the same, a median for each power of two, ascending

    def took(self, tokens: int, seconds: float) -> None:
        """Record a chunk's time."""
        self._chunks.append((tokens, seconds))
        sizes = sorted({n.bit_length() for n, _ in self._chunks})
        groups = [[chunk for chunk in self._chunks if chunk[0].bit_length() == size] for size in sizes]
        self._costs = [(median(n for n, _ in group), median(s for _, s in group)) for group in groups]

    def seconds(self, tokens: int) -> float:
        """Expected seconds of a chunk, interpolated between measured sizes; 0 if none is known."""
        if not self._costs or tokens <= self._costs[0][0]:
            return self._costs[0][1] if self._costs else 0.0
        above = next((i for i, (n, _) in enumerate(self._costs) if n >= tokens), len(self._costs) - 1)
        (n0, s0), (n1, s1) = self._costs[above - 1] if above else (0.0, 0.0), self._costs[above]
        return s1 + (tokens - n1) * max(s1 - s0, 0.0) / (n1 - n0)


class PrefillBudget:
    """Balance of prefill time beside decoding sequences. It has no clock: callers pass durations."""

    def __init__(self, is_gpu: bool) -> None:
        self._share = SHARE[is_gpu]
        self._least, self._most = SIZES[is_gpu]
        # seconds; the median ignores a step that built a graph
        self._steps = deque([MAX_GAP / GAP_STEPS] * 5, maxlen=5)
        self._costs = {is_scoring: ChunkCosts() for is_scoring in (False, True)}
        self._balance = (
            self._limit
        )  # the balance: seconds of prefill that decoding sequences may wait for now

    def choose(self, prompts: Sequence[Generation], n_decoding: int, now: float) -> tuple[int, int] | None:
        """Choose the prompt whose next chunk runs now.

        Args:
            prompts: Prompts that can be prefilled, in any order.
            n_decoding: Sequences that would wait for the chunk.
            now: Seconds on the clock of `Prompt.since`.

        Returns:
            The index of a prompt and the tokens of its chunk; None: decode a step first.
        """
        if not n_decoding:
            self._balance = self._limit
        if not prompts:
            return None

        def urgency(prompt: Generation) -> float:
            costs = self._costs[prompt.is_scoring]
            size = self._size(costs) if n_decoding else self._most
            per_token = costs.seconds(size) / size or 1e-3  # any value orders by length until a cost is known
            return (AGEING * (now - prompt.since)) ** 2 - (prompt.remaining * per_token) ** 2

        chosen = max(prompts, key=urgency)
        costs = self._costs[chosen.is_scoring]
        tokens = BatchSizes(self._size(costs) if n_decoding else self._most).next(chosen.remaining)
        index = next(i for i, prompt in enumerate(prompts) if prompt is chosen)
        # a chunk that never fits, or of unknown cost, runs once the balance is full
        needed = min(costs.seconds(tokens) or self._limit, self._limit)
        return None if n_decoding and self._balance < needed else (index, tokens)

    def prefilled(
        self, tokens: int, seconds: float, decoding: bool, is_warm: bool = True, is_scoring: bool = False
    ) -> None:
        """A chunk took so long.

        Args:
            tokens: Tokens of the chunk.
            seconds: Time until the device was done.
            decoding: Whether sequences waited for it.
            is_warm: False if a graph was built for it: the time is not representative.
            is_scoring: Whether the prompt scorer processed it.
        """
        costs = self._costs[is_scoring]
        if decoding:  # capped: a suspend during a chunk must not hold up prompts for hours
            self._balance -= min(seconds, max(2 * costs.seconds(tokens), self._limit))
        if is_warm:
            costs.took(tokens, seconds)

    def decoded(self, seconds: float, n: int) -> None:
        """Record a step of n sequences."""
        if not n:
            return
        self._steps.append(seconds)
        self._earn(seconds)

    def joined(self, tokens: int, seconds: float, is_warm: bool = True) -> float:
        """Record a chunk and a step in one pass.

        Returns:
            The step's part of the time: the shortest recent step.
        """
        step = min(*self._steps, seconds)
        self.prefilled(tokens, seconds - step, True, is_warm)
        self._earn(step)
        return step

    def _earn(self, step: float) -> None:
        self._balance = min(self._balance + self._share * step, self._limit)

    def debit(self, seconds: float) -> None:
        """Debit time that decoding sequences waited for other work."""
        self._balance -= seconds

    @property
    def _limit(self) -> float:
        """Seconds of prefill that fit between two steps."""
        step = median(self._steps)
        return MARGIN * max(MAX_GAP, GAP_STEPS * step) - step

    def _size(self, costs: ChunkCosts) -> int:
        """Tokens of a chunk that sequences may wait for: a multiple of the smallest chunk, so that few graphs are built."""
        size = self._least
        while size < self._most and 0 < costs.seconds(size + self._least) <= self._limit:
            size += self._least
        return size
