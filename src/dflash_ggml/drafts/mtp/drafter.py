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
from ...state.memory import Part, padded
from ...state.spec import KvLayer, StateSpec
from ..drafter import CachedDrafter, DraftSource, Host, batch_bucket, checked
from .graphs import Parts, context_graph, draft_graph, normed, take_in

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
        super().__init__(n_rows)
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
        self.graphs = host.graphs
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
            "draft state": self._store.nbytes,
        }

    def close(self) -> None:
        self.graphs.clear()
        self._store.close()
        self.kv.close()
        self.weights.close()

    # ---- drafting

    def propose(
        self, sequences: Items[Sequence], budget: int, depth: int | None = None
    ) -> list[Candidates | NonFiniteDraft]:
        """Propose the best tokens of each depth along the greedy chain; only the best one of each depth has children."""
        depth, room, batch = min(depth or self.depth, self.depth), self.room, batch_bucket(len(sequences))
        for s in sequences:
            if len(s.unseen) > room:
                self._take_in(s, len(s.unseen) - room)
        n_kv = min(kv_bucket(max(s.rows(depth).stop for s in sequences), self.device.is_gpu), self._n_rows)
        graph = self.graphs.get(
            ("draft", self.name, n_kv, depth, batch),
            lambda: draft_graph(self.parts, n_kv, depth, batch),
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
            self.held[ahead.start - n : ahead.start] = True
            ranges[0, :, i] = s.first_row + self.known_from(s)
            ranges[1, :, i] = np.arange(ahead.start + 1, ahead.stop + 1)
        graph.inputs["ranges"].array[:] = ranges.reshape(2, -1)
        graph.run()
        for s in sequences:
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
            self.held[ahead.start : ahead.stop] = True
            for fill in graph.fillers:
                fill(sequence)
            graph.run()
            sequence.unseen, count = left, count - n

    # ---- tokens taken in

    def append(self, graph, features, ids, positions, rows) -> None:
        take_in(graph, self.parts, normed(graph, self.parts, features), ids, positions, rows)

    def prefilled(self, sequence: Sequence, n: int, appended: bool) -> None:
        ahead = sequence.rows(n)
        self.held[ahead.start : ahead.stop] = appended

    def restore_seen(self, sequence: Sequence, seen: NDArray[np.bool_]) -> None:
        """Also clear the last token's hidden state, which no snapshot has: the next row is made with zeros, as a first one."""
        super().restore_seen(sequence, seen)
        last = self.parts.last
        self.device.write(last, np.zeros(last.ne[0], np.float32), sequence.state_index * last.nb[1])
