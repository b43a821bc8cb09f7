"""Embedding of a sequence: the target's last hidden states, pooled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .session import Session

Pooling = Literal["mean", "first", "last", "none"]


def embed(
    session: Session,
    ids: Sequence[int],
    *,
    pooling: Pooling = "mean",
    should_stop: Callable[[], bool] | None = None,
) -> NDArray[np.float32]:
    """The hidden states (after the output norm) of unrelated tokens, pooled to float32 [n_embd]; "none": [n, n_embd].

    Not normalised. Runs between two steps, and leaves the slot's tokens and cached prefixes unchanged. Zeros if stopped
    before the first token.

    Raises:
        ContextOverflowError, ConfigError: As the slot's `hidden_states` does.
    """
    kept: list[NDArray[np.float32]] = []
    sums = np.zeros(session.engine.params.n_embd, np.float64)
    n = 0

    def take(rows: NDArray[np.float32]) -> None:
        nonlocal n
        n += len(rows)
        if pooling == "mean":
            np.add(sums, rows.sum(axis=0, dtype=np.float64), out=sums)
        elif pooling == "none":
            kept.append(rows)
        elif pooling == "last" or not kept:
            kept[:] = [rows[-1] if pooling == "last" else rows[0]]

    session.scheduler.run_on_slot(lambda slot: slot.slot.hidden_states(ids, take, should_stop), room=len(ids))
    if pooling == "mean":
        return (sums / max(n, 1)).astype(np.float32)
    if not kept:
        return np.zeros((0, len(sums)) if pooling == "none" else len(sums), np.float32)
    return np.concatenate(kept) if pooling == "none" else kept[0]


def normalised(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """The vectors scaled to length 1 (last axis); a zero vector stays zero."""
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=-1, keepdims=True)
    return (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32)
