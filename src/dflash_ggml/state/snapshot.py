"""Copies of the committed state in host memory: recurrent state and, if wanted, the K/V rows it goes with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..engine.passes import Passes
from ..errors import ConfigError
from ..ggml.bindings import lib


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state after `tokens`. `live`: recurrent tensors; `rows`: K/V rows of target and draft, or None; raw bytes."""

    tokens: tuple[int, ...]
    live: tuple[np.ndarray, ...]
    rows: tuple[np.ndarray, ...] | None
    in_draft: np.ndarray
    logits: np.ndarray | None

    @property
    def nbytes(self) -> int:
        """Host memory it holds."""
        parts = (
            *self.live,
            *(self.rows or ()),
            self.in_draft,
            *([] if self.logits is None else [self.logits]),
        )
        return sum(p.nbytes for p in parts)


def save_state(passes: Passes, tokens: Sequence[int], logits: np.ndarray | None, with_rows: bool) -> Snapshot:
    """Copy the state of `tokens` out of the device."""
    n = len(tokens)

    def copy(t, size: int) -> np.ndarray:
        return passes.device.read_bytes(t, np.empty(size, np.uint8))

    live = tuple(copy(t, lib.ggml_nbytes(t)) for t in passes.state.live_tensors)
    rows = tuple(copy(t, n * t.nb[1]) for t in row_slices(passes)) if with_rows else None
    return Snapshot(
        tuple(tokens), live, rows, passes.in_draft[:n].copy(), None if logits is None else logits.copy()
    )


def make_room(passes: Passes, snapshot: Snapshot) -> None:
    """Make sure that a snapshot can be copied back, with nothing written yet.

    Raises ConfigError when it was taken from an engine of another shape, DeviceError when its rows do not fit.
    """
    n = len(snapshot.tokens)
    live = [lib.ggml_nbytes(t) for t in passes.state.live_tensors]
    if [a.nbytes for a in snapshot.live] != live or n > passes.n_ctx:
        raise ConfigError("snapshot: taken from a model or context of another shape")
    if snapshot.rows is not None:
        if [a.nbytes for a in snapshot.rows] != [n * t.nb[1] for t in row_slices(passes)]:
            raise ConfigError("snapshot: its K/V rows have another shape than this engine's")
        passes.ensure_rows(n)


def restore_state(passes: Passes, snapshot: Snapshot) -> None:
    """Copy a snapshot back, after `make_room`."""
    n = len(snapshot.tokens)
    if snapshot.rows is not None:
        for t, data in zip(row_slices(passes), snapshot.rows):
            passes.device.write(t, data)
    for t, data in zip(passes.state.live_tensors, snapshot.live):
        passes.device.write(t, data)
    passes.in_draft[:n] = snapshot.in_draft
    passes.in_draft[n:] = False


def row_slices(passes: Passes) -> list:
    """The K/V tensors of all layers [row, n_rows], target's first: rows of committed tokens come first in each."""
    caches = [passes.state.kv] + ([passes.draft_state.kv] if passes.draft_state else [])
    return [f(layer) for c in caches for layer in range(c.layers) for f in (c.keys, c.values)]
