"""Attention pattern of a training batch: masked blocks at random positions of a text. Works with numpy and torch.

A row of T tokens gives n blocks of B columns. Block j has anchor a_j, the position of its pending token; its columns have
positions a_j .. a_j + B - 1 and see only the context before a_j and each other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def draw_anchors(
    rng: np.random.Generator, start: NDArray[np.int64], stop: NDArray[np.int64], n: int
) -> NDArray[np.int64]:
    """Sorted anchors [rows, n], each in [start, stop - 2]: at least one token is left to draft.

    Args:
        start, stop: [rows].
    """
    high = np.maximum(stop - 1, start + 1)
    drawn = start[:, None] + (rng.random((len(start), n)) * (high - start)[:, None]).astype(np.int64)
    return np.sort(drawn, 1)


def labels_at(anchors: Any, stop: Any, depth: int, n_tokens: int, where: Any) -> tuple[Any, Any]:
    """Positions [rows, n, depth] of the tokens to draft after each anchor, clipped to the row, and a mask of those that count.

    Args:
        where: 0 .. depth - 1 as an array of the same library.
    """
    positions = anchors[..., None] + 1 + where
    return positions.clip(0, n_tokens - 1), positions < stop[:, None, None]


def visible(
    anchors: Any, columns: Any, keys: Any, block: int, window: int = 0, causal: bool = False
) -> tuple[Any, Any]:
    """Visibility of block columns: of the context [rows, n * B, T], and of each other [n * B, n * B].

    With a window a column at position p sees positions above p - window.

    Args:
        anchors: [rows, n].
        columns, keys: 0 .. n * B - 1 and 0 .. T - 1, as arrays of the same library.
        block: B.
        window: Tokens of the window, 0 for none.
        causal: Whether columns do not see later ones.
    """
    mine = anchors[:, columns // block][..., None]
    context = keys < mine
    own = columns[:, None] // block == columns[None] // block
    if window:
        inside = columns % block
        context = context & (keys > mine + inside[:, None] - window)
        own = own & (columns[:, None] - columns[None] < window)
    if causal:
        own = own & (columns[None] <= columns[:, None])
    return context, own


def unrolled(columns: Any, n_tokens: int) -> Any:
    """Visibility of a prediction head trained on its own drafts: [S * T, S * T], S passes over the same T tokens.

    Pass 0 is causal. A row of pass s is s positions after its token; it sees pass 0 up to its token, and its token's rows of
    the passes up to its own.

    Args:
        columns: 0 .. S * T - 1, as an array of numpy or torch.
        n_tokens: T.
    """
    at, step = columns % n_tokens, columns // n_tokens
    first = (step[None] == 0) & (at[None] <= at[:, None])
    own = (step[None] > 0) & (at[None] == at[:, None]) & (step[None] <= step[:, None])
    return first | own
