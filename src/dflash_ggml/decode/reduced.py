"""Sampling from reduced logits that left the device instead of whole rows: the tokens that `Sampler.sample` would draw.

A row is reduced to its largest logits with their ids, the logits of tokens named beforehand (those that penalties and bias may
change), the log of its sum, and its mass by blocks of token ids. Every other token is known to score at most `floor`, the
smallest logit that was kept. `draw` follows the sampler's filters on what is known and keeps bounds of the rest; where the rest
could matter it draws nothing, and the caller fetches the row. So no token depends on whether rows are reduced, up to the rounding
of sums; the nucleus is certain even of that, because its size must be the same at both ends of what rounding may do.

The alternative was to draw on the device: a number per column goes in, a token comes out. It needs the filters, the penalties and
the grammar as operations, twice over (CPU and GPU), and sequential sums over a sorted vocabulary, to save some 15 us of host time
per visited node. Kept logits leave every rule where it was.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import neg

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .sampling import BLOCK, Sampler, first_above, typical
from .sampling_params import SamplingParams

KEPT = 48  # largest logits of a row: the default top-k of 40 and some to spare; a GPU's time rises with it
# of sums in float64 over some hundred tokens: a bias of 100 is all of a sum, and a mask may take it out again
_ROUNDING = 2.0**-40
WATCHED = 128  # tokens whose logits can be requested of a pass: the default penalty window, a tree, some bias
_NOTHING = np.empty(0, np.int64)

Block = Callable[[int], NDArray[np.float32]]  # the logits of block i of the row, 512 or, of the last, less


@dataclass(frozen=True)
class Watch:
    """The input of a reduction, set before the pass.

    Attributes:
        temperature: That of the sampler, above 0.
        ids: Watched tokens, rising, at most 128.
    """

    temperature: float
    ids: NDArray[np.int64]

    @cached_property
    def index(self) -> dict[int, int]:
        """Index of each watched token in `ids`."""
        return {token: at for at, token in enumerate(self.ids.tolist())}


@dataclass(slots=True)
class Reduced:
    """One row of n_vocab logits, reduced to what sampling looks at.

    Attributes:
        ids: int64 [k], the tokens of the largest logits, falling; of equals the lower id first.
        logits: float32 [k], their logits.
        log_sum: Logarithm of the sum of exp over the row.
        watched: float32, logits of `watch.ids`.
        masses: float32, per block of 512 ids the sum of exp((logit - largest) / temperature).
    """

    ids: NDArray[np.int64]
    logits: NDArray[np.float32]
    log_sum: float
    watched: NDArray[np.float32]
    masses: NDArray[np.float32]
    watch: Watch
    n_vocab: int


class ReducedRows:
    """The reductions of all columns of a pass, as they come from the device."""

    def __init__(self, array: NDArray[np.float32], watch: Watch, n_vocab: int) -> None:
        """array: float32 [columns, 3 k + 128 + blocks], per column ids | log-probabilities | logits | watched logits | masses."""
        self.array, self.watch, self.n_vocab = array, watch, n_vocab

    def nan_columns(self, n: int) -> list[int]:
        """Which of the first n columns have NaN in their rows: their log-probabilities are."""
        return np.flatnonzero(np.isnan(self.array[:n, min(KEPT, self.n_vocab)])).tolist()

    def __getitem__(self, column: int) -> Reduced:
        a, k = self.array[column], min(KEPT, self.n_vocab)
        logits = a[2 * k : 3 * k]
        return Reduced(
            a[:k].astype(np.int64),
            logits,
            float(logits[0]) - float(a[k]),
            a[3 * k : 3 * k + len(self.watch.ids)],
            a[3 * k + WATCHED :],
            self.watch,
            self.n_vocab,
        )


def watch(sampler: Sampler, history: Sequence[int], nodes: ArrayLike = ()) -> Watch | None:
    """What the next pass should reduce rows with; None if this sampler needs whole rows, or none.

    Args:
        nodes: Tokens that may follow within that pass, and so may come under a penalty.
    """
    if sampler.needs_rows or sampler.greedy:
        return None
    p, temperature = sampler.params, sampler.params.temperature
    kept_only = temperature == 0 or (temperature > 0 and 0 < p.top_k < sampler.n_vocab)
    if not sampler.changes or (sampler.lowers_recent and kept_only):
        ids = _NOTHING
    elif sampler.lowers_recent:
        ids = np.array(sorted({*sampler.recent(history), *np.asarray(nodes).tolist()}), np.int64)
    else:
        seen, _ = sampler.penalised(history)
        ids = sampler.changed(seen)
        if sampler.penalises:
            ids = np.union1d(ids, np.asarray(nodes, np.int64))
    return Watch(temperature if temperature > 0 else 1.0, ids[:WATCHED])


def draw(sampler: Sampler, row: Reduced, history: Sequence[int], block: Block) -> int | None:
    """The token that `sampler.sample` would give for this row; None, with no random number taken, if it needs all of it.

    block(i) fetches one block of the row; called at most once, when nothing cuts the tail off.
    """
    if not math.isfinite(row.log_sum):
        return None  # NaN, +inf or nothing but -inf: the sampler says what is wrong
    p = sampler.params
    if _unfiltered(p, row.n_vocab) and not sampler.processors and row.n_vocab > len(row.ids):
        changes = _Changes.of(sampler, row, history) if sampler.changes else None
        if changes is None and sampler.changes:
            return None
        if changes is None or not changes.n_unknown:
            return _draw_by_blocks(sampler, row, changes, block)
    head = _Head.of(sampler, row, history)
    if head is None:
        return None
    if p.temperature == 0:
        return head.ids[0]
    kept = head.filtered(p)
    if kept is None:
        return None
    ids, weights = kept
    uniform = sampler.rng.random()
    if len(ids) == 1:
        return ids[0]
    if p.temperature > 0 and p.temperature != 1:
        divisor = np.float32(max(p.temperature, 1e-30))
        if weights[-1] > -1e8:  # no quotient is too large; errstate takes as long as the division
            weights /= divisor
        else:
            with np.errstate(over="ignore"):
                weights /= divisor
    masses = np.exp(weights, out=weights).tolist()
    # as `invert`
    order = sorted(range(len(ids)), key=ids.__getitem__)
    ends = list(accumulate([masses[i] for i in order]))
    at = bisect_right(ends, uniform * ends[-1])
    return ids[order[at if at < len(ends) else bisect_left(ends, ends[-1])]]


@dataclass(slots=True)
class _Changes:
    """Tokens that bias and penalties change: ids, logits before and after. n_unknown: lowered ones of unknown logit."""

    ids: NDArray[np.int64]
    old: NDArray[np.float32]
    new: NDArray[np.float32]
    n_unknown: int = 0

    @classmethod
    def of(cls, sampler: Sampler, row: Reduced, history: Sequence[int]) -> _Changes | None:
        """None if a token is raised whose logit is unknown."""
        if sampler.lowers_recent:
            recent, index = sampler.recent(history), row.watch.index
            try:
                at = np.fromiter(map(index.__getitem__, recent), np.int64, len(recent))
            except KeyError:  # more than can be watched
                pass
            else:
                counts = np.fromiter(recent.values(), np.int64, len(recent)) if sampler.by_count else _NOTHING
                old = row.watched[at]
                return cls(row.watch.ids[at], old, sampler.penalty(old, counts))
        seen, counts = sampler.penalised(history)
        ids = sampler.changed(seen)
        if not len(ids):
            return cls(ids, row.logits[:0], row.logits[:0])
        known, logits = row.watch.ids, row.watched
        if not len(known) or not _among(ids, known).all():
            known, first = np.unique(np.concatenate((known, row.ids)), return_index=True)
            logits = np.concatenate((logits, row.logits))[first]
            found = _among(ids, known)
            if not found.all() and not sampler.only_lowers:
                return None
            n_unknown, ids = int((~found).sum()), ids[found]
        else:
            n_unknown = 0
        old = logits[known.searchsorted(ids)]
        return cls(ids, old, sampler.rescored(ids, old, seen, counts) if len(ids) else old, n_unknown)


@dataclass(slots=True)
class _Head:
    """The best tokens after all changes, and what is known of the others. Lists: for so few, numpy's calls cost more than loops.

    ids, scores: falling, of equals the lower id first, complete above `floor`. rest: how many others there may be, each with a
    score of at most `floor`. gone: scores of known tokens that a mask forbids; None without a mask. touched: whether scores are
    no longer the first of the row's. changes: if they were looked up.
    """

    sampler: Sampler
    row: Reduced
    history: Sequence[int]
    ids: list[int]
    scores: list[float]
    floor: float
    rest: int
    gone: list[float] | None
    touched: bool
    changes: _Changes | None

    @classmethod
    def of(cls, sampler: Sampler, row: Reduced, history: Sequence[int]) -> _Head | None:
        """None if no token is left above the floor, or a token is raised whose logit is unknown."""
        ids, scores = row.ids.tolist(), row.logits.tolist()
        floor = scores[-1] if row.n_vocab > len(ids) else -math.inf
        new: Iterable[tuple[int, float]] = ()
        changes = None
        if sampler.lowers_recent:
            lowered = sampler.lowered(ids, scores, history)  # others are below the floor before and after
            new = [(ids[at], score) for at, score in lowered]
            for at, _ in reversed(lowered):
                del ids[at], scores[at]
        elif sampler.changes:
            changes = _Changes.of(sampler, row, history)
            if changes is None:
                return None
            again = set(changes.ids.tolist())
            new = list(zip(changes.ids.tolist(), changes.new.tolist(), strict=True))
            scores = [s for t, s in zip(ids, scores, strict=True) if t not in again]
            ids = [t for t in ids if t not in again]
        for token, score in new:
            if score > floor:
                at = bisect_right(scores, -score, key=neg)
                while at and scores[at - 1] == score and ids[at - 1] > token:
                    at -= 1
                ids.insert(at, token)
                scores.insert(at, score)
        if not ids:
            return None
        forbidden, gone = sampler.forbidden(history, ids), None
        if forbidden is not None:
            flags = forbidden.tolist()
            gone = [s for s, no in zip(scores, flags, strict=True) if no]
            ids = [t for t, no in zip(ids, flags, strict=True) if not no]
            scores = [s for s, no in zip(scores, flags, strict=True) if not no]
        touched = bool(new) or gone is not None
        if touched or floor == -math.inf:
            # at the floor itself a changed token and one that was not kept could stand in either order
            while scores and not scores[-1] > floor:
                del ids[-1], scores[-1]
            if not ids:
                return None
        rest = 0 if floor == -math.inf else row.n_vocab - len(ids)
        return cls(sampler, row, history, ids, scores, floor, rest, gone, touched, changes)

    def _bounds(self) -> tuple[float, float]:
        """The mass of all tokens relative to the best one lies between these."""
        top, log_sum = self.scores[0], self.row.log_sum
        if log_sum - top > 50:  # the rest of this sum would be rounding
            return 0.0, math.inf
        total = math.exp(log_sum - top)
        slack = 2.0**-20 * (4 + abs(log_sum)) * total  # of a sum in float32 and its logarithm
        changes, n_unknown = self.changes, 0
        if changes is None and self.sampler.changes:
            changes = _Changes.of(self.sampler, self.row, self.history)
        if changes is not None:
            new, old = _mass(changes.new, top), _mass(changes.old, top)
            total += new - old
            slack += _ROUNDING * (new + old)
            n_unknown = changes.n_unknown
        if self.gone is not None:  # other tokens may be masked too
            gone = _mass(np.array(self.gone), top)
            low, total = 0.0, total - gone
            slack += _ROUNDING * gone
        else:
            low = total - slack - n_unknown * math.exp(self.floor - top)
        return (low, total + slack) if math.isfinite(total) else (0.0, math.inf)

    def filtered(self, p: SamplingParams) -> tuple[list[int], NDArray[np.float32]] | None:
        """What the filters leave, as ids and as scores relative to the best of them; None if that could reach into the rest.
        As `Sampler._filtered`."""
        ids, scores, rest, n_vocab = self.ids, self.scores, self.rest, self.row.n_vocab
        n, limited = len(ids), False
        if 0 < p.top_k < n_vocab and p.temperature >= 0:
            if n >= p.top_k or not rest:
                n, rest = min(n, p.top_k), 0
            else:
                rest = min(rest, p.top_k - n)
                limited = True
        array = np.array(scores[:n], np.float32) if self.touched else self.row.logits
        if p.temperature < 0:
            return None if rest else (ids, array[:n] - array[0])
        if p.typical_p != 1:
            if rest:
                return None
            chosen = np.sort(typical(array[:n], p.typical_p))
            array, n = array[chosen], len(chosen)
            ids, scores = [ids[i] for i in chosen.tolist()], array.tolist()
        relative = array[:n] - array[0]
        if p.top_p != 1:
            low, high = self._bounds() if rest and not limited else (0.0, math.inf)
            size = _nucleus(np.exp(relative), p.top_p, rest, math.exp(self.floor - scores[0]), low, high)
            if size is None:
                return None
            n, rest = size, 0
        if p.min_p != 0:
            limit = float(np.float32(scores[0]) + math.log(p.min_p))
            if rest and not limit > self.floor:
                return None
            n, rest = bisect_right(scores, -limit, 0, n, key=neg), 0
        return None if rest else (ids[:n], relative[:n])


def _nucleus(
    weights: NDArray[np.float32], mass: float, rest: int, floor: float, low: float, high: float
) -> int | None:
    """How many of the falling weights make up the nucleus; None if rounding or the rest could change that."""
    ends = list(accumulate(weights.tolist()))
    known = ends[-1]
    if not rest:
        goal = mass * known
        least = bisect_left(ends, goal * (1 - 1e-12))
        if ends[least] < goal * (1 + 1e-12):  # the last bits matter: they depend on the order of the sum
            least = bisect_left(ends, mass * float(weights.sum(dtype=np.float64)))
        return min(least + 1, len(ends))
    low = max(low, known)
    high = min(max(high, low), known + rest * floor)
    least, most = bisect_left(ends, mass * low), bisect_left(ends, mass * max(high, low))
    return least + 1 if least == most < len(ends) else None


def _draw_by_blocks(sampler: Sampler, row: Reduced, changes: _Changes | None, block: Block) -> int | None:
    """A draw from all tokens: the block by the masses, then the token by the block's own logits."""
    best, divisor = row.logits[0], np.float32(max(row.watch.temperature, 1e-30))
    masses = row.masses.astype(np.float64)
    if changes is not None:
        relative = np.array((changes.old, changes.new), np.float64)
        relative -= float(best)
        relative /= float(divisor)
        if not sampler.only_lowers and relative[1].max(initial=0) > 50:
            return None
        old, new = np.exp(relative, out=relative)
        moved, blocks = new - old, changes.ids // BLOCK
        np.add.at(masses, blocks, moved)
        # what is left where nearly all was taken away is rounding
        if (masses[blocks] < 1e-3 * row.masses[blocks]).any() or 9 * masses.sum() < -moved.sum():
            return None
    ends = masses.cumsum()
    target = sampler.rng.random() * ends.item(-1)
    at = first_above(ends, target)
    logits, first = block(at), at * BLOCK
    if changes is not None:
        here = blocks == at
        logits[changes.ids[here] - first] = changes.new[here]
    logits -= best
    if divisor != 1:
        with np.errstate(over="ignore"):
            logits /= divisor
    inside = np.exp(logits, out=logits).astype(np.float64).cumsum()
    share = (target - (ends.item(at - 1) if at else 0.0)) / masses.item(at)
    return first + first_above(inside, share * inside.item(-1))


def _unfiltered(p: SamplingParams, n_vocab: int) -> bool:
    """Whether every token can be drawn."""
    off = not 0 < p.top_k < n_vocab and p.typical_p == 1 and p.top_p == 1 and p.min_p == 0
    return p.temperature < 0 or (p.temperature > 0 and off)


def _mass(scores: NDArray[np.float32], top: float) -> float:
    """The sum of exp(score - top); inf where that is too large."""
    with np.errstate(over="ignore"):
        return float(np.exp(scores.astype(np.float64) - top).sum())


def _among(wanted: NDArray[np.int64], ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which of the wanted ids are among `ids`, rising and not empty."""
    return ids.take(ids.searchsorted(wanted), mode="clip") == wanted
