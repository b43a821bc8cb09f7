"""Snapshots of the committed state in host memory: recurrent state and, optionally, its K/V rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from ..errors import ConfigError
from ..ggml.bindings import Tensor, lib
from ..ggml.device import Device

BLOCK = 256  # tokens whose K/V rows are copied at once


@dataclass(frozen=True, slots=True, eq=False)
class RowBlock:
    """K/V rows of consecutive tokens, raw bytes, an array per cache of target and draft; shared by snapshots."""

    n_tokens: int
    parts: tuple[np.ndarray, ...]

    @property
    def nbytes(self) -> int:
        """Host memory it holds."""
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state after `tokens`. The last block may contain rows of further tokens.

    Attributes:
        tokens: The committed tokens.
        live: Recurrent tensors, raw bytes.
        rows: The K/V rows of all tokens, or None.
        in_draft: Which positions the draft has seen, bool [len(tokens)].
        logits: The target's logits after the last token, float32 [n_vocab], if they are known.
        types: ggml types of the caches.
        rings: The last rows of the rings of target and draft, in order of their positions; they are overwritten soon, so a
            snapshot without `rows` has them too.
    """

    tokens: tuple[int, ...]
    live: tuple[np.ndarray, ...]
    rows: tuple[RowBlock, ...] | None
    in_draft: np.ndarray
    logits: np.ndarray | None
    types: tuple[int, ...] = ()
    rings: tuple[np.ndarray, ...] = ()

    @property
    def state_nbytes(self) -> int:
        """Host memory that it holds beside its rows."""
        logits = () if self.logits is None else (self.logits,)
        return sum(part.nbytes for part in (*self.live, *self.rings, self.in_draft, *logits))

    @property
    def nbytes(self) -> int:
        """Host memory it holds."""
        return self.state_nbytes + sum(block.nbytes for block in self.rows or ())


@dataclass(frozen=True, slots=True)
class Tensors:
    """A sequence's tensors, as source and destination of a snapshot.

    Recurrent tensors of a state index, in parts of one or more tensors each; caches [row, n_rows] with this sequence's rows
    from `first_row` on; rings by state index, each with its number of rows and how many of the last ones are kept."""

    device: Device
    live: Sequence[Sequence[Tensor]]
    caches: Sequence[Tensor]
    first_row: int = 0
    rings: Sequence[tuple[Tensor, int, int]] = ()
    state_index: int = 0

    @property
    def row_nbytes(self) -> int:
        """Bytes of a token's rows in all caches."""
        return sum(t.nb[1] for t in self.caches)

    def buffers(self, n: int, n_states: int) -> Counter[int]:
        """Number of host buffers of each size that so many recurrent states and the rows of n tokens take."""
        parts = Counter(sum(map(lib.ggml_nbytes, part)) for part in self.live)
        found = Counter({size: count * n_states for size, count in parts.items()})
        if self.caches:
            found[BLOCK * self.row_nbytes] += n // BLOCK
        return found

    def read_live(self) -> tuple[np.ndarray, ...]:
        """The bytes of the recurrent state, an array per part."""
        parts = [[(t, 0, lib.ggml_nbytes(t)) for t in part] for part in self.live]
        found = tuple(self.device.buffers.take(sum(size for *_, size in part)) for part in parts)
        self.device.read_pieces(zip(parts, found))
        return found

    @staticmethod
    def _placed(part: Sequence[Tensor]) -> Iterator[tuple[Tensor, int]]:
        """The tensors of a part, with their offsets in its bytes."""
        at = 0
        for t in part:
            yield t, at
            at += lib.ggml_nbytes(t)

    def read_rows(self, n: int, first: int = 0) -> tuple[RowBlock, ...]:
        """The cache rows of the tokens from `first` to before n."""
        found = [
            self._block(at, min(BLOCK, n - at)) for at in (range(first, n, BLOCK) if self.caches else ())
        ]
        self.device.read_pieces((pieces, whole) for _, pieces, whole in found)
        return tuple(block for block, *_ in found)

    def _block(self, first: int, n: int) -> tuple[RowBlock, list[tuple[Tensor, int, int]], np.ndarray]:
        """A block for the rows of n tokens, where they are on the device, and the memory for them."""
        sizes = [n * t.nb[1] for t in self.caches]
        ends = list(accumulate(sizes))
        # only whole blocks have a reusable size
        whole = self.device.buffers.take(ends[-1]) if n == BLOCK else np.empty(ends[-1], np.uint8)
        pieces = [(t, (self.first_row + first) * t.nb[1], size) for t, size in zip(self.caches, sizes)]
        return RowBlock(n, tuple(whole[end - size : end] for end, size in zip(ends, sizes))), pieces, whole

    def read_rings(self, n: int) -> tuple[np.ndarray, ...]:
        """The bytes of the kept ring rows after n tokens, in sequence order, an array per tensor."""
        return tuple(
            np.concatenate([self._read(t, at, size) for at, size in self._pieces(t, rows, kept, n)])
            for t, rows, kept in self.rings
        )

    def _pieces(self, t, rows: int, kept: int, n: int) -> list[tuple[int, int]]:
        """Location of the last `kept` of n tokens in the state index's ring, in order: offset and size of two pieces."""
        first, row = max(n - kept, 0), t.nb[1]
        before = min(rows - first % rows, n - first)
        start = self.state_index * rows
        return [((start + first % rows) * row, before * row), (start * row, (n - first - before) * row)]

    def _ring_bytes(self, n: int) -> list[int]:
        """Kept bytes of each ring after n tokens."""
        return [min(n, kept) * t.nb[1] for t, _, kept in self.rings]

    @property
    def types(self) -> tuple[int, ...]:
        """ggml types of the caches and rings."""
        return tuple(t.type for t in (*self.caches, *(t for t, *_ in self.rings)))

    def check(self, snapshot: Snapshot) -> None:
        """Refuse a snapshot of another model, or of caches of another type.

        Raises:
            ConfigError: The snapshot does not match.
        """
        n = len(snapshot.tokens)
        live = [a.nbytes for a in (*snapshot.live, *snapshot.rings)]
        if live != [*(sum(map(lib.ggml_nbytes, part)) for part in self.live), *self._ring_bytes(n)]:
            raise ConfigError("snapshot: taken from a model or context of another shape")
        if snapshot.rows is None:
            return
        sizes = [t.nb[1] for t in self.caches]
        fits = all(
            [a.nbytes for a in b.parts] == [b.n_tokens * size for size in sizes] for b in snapshot.rows
        )
        enough = not sizes or sum(block.n_tokens for block in snapshot.rows) >= n
        if not fits or not enough or snapshot.types != self.types:
            raise ConfigError("snapshot: its K/V rows have another shape or type than this engine's")

    def write(self, snapshot: Snapshot) -> None:
        """Write a checked snapshot back; its rows must fit."""
        self.write_rows(snapshot.rows or (), len(snapshot.tokens))
        for ring, data in zip(self.rings, snapshot.rings):
            done = 0
            for at, size in self._pieces(*ring, len(snapshot.tokens)):
                self.device.write(ring[0], data[done : done + size], at)
                done += size
        for part, data in zip(self.live, snapshot.live):
            for t, at in self._placed(part):
                self.device.write(t, data[at : at + lib.ggml_nbytes(t)])

    def write_rows(self, rows: Sequence[RowBlock], n: int) -> None:
        """Copy the rows of n tokens back."""
        at = 0
        for block in rows:
            taken = min(block.n_tokens, n - at)
            for t, data in zip(self.caches, block.parts):
                self.device.write(t, data[: taken * t.nb[1]], (self.first_row + at) * t.nb[1])
            at += taken

    def clear_rows(self, first: int, end: int) -> None:
        """Zero the rows of the tokens from `first` to before `end`."""
        for t in self.caches:
            self._clear(t, (self.first_row + first) * t.nb[1], (end - first) * t.nb[1])

    def clear_rings(self, n: int) -> None:
        """Zero the rows of the state index's rings that hold none of the last tokens of n."""
        for t, rows, kept in self.rings:
            dead, at = rows - min(n, kept), n % rows
            before = min(rows - at, dead)
            self._clear(t, (self.state_index * rows + at) * t.nb[1], before * t.nb[1])
            self._clear(t, self.state_index * rows * t.nb[1], (dead - before) * t.nb[1])

    def _clear(self, t, offset: int, size: int) -> None:
        if size:
            lib.ggml_backend_tensor_memset(t, 0, offset, size)

    def _read(self, t, offset: int, size: int) -> np.ndarray:
        return self.device.read_bytes(t, np.empty(size, np.uint8), offset)
