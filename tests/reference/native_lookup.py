"""Votes and gains of prompt lookup as the native code has them, for comparison with `voting`."""

from __future__ import annotations

from dflash_ggml.decode.lookup import Cursor, LookupCandidates, LookupRates
from dflash_ggml.decode.native import ffi, lib


def votes(found: LookupCandidates, cursor: Cursor) -> list[tuple[int, int, Cursor]]:
    """The next tokens, each once, with the cell without a draft and the cursor behind it."""
    depth, matches = cursor
    made = ffi.new("struct vote[]", max(found.native.n_matches, 1))
    n = lib.lookup_votes(found.native, depth, matches, made)
    return [(vote.token, vote.cell, (depth + 1, vote.matches)) for vote in made[0:n]]


def gains(found: LookupCandidates, rates: LookupRates, budget: int) -> list[float]:
    """Expected tokens of a step by the number of nodes of a tree of prompt lookup alone, 1 for none, up to `budget`."""
    budget = min(budget, found.native.n_matches * found.depth)  # which a tree of prompt lookup cannot exceed
    made = ffi.new("double[]", budget + 1)
    n = lib.lookup_gains(found.native, rates.native, budget, made)
    assert n > 0
    return ffi.unpack(made, n)
