"""Drafter for a target's prediction head: serial passes over the target's hidden states, then over its own."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...decode.candidates import CandidateBlock, Candidates, NonFiniteDraft
from ...decode.sequence import Sequence
from ...files.gguf import GGUFFile
from ...ggml.device import F32, Device
from ...ggml.store import Store
from ...ggml.weights import Weights
from ...models.prediction import EMBEDDING, Head
from ...models.prediction import HEAD as OWN_HEAD
from ...models.target import Target, sources_of
from ...state.kv import KvCache, kv_bucket
from ...state.kv_type import KvType
from ...state.mask import ResidentMask
from ...state.memory import Part, padded
from ...state.spec import KvLayer, StateSpec
from ..drafter import CachedDrafter, DraftSource, Host, batch_bucket, checked
from .graphs import Parts, context_graph, draft_graph, drafts_graph, normed, take_in

DEPTH = 3  # tokens ahead: each further one reads the output matrix again and is accepted less often


class MtpSource(DraftSource):
    """A prediction head in a target's open file."""

    name = "mtp"

    def __init__(self, file: GGUFFile, head: Head, depth: int) -> None:
        self.file, self.head, self.depth, self.taps = file, head, depth, (head.block - 1,)
        self.head_dims = (head.head_dim,)
        self.title = "prediction head"
        self._weights: Weights | None = None

    @property
    def identity(self) -> list:
        tensors = self.file.tensors
        kinds = [(name, tensors[name].type, tensors[name].shape) for name in sorted(self.head.tensors())]
        return [*kinds, self.depth]  # measured costs depend on its depth

    def check(self, target: Target, target_name: str) -> list[str]:
        """Nothing to check: the head is from the target's file."""
        return []

    def prepare(self, device: Device) -> list[str]:
        sources = sources_of(self.file, self.head.tensors())
        self._weights = Weights(device, sources, gathered=(self.head.prefix + EMBEDDING,))
        return []

    def parts(self, device: Device, kv_type: KvType, n_states: int = 1) -> list[Part]:
        assert self._weights is not None, "prepare comes first"
        wanted, spec, over = self._weights.wanted, cache_spec(self.head), _room(self.depth) + 1
        return [
            Part("draft weights", lambda rows: wanted),
            Part("draft K/V", lambda rows: spec.kv_bytes(rows + over, kv_type)),
            Part("draft masks", lambda rows: 2 * self.depth * rows),
            Part(
                "draft state", lambda rows: padded(4 * self.head.n_embd * _lasts(n_states), device.alignment)
            ),
        ]

    def start(
        self, host: Host, candidates: int, n_rows: int, progress: Callable[[str, int, int], None] | None
    ) -> MtpDrafter:
        assert self._weights is not None, "prepare comes first"
        weights, self._weights = self._weights.fill(progress, "draft"), None
        return MtpDrafter(host, self.head, weights, candidates, n_rows, self.depth)


def _chain(best: NDArray[np.float32]) -> CandidateBlock:
    """Candidates from best [depth, 2, k], ids and log-probabilities; each depth follows the best candidate of the one before."""
    depth, _, k = best.shape
    pairs = np.zeros((depth, k, k), np.float32)
    pairs[1:, 1:] = -np.inf
    return CandidateBlock(best[:, 0].astype(np.int32), best[:, 1], pairs)


def cache_spec(head: Head) -> StateSpec:
    """The head's context: a row of keys and values per token."""
    return StateSpec((KvLayer(head.n_kv_heads, head.head_dim),))


def _lasts(n_states: int) -> int:
    """Number of kept hidden states: one per state index, and with several one more for padding."""
    return n_states + (n_states > 1)


def _room(depth: int) -> int:
    """Unseen tokens that a drafting pass also takes in: the longest path of its own drafts."""
    return depth + 1


class MtpDrafter(CachedDrafter):
    """A prediction head. Its cache has a row for each committed token it has seen, computed with the target's hidden state of the
    previous token; rows of drafted tokens, computed with its own, follow and are overwritten."""

    name = "mtp"

    def __init__(
        self, host: Host, head: Head, weights: Weights, candidates: int, n_rows: int, depth: int
    ) -> None:
        self.host, self.device, self.head, self.weights = host, host.device, head, weights
        self.depth, self.taps = depth, (head.block - 1,)
        self.room = _room(depth)
        self.kv = KvCache(self.device, cache_spec(head).kv, host.kv_type, n_rows + self.room + 1)
        self._store = Store(self.device, 1)
        last = self._store.tensor(F32, head.n_embd, _lasts(host.n_states), name="last hidden states")
        self._store.allocate()
        every: Any = ChainMap(weights, host.weights)  # type: ignore[arg-type]
        embedding = head.own(EMBEDDING, host.target.embedding_name)
        output = head.own(OWN_HEAD, host.target.head_name)
        self.parts = Parts(
            head, self.device, every, self.kv, last, host.features, self.room, candidates, embedding, output
        )
        # by state index; zeros before the first token
        self.has_last = [True] * host.n_states
        self._masked = 0  # the mask's state index
        self.held = np.zeros(n_rows, bool)
        self.graphs = host.graphs
        self.mask = ResidentMask(self.device, self.depth, 2 * self.room, n_rows)
        self._n_rows = n_rows

    # ---- memory

    @property
    def rows(self) -> Items[object]:
        return self.kv.slices

    @property
    def nbytes(self) -> dict[str, int]:
        return {
            "draft weights": self.weights.nbytes,
            "draft K/V": self.kv.nbytes,
            "draft masks": self.mask.nbytes,
            "draft state": self._store.nbytes,
        }

    def close(self) -> None:
        self.graphs.clear()
        self.mask.close()
        self._store.close()
        self.kv.close()
        self.weights.close()

    # ---- drafting

    def propose(
        self, sequences: Items[Sequence], budget: int, depth: int | None = None
    ) -> list[Candidates | NonFiniteDraft]:
        """Propose the best tokens of each depth along the greedy chain; only the best one of each depth has children."""
        return list(
            self._batch(sequences, depth) if len(sequences) > 1 else self._single(sequences[0], depth)
        )

    def _single(self, sequence: Sequence, depth: int | None) -> list[CandidateBlock | NonFiniteDraft]:
        """A lone sequence, whose graph takes a mask instead of ranges."""
        depth = self.depth if depth is None else min(depth, self.depth)
        if len(sequence.unseen) > self.room:
            self._take_in(sequence, len(sequence.unseen) - self.room)
        assert sequence.pending is not None
        unseen, end, n = sequence.unseen, sequence.n_tokens, len(sequence.unseen)
        ahead = sequence.rows(depth)
        n_kv = min(kv_bucket(ahead.stop, self.device.is_gpu), self._n_rows)
        graph = self.graphs.get(
            ("draft", self.name, n_kv, depth), lambda: draft_graph(self.parts, self.mask, n_kv, depth)
        )
        over, spare = self.room - n, self.kv.n_rows - self.room - 1
        tokens = (*sequence.tokens[end - n : end], sequence.pending)
        first = ahead.start - n
        graph.inputs["ints"].array[:] = (
            *unseen, *[0] * over,
            *tokens, *[0] * over,
            *range(end - n, end + 1), *[0] * over,
            *range(first, ahead.start + 1), *range(spare, spare + over),
            n,
            *range(end, end + depth),
            *ahead,
        )  # fmt: skip
        self._hold(sequence.state_index, first, n, end == n)
        if self._masked != sequence.state_index:
            self.mask.forget()
        self._masked = sequence.state_index
        # a drafting column sees the pending token and the drafted ones up to itself
        seen_by = np.packbits(np.triu(np.ones((depth, depth), bool)), axis=1, bitorder="little")
        self.mask.fill(graph, "mask", n_kv, ahead.start, seen_by, self.held, sequence.first_row)
        for fill in graph.fillers:
            fill(sequence)
        graph.run()
        self.mask.ran()
        self.has_last[sequence.state_index] |= n > 0
        sequence.unseen = ()
        best = self.device.read(graph.outputs["best"]).reshape(depth, 2, -1)
        return [checked(partial(_chain, best))]

    def _batch(self, sequences: Items[Sequence], depth: int | None) -> list[CandidateBlock | NonFiniteDraft]:
        """Several sequences in one graph: the output matrix is read once per depth."""
        depth, room, batch = min(depth or self.depth, self.depth), self.room, batch_bucket(len(sequences))
        for s in sequences:
            if len(s.unseen) > room:
                self._take_in(s, len(s.unseen) - room)
        n_kv = min(kv_bucket(max(s.rows(depth).stop for s in sequences), self.device.is_gpu), self._n_rows)
        graph = self.graphs.get(
            ("drafts", self.name, n_kv, depth, batch),
            lambda: drafts_graph(self.parts, n_kv, depth, batch),
        )
        ints, spare = graph.inputs["ints"].array, self.kv.n_rows - room - 1
        ints[:] = 0
        ends = np.cumsum([room * batch, *[(room + 1) * batch] * 3, batch, batch, depth * batch])
        columns, ids, positions, rows, picks, indices, at, into = np.split(ints, ends)
        columns = columns.reshape(batch, room)
        ids, positions, rows = (part.reshape(batch, room + 1) for part in (ids, positions, rows))
        at, into = (part.reshape(depth, batch) for part in (at, into))
        # padding writes to spare rows, and sees a row with finite values
        rows[:] = spare + np.arange(room + 1)
        picks[:], indices[:] = np.arange(batch) * (room + 1), self.parts.last.ne[1] - 1
        into[:] = spare
        ranges = np.zeros((2, depth, batch), np.int32)
        ranges[1] = 1
        for i, s in enumerate(sequences):
            end, n, ahead = s.n_tokens, len(s.unseen), s.rows(depth)
            columns[i, :n], ids[i, : n + 1] = s.unseen, (*s.tokens[end - n : end], s.pending)
            positions[i, : n + 1] = range(end - n, end + 1)
            rows[i, : n + 1] = range(ahead.start - n, ahead.start + 1)
            picks[i] += n
            indices[i], at[:, i], into[:, i] = s.state_index, range(end, end + depth), ahead
            self._hold(s.state_index, ahead.start - n, n, end == n)
            ranges[0, :, i] = s.first_row + self.known_from(s)
            ranges[1, :, i] = np.arange(ahead.start + 1, ahead.stop + 1)
        graph.inputs["ranges"].array[:] = ranges.reshape(2, -1)
        graph.run()
        for s in sequences:
            self.has_last[s.state_index] |= bool(s.unseen)
            s.unseen = ()
        best = self.device.read(graph.outputs["best"]).reshape(depth, batch, 2, -1)
        return [checked(partial(_chain, best[:, i])) for i in range(len(sequences))]

    def take_in(self, sequences: Items[Sequence]) -> None:
        for sequence in sequences:
            self._take_in(sequence, len(sequence.unseen))

    def _take_in(self, sequence: Sequence, count: int) -> None:
        """Take in the first `count` unseen tokens, `room` at a time."""
        while count > 0:
            n = min(count, self.room)
            part, left = sequence.unseen[:n], sequence.unseen[n:]
            graph = self.graphs.get(("context", self.name), lambda: context_graph(self.parts))
            end = sequence.n_tokens - len(left)
            over, spare = self.room - n, self.kv.n_rows - self.room - 1
            ahead = range(sequence.first_row + end - n, sequence.first_row + end)
            graph.inputs["ints"].array[:] = (
                *sequence.tokens[end - n : end], *[0] * over,
                *part, *[0] * over,
                *range(end - n, end), *[0] * over,
                *ahead, *range(spare, spare + over),
                n,
            )  # fmt: skip
            self._hold(sequence.state_index, ahead.start, n, end == n)
            for fill in graph.fillers:
                fill(sequence)
            graph.run()
            self.has_last[sequence.state_index], sequence.unseen, count = True, left, count - n

    def _hold(self, state_index: int, first: int, n: int, is_start: bool) -> None:
        """Note that n cache rows from `first` on are being written; the first is invalid if the hidden state before it is
        unknown, unless the sequence begins there."""
        self.held[first : first + n] = True
        if n and not self.has_last[state_index] and not is_start:
            self.held[first] = False

    # ---- tokens taken in

    def append(self, graph, features, ids, positions, rows) -> None:
        take_in(graph, self.parts, normed(graph, self.parts, features), ids, positions, rows)

    def prefilled(self, sequence: Sequence, n: int, appended: bool) -> None:
        ahead = sequence.rows(n)
        self.held[ahead.start : ahead.stop] = False
        if appended:
            self._hold(sequence.state_index, ahead.start, n, sequence.n_tokens == 0)
            self.has_last[sequence.state_index] = True

    def forget(self, sequence: Sequence, is_start: bool) -> None:
        """Clear the hidden state of the last token, and rewrite the mask before the next pass."""
        self.mask.forget()
        state_index, last, zeros = (
            sequence.state_index,
            self.parts.last,
            np.zeros(self.head.n_embd, np.float32),
        )
        self.device.write(last, zeros, state_index * last.nb[1])
        self.has_last[state_index] = is_start
