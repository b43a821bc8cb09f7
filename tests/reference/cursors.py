"""Candidates walked one node at a time, from Python: what C does with them inside."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from typing import Any, Protocol, Union

from dflash_ggml.decode.candidates import CandidateBlock, CombinedCandidates
from dflash_ggml.decode.native import ffi, lib

# token ids, log-probabilities given their parent, and cursors, best first
Children = tuple[Sequence[int], Sequence[float], Sequence[Any]]


class Walked(Protocol):
    """A reference with children of its own."""

    def expand(self, cursor: Any) -> Children:
        """The children of a node."""


Candidates = Union[CandidateBlock, CombinedCandidates, Walked]


def root_of(candidates: Candidates) -> Any:
    """The cursor of the pending token: depth and rank, of several drafts one for each."""
    return tuple(map(root_of, candidates.drafts)) if isinstance(candidates, CombinedCandidates) else (0, 0)


def children_of(candidates: Candidates, cursor: Any) -> Children:
    """The children of a node."""
    if isinstance(candidates, CombinedCandidates):
        return _of_several(candidates, cursor)
    if not isinstance(candidates, CandidateBlock):
        return candidates.expand(cursor)
    depth, index = cursor
    n_depths, n_ranks = candidates.ids.shape
    if depth == n_depths:
        return (), (), ()
    if candidates.pairs is None:
        scores = candidates.log_probs[depth].tolist()
        return candidates.ids[depth].tolist(), scores, [(depth + 1, i) for i in range(n_ranks)]
    tokens, ranks = ffi.new(f"int32_t[{n_ranks}]"), ffi.new(f"int32_t[{n_ranks}]")
    joint = ffi.new(f"double[{n_ranks}]")
    mass = lib.row_mass(candidates.native, depth)
    n = lib.pairs_after(candidates.native, depth, index, mass, tokens, ranks, joint)
    cursors = [(depth + 1, rank) for rank in ffi.unpack(ranks, n)]
    return ffi.unpack(tokens, n), ffi.unpack(joint, n), cursors


def _of_several(several: CombinedCandidates, cursor: tuple[Any, ...]) -> Children:
    """A cursor has one of each draft, None where its candidates end."""
    found: dict[int, tuple[float, list[Any]]] = {}
    speaking = 0
    for i, (draft, at) in enumerate(zip(several.drafts, cursor)):
        tokens, log_probs, cursors = ((), (), ()) if at is None else children_of(draft, at)
        speaking += bool(len(tokens))
        for token, log_prob, after in zip(tokens, log_probs, cursors):
            total, after_each = found.get(token, (0.0, [None] * len(several.drafts)))
            after_each[i] = after
            found[token] = total + exp(log_prob), after_each
    ranked = sorted(((p, t, c) for t, (p, c) in found.items() if p > 0), key=lambda entry: -entry[0])
    log_probs = [log(p / speaking) for p, _, _ in ranked]
    return [t for _, t, _ in ranked], log_probs, [tuple(c) for _, _, c in ranked]
