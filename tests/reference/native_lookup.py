"""Prompt lookup's candidates from lists, and its rates and votes as the native code has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from dflash_ggml.decode.lookup import N_CELLS, LookupCandidates, LookupRates, checked
from dflash_ggml.decode.native import ffi, lib

Cursor = tuple[int, int]  # depth, and a bit mask of the matches that contain the whole path


def root_of(found: LookupCandidates) -> Cursor:
    """The cursor of the pending token."""
    return 0, (1 << found.native.n_matches) - 1


def votes(found: LookupCandidates, cursor: Cursor) -> list[tuple[int, int, Cursor]]:
    """The next tokens, each once, with the cell without a draft and the cursor behind it."""
    depth, matches = cursor
    made = ffi.new("struct vote[]", max(found.native.n_matches, 1))
    n = lib.lookup_votes(found.native, depth, matches, made)
    return [(vote.token, vote.cell, (depth + 1, vote.matches)) for vote in made[0:n]]


def candidates(windows: Sequence[Sequence[int]], lengths: Sequence[int], depth: int) -> LookupCandidates:
    """Candidates of matches: the ids behind each, of which `depth` count, and the tokens of each."""
    block, ends = np.zeros((len(windows), max(depth, 0)), np.int32), []
    for row, window in zip(block, windows):
        window = window[: len(row)]
        row[: len(window)] = window
        ends.append(len(window))
    return LookupCandidates(block, np.array(ends, np.int32), np.array(lengths, np.int32))


def windows_of(found: LookupCandidates) -> list[list[int]]:
    """The ids behind each match."""
    native = found.native
    return [
        [native.windows[i * native.depth + at] for at in range(native.ends[i])]
        for i in range(native.n_matches)
    ]


def lengths_of(found: LookupCandidates) -> list[int]:
    """The tokens of each match."""
    return ffi.unpack(found.native.matched, found.native.n_matches)


def all_rates(rates: LookupRates) -> list[float]:
    """The rate of every cell."""
    return [lib.lookup_rate(rates.native, cell) for cell in range(N_CELLS)]


def learn(rates: LookupRates, samples: Iterable[tuple[int, bool]]) -> None:
    """Count samples: a cell, and whether its candidate was right."""
    pairs = list(samples)
    cells, right = [cell for cell, _ in pairs], bytes([is_right for _, is_right in pairs])
    checked(lib.lookup_rates_learn(rates.native, len(pairs), cells, right))
