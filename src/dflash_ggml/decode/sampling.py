"""The sampler: the next token from the target's logits.

Order: processors, logit bias, penalties; then, by temperature, < 0: a draw from the plain softmax; = 0: the
largest logit; > 0: mirostat if requested, else top-k, typical, top-p, min-p, temperature, draw. These are the
semantics of llama-cpp-python's sampler chain, so that the same options give the same distribution.

Seeds: a sampled token takes exactly one number from the generator and a greedy one none, and the draw inverts
the cumulative distribution in token-id order. With equal logits the output of a seed therefore depends neither
on the draft nor on the tree; and a last-bit difference in the logits moves the cumulative distribution by a
last bit only, where an order by probability could swap two tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import DflashError
from .sampling_params import SamplingParams, require

# (history ids int32 [n], read-only, scores float32 [V]) -> scores float32 [V]; may change the scores in place.
Processor = Callable[[NDArray[np.int32], NDArray[np.float32]], NDArray[np.float32]]

_MIROSTAT_FIT = 100  # most probable tokens from which mirostat v1 estimates the tail's exponent
BLOCK = 512  # weights per block of the two-level draw
_NONE = np.empty(0, np.int64)


_TAIL = 256  # trailing known tokens that are compared with the list


class History:
    """Ids of a sequence that mostly grows, and their counts.

    Args:
        n_vocab: Ids lie below it.
        counted: Keep `counts` too.
    """

    def __init__(self, n_vocab: int, counted: bool) -> None:
        self._tokens: Sequence[int] | None = None
        self._tail: list[int] = []
        self._n = 0
        self._buffer = np.empty(0, np.int32)
        self._counts = np.zeros(n_vocab, np.int64) if counted else None
        self._seen = np.empty(n_vocab if counted else 0, np.int64)
        self._n_seen = 0

    @property
    def ids(self) -> NDArray[np.int32]:
        """The ids, int32 [n], read-only; a view keeps its values when the sequence grows."""
        view = self._buffer[: self._n]
        view.flags.writeable = False
        return view

    @property
    def counts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Distinct ids, in no order, with their counts."""
        assert self._counts is not None
        seen = self._seen[: self._n_seen]
        return seen, self._counts[seen]

    def follow(self, tokens: Sequence[int]) -> None:
        """Update to `tokens`: if the list seen last has only grown, just the new tokens; else all of it.

        A change further than 256 tokens before the list's last length is not detected; pass a new list then.
        """
        if not self._goes_on(tokens):
            self._n = self._n_seen = 0
            self._buffer = np.empty(0, np.int32)  # views may use the old array
            if self._counts is not None:
                self._counts[:] = 0
        self._tokens = None  # an id outside the vocabulary must not leave partial state
        self._append(np.asarray(tokens[self._n :], np.int32))
        self._tokens, self._tail = tokens, list(tokens[max(self._n - _TAIL, 0) : self._n])

    def _goes_on(self, tokens: Sequence[int]) -> bool:
        if tokens is not self._tokens or len(tokens) < self._n:
            return False
        return list(tokens[self._n - len(self._tail) : self._n]) == self._tail

    def _append(self, new: NDArray[np.int32]) -> None:
        n = self._n + len(new)
        if n > len(self._buffer):
            grown = np.empty(max(2 * len(self._buffer), n + 256), np.int32)
            grown[: self._n] = self._buffer[: self._n]
            self._buffer = grown
        self._buffer[self._n : n] = new
        self._n = n
        if self._counts is not None:
            first = np.unique(new[self._counts[new] == 0])
            self._seen[self._n_seen : self._n_seen + len(first)] = first
            self._n_seen += len(first)
            np.add.at(self._counts, new, 1)


@runtime_checkable
class Mask(Protocol):
    """A processor that only forbids tokens and can check single ones, so that it needs no whole row."""

    def __call__(self, ids: NDArray[np.int32], scores: NDArray[np.float32], /) -> NDArray[np.float32]: ...

    def allows(self, history: NDArray[np.int32], ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each of these tokens may follow the history."""
        ...


class Sampler:
    """Draws tokens for one sequence; holds the random generator and mirostat's running state.

    Call `sample` once per emitted token, in order.

    Args:
        n_exempt: Length of a prefix, such as the prompt, that no penalty counts.

    Raises:
        ConfigError: On bad options or a logit bias for an id outside the vocabulary.
    """

    def __init__(
        self, params: SamplingParams, n_vocab: int, processors: Sequence[Processor] = (), *, n_exempt: int = 0
    ) -> None:
        params.validate()
        for token in params.logit_bias:
            require(0 <= token < n_vocab, "logit_bias", token, f"keyed by token ids below {n_vocab}")
        self.params = params
        self.n_vocab = n_vocab
        self.processors = tuple(processors)
        self.rng = np.random.Generator(np.random.PCG64(params.seed))
        self._bias_ids = np.fromiter(params.logit_bias.keys(), np.int64)
        self._bias = np.fromiter(params.logit_bias.values(), np.float32)
        self.penalises = params.penalty_last_n != 0 and (
            params.repeat_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        )
        self._whole = self.penalises and params.penalty_last_n < 0
        self.by_count = params.frequency_penalty != 0 or params.presence_penalty != 0
        self._repeat = float(np.float32(params.repeat_penalty))
        self._masked = bool(self.processors) and all(isinstance(p, Mask) for p in self.processors)
        self._n_exempt = n_exempt
        self._counted = self._whole and not n_exempt
        self._history = History(n_vocab, counted=self._counted)
        self._all_ids = np.arange(n_vocab)
        self._mu = 2 * params.mirostat_tau

    @property
    def greedy(self) -> bool:
        """True if `sample` is the argmax of the row as given, so that the row need not be fetched."""
        return self.params.temperature == 0 and not (self.processors or len(self._bias) or self.penalises)

    @property
    def needs_rows(self) -> bool:
        """True if no reduction of a row will do: processors that are not masks look at all of it, and so does mirostat."""
        unknown = bool(self.processors) and not self._masked
        return unknown or (self.params.mirostat_mode != 0 and self.params.temperature > 0)

    @cached_property
    def only_lowers(self) -> bool:
        """True if bias and penalties raise no token's score."""
        p = self.params
        penalties = p.repeat_penalty >= 1 and p.presence_penalty >= 0 and p.frequency_penalty >= 0
        return (penalties or not self.penalises) and not (self._bias > 0).any()

    @cached_property
    def changes(self) -> bool:
        """True if bias or penalties can change a logit."""
        return self.penalises or len(self._bias) > 0

    @cached_property
    def lowers_recent(self) -> bool:
        """True if all that changes logits are penalties on a window of the history, none of which raises one."""
        return self.penalises and not self._whole and not len(self._bias) and self.only_lowers

    def sample(self, row: NDArray[np.float32], history: Sequence[int] = ()) -> int:
        """The next token.

        A list that grew since the last call costs only its new tokens, any other history a pass over all of it.

        Args:
            row: float32 [V], left unchanged.
            history: Ids of the whole sequence before this token.

        Raises:
            ValueError: On a row of the wrong shape.
            DflashError: On NaN, +inf or nothing but -inf in the logits.
        """
        scores, top = self._scores(row, history)
        if self.params.temperature == 0:
            return int(scores.argmax())
        ids, weights = self._candidates(scores, top)
        index, prob = invert(weights, self.rng.random())
        if self.params.mirostat_mode and self.params.temperature > 0:
            self._mu -= self.params.mirostat_eta * (-math.log2(prob) - self.params.mirostat_tau)
        return int(ids[index])

    def probs(self, row: NDArray[np.float32], history: Sequence[int] = ()) -> NDArray[np.float64]:
        """The distribution from which `sample` would draw now, float64 [V]; takes no random number."""
        scores, top = self._scores(row, history)
        probs = np.zeros(self.n_vocab)
        if self.params.temperature == 0:
            probs[scores.argmax()] = 1
        else:
            ids, weights = self._candidates(scores, top)
            probs[ids] = weights / weights.sum(dtype=np.float64)
        return probs

    def _scores(self, row: NDArray[np.float32], history: Sequence[int]) -> tuple[NDArray[np.float32], float]:
        """The row after processors, bias and penalties, and its maximum."""
        scores = np.asarray(row, np.float32)
        if scores.shape != (self.n_vocab,):
            raise ValueError(f"a row of logits must have shape ({self.n_vocab},), got {scores.shape}")
        if self.processors or len(self._bias) or self.penalises:
            scores = scores.copy()
        if self.processors:
            self._history.follow(history)
            ids = self._history.ids
            for processor in self.processors:
                # Copied, because what a processor returns may be read-only or its own.
                scores = np.array(processor(ids, scores), np.float32)
                if scores.shape != (self.n_vocab,):
                    raise ValueError(f"a processor must return shape ({self.n_vocab},), got {scores.shape}")
        if len(self._bias):
            scores[self._bias_ids] += self._bias
        if self.penalises:
            seen, counts = self.penalised(history)
            scores[seen] = self.penalty(scores[seen], counts)
        top = float(scores.max())
        if not math.isfinite(top):
            raise DflashError(_bad_logits(scores))
        return scores, top

    def forbidden(self, history: Sequence[int], ids: list[int]) -> NDArray[np.bool_] | None:
        """Which of these tokens the masks forbid; None without a mask."""
        if not self.processors:
            return None
        self._history.follow(history)
        asked = np.array(ids, np.int64)
        allowed = [p.allows(self._history.ids, asked) for p in self.processors if isinstance(p, Mask)]
        return ~np.logical_and.reduce(allowed)

    def penalised(self, history: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ids under a penalty, each once, and how often they were seen."""
        if not self.penalises:
            return _NONE, _NONE
        if self._counted:
            self._history.follow(history)
            return self._history.counts
        window = np.sort(np.asarray(self._window(history), np.int64))
        # np.unique takes thrice as long for so few
        starts = np.ones(len(window) + 1, bool)
        np.not_equal(window[1:], window[:-1], out=starts[1:-1])
        (edges,) = starts.nonzero()
        return window[edges[:-1]], edges[1:] - edges[:-1]

    def lowered(self, ids: list[int], logits: list[float], history: Sequence[int]) -> list[tuple[int, float]]:
        """Positions of those tokens that are under a penalty, and their logits after it, as `penalty`; where `lowers_recent`."""
        recent, p, found = self.recent(history), self.params, []
        for at, token in enumerate(ids):
            if token in recent:
                # rounded once: float64 holds such a product and rounds such a quotient as float32 would
                logit = logits[at]
                logit = float(np.float32(logit / self._repeat if logit > 0 else logit * self._repeat))
                if self.by_count:
                    n = recent[token]
                    logit = float(np.float32(logit - (n * p.frequency_penalty + p.presence_penalty)))
                found.append((at, logit))
        return found

    def recent(self, history: Sequence[int]) -> dict[int, int]:
        """Ids under a penalty and, where that counts, how often they were seen; where `lowers_recent`."""
        window = self._window(history)
        return Counter(window) if self.by_count else dict.fromkeys(window, 1)

    def _window(self, history: Sequence[int]) -> Sequence[int]:
        """The tokens that penalties count."""
        n = len(history) if self._whole else self.params.penalty_last_n
        return history[max(len(history) - n, self._n_exempt) :]

    def changed(self, seen: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ids whose logits bias or penalties change, rising.

        Args:
            seen: Those under a penalty.
        """
        if not len(self._bias_ids):
            return seen if not self._counted else np.sort(seen)
        return np.unique(np.concatenate((self._bias_ids, seen)))

    def rescored(
        self,
        ids: NDArray[np.int64],
        logits: NDArray[np.float32],
        seen: NDArray[np.int64],
        counts: NDArray[np.int64],
    ) -> NDArray[np.float32]:
        """The logits of tokens, ids rising, after bias and penalties: the arithmetic of `sample`."""
        if ids is seen:
            return self.penalty(logits, counts)
        scores = logits.copy()
        if len(self._bias):
            at, known = _indices(self._bias_ids, ids)
            scores[at] += self._bias[known]
        if len(seen):
            at, known = _indices(seen, ids)
            scores[at] = self.penalty(scores[at], counts[known])
        return scores

    def penalty(self, seen: NDArray[np.float32], counts: NDArray[np.int64]) -> NDArray[np.float32]:
        """Repeat penalty (arXiv 1909.05858, but negative logits multiplied), then frequency and presence."""
        p = self.params
        seen = np.where(seen > 0, seen / np.float32(p.repeat_penalty), seen * np.float32(p.repeat_penalty))
        if not self.by_count:
            return seen
        return (seen - (counts * p.frequency_penalty + p.presence_penalty)).astype(np.float32)

    def _candidates(
        self, scores: NDArray[np.float32], top: float
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Token ids, rising, from which to draw, and their unnormalised probabilities."""
        p = self.params
        temperature = 1.0
        if p.temperature < 0:
            ids = self._all_ids
        elif p.mirostat_mode == 1:
            ids = self._mirostat_v1(scores)
        elif p.mirostat_mode == 2:
            ids = self._mirostat_v2(scores, top)
        else:
            ids = self._filtered(scores)
            temperature = p.temperature
        if ids is not self._all_ids:
            ids = np.sort(ids)  # filters give them in falling order, also where they leave all
            scores = scores[ids]
        # Relative to the largest logit, so that exp can't overflow; some processors mask with -3e38.
        with np.errstate(over="ignore"):
            weights = scores - scores.max()
            if temperature != 1:
                weights /= np.float32(max(temperature, 1e-30))
        return ids, np.exp(weights, out=weights)

    def _filtered(self, scores: NDArray[np.float32]) -> NDArray[np.int64]:
        p = self.params
        ids = self._all_ids
        if 0 < p.top_k < self.n_vocab:
            ids = largest(scores, p.top_k)
            scores = scores[ids]
        for limit, neutral, keep in ((p.typical_p, 1, typical), (p.top_p, 1, _top_p), (p.min_p, 0, _min_p)):
            if limit != neutral:
                kept = keep(scores, limit)
                ids, scores = ids[kept], scores[kept]
        return ids

    def _mirostat_v1(self, scores: NDArray[np.float32]) -> NDArray[np.int64]:
        """Top-k, k where a Zipf tail fitted to the row has surprise mu (arXiv 2007.14966, algorithm 1)."""
        head = scores[largest(scores, _MIROSTAT_FIT)].astype(np.float64)
        if len(head) == 1:
            return largest(scores, 1)
        t = np.log1p(1 / np.arange(1, len(head)))
        exponent = float(t @ -np.diff(head) / (t @ t))
        excess = exponent - 1
        log_vocab = math.log(self.n_vocab)
        scale = excess / -math.expm1(-excess * log_vocab) if excess else 1 / log_vocab
        log_k = math.log(scale) + self._mu * math.log(2)
        if log_k <= 0:
            return largest(scores, 1)
        if log_k >= exponent * log_vocab:  # always so in a flat row, whose exponent is 0
            return self._all_ids
        return largest(scores, int(math.exp(log_k / exponent)))

    def _mirostat_v2(self, scores: NDArray[np.float32], top: float) -> NDArray[np.int64]:
        """Tokens with a surprise of at most mu bits, at least the best (arXiv 2007.14966, algorithm 2)."""
        log_total = top + math.log(np.exp(scores - np.float32(top)).sum(dtype=np.float64))
        ids = np.flatnonzero(scores >= log_total - self._mu * math.log(2))
        return ids if len(ids) else np.argmax(scores, keepdims=True)


def largest(values: NDArray[np.floating], k: int) -> NDArray[np.int64]:
    """Indices of the k largest values, falling; of equals the lower index first; never those of -inf."""
    n = len(values)
    floor = -np.inf
    if k < n:
        # The k-th largest column maximum is a lower bound of the k-th largest value, and cheap where k << n.
        n_rows = max(min(n // (4 * k), 64), 1)
        columns = values[: n - n % n_rows].reshape(n_rows, -1).max(axis=0)
        floor = np.partition(columns, len(columns) - k)[len(columns) - k]
    ids = np.flatnonzero(values >= floor if floor > -np.inf else values > -np.inf)
    return ids[np.argsort(-values[ids], kind="stable")[:k]]


def log_softmax(row: ArrayLike) -> NDArray[np.float32]:
    """Log-probabilities of a row of logits, float32 [V].

    Raises:
        DflashError: Under the conditions of `Sampler.sample`.
    """
    row = np.asarray(row, np.float32)
    top = row.max()
    if not math.isfinite(top):
        raise DflashError(_bad_logits(row))
    shifted = row - top
    return shifted - np.float32(math.log(np.exp(shifted).sum(dtype=np.float64)))


def token_log_probs(row: ArrayLike, token: int, n_top: int) -> tuple[float, list[tuple[int, float]]]:
    """The log-probability of `token` and the n_top most probable (id, log-probability) pairs, falling."""
    log_probs = log_softmax(row)
    best = largest(log_probs, n_top) if n_top > 0 else ()
    return float(log_probs[token]), [(int(i), float(log_probs[i])) for i in best]


def invert(weights: NDArray[np.float32], uniform: float) -> tuple[int, float]:
    """The index at which the cumulative distribution passes `uniform` in [0, 1), and its probability."""
    if len(weights) <= BLOCK:
        ends = np.cumsum(weights, dtype=np.float64)
        index = first_above(ends, uniform * float(ends[-1]))
        return index, float(weights[index]) / float(ends[-1])
    # Two levels, because a cumulative sum of a whole vocabulary costs more than everything else.
    block_sums = np.add.reduceat(weights, np.arange(0, len(weights), BLOCK), dtype=np.float64)
    ends = np.cumsum(block_sums)
    total = float(ends[-1])
    block = first_above(ends, uniform * total)
    first = block * BLOCK
    inside = np.cumsum(weights[first : first + BLOCK], dtype=np.float64)
    index = first + first_above(inside, uniform * total - (float(ends[block - 1]) if block else 0.0))
    return index, float(weights[index]) / total


def first_above(cumulative: NDArray[np.float64], target: float) -> int:
    """First index with a sum above target; if rounding took target to the end, the last of weight > 0."""
    index = int(cumulative.searchsorted(target, side="right"))
    return index if index < len(cumulative) else int(cumulative.searchsorted(cumulative[-1]))


def _indices(
    wanted: NDArray[np.int64], ids: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Where the wanted ids stand among `ids`, rising, and which of them do."""
    at = ids.searchsorted(wanted)
    found = ids.take(at, mode="clip") == wanted
    return at[found], found


def typical(logits: NDArray[np.float32], mass: float) -> NDArray[np.int64]:
    """Locally typical sampling (arXiv 2202.00666): surprise nearest to the entropy first, up to `mass`."""
    shifted = logits.astype(np.float64) - logits.max()
    log_probs = shifted - math.log(np.exp(shifted).sum())
    probs = np.exp(log_probs)
    possible = probs > 0
    entropy = -(probs[possible] @ log_probs[possible])
    order = np.argsort(np.abs(log_probs + entropy), kind="stable")
    return order[: np.searchsorted(np.cumsum(probs[order]), mass, side="right") + 1]


def _top_p(logits: NDArray[np.float32], mass: float) -> NDArray[np.int64]:
    """Nucleus sampling (arXiv 1904.09751): the fewest best tokens with at least `mass` of the probability."""
    weights = np.exp(logits - logits.max())
    goal = mass * weights.sum(dtype=np.float64)
    n = min(1024, len(logits))
    while True:  # the nucleus is nearly always small, and sorting a whole vocabulary takes milliseconds
        order = largest(logits, n)
        cumulative = np.cumsum(weights[order], dtype=np.float64)
        if cumulative[-1] >= goal or n == len(logits):
            return order[: np.searchsorted(cumulative, goal) + 1]
        n = min(8 * n, len(logits))


def _min_p(logits: NDArray[np.float32], share: float) -> NDArray[np.int64]:
    """Tokens with at least `share` of the best token's probability (arXiv 2407.01082)."""
    return np.flatnonzero(logits >= logits.max() + math.log(share))


def _bad_logits(scores: NDArray[np.float32]) -> str:
    n_nan = int(np.isnan(scores).sum())
    if n_nan:
        return f"{n_nan} of {len(scores)} logits are NaN: the model file or a logits processor is broken"
    if scores.max() == np.inf:
        return f"logit of token {int(scores.argmax())} is +inf: use a large finite value to force a token"
    return "all logits are -inf: the logits processors or the bias leave no token to choose"
