"""DFlash, DFlash2 and DSpark as drafters: one pass per block, over a context of the target's features."""

from __future__ import annotations

from collections.abc import Sequence as Items
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ...decode.candidates import CandidateBlock, Candidates, NonFiniteDraft
from ...decode.sequence import Sequence
from ...ggml.bindings import Tensor
from ...ggml.device import I32, NARROW_COLUMNS
from ...ggml.graph import Graph
from ...ggml.weights import Weights
from ...state import range_mask
from ...state.context import Context, ContextRows
from ...state.kv_type import is_quantised
from ...state.spec import KvLayer
from ..drafter import CachedDrafter, Host, batch_bucket, checked
from ..lattice import unpack
from .graphs import Parts, append_context, context_graph, draft_graph
from .params import EMBEDDING, HEAD, DraftParams

# most blocks of a pass with pair scores, which take some hundred operations per block
MOST_LATTICES = 8
# tokens to take in: the sequence, their feature columns, and the position after the last
Unseen = tuple[Sequence, tuple[int, ...], int]


def kind_of(p: DraftParams) -> str:
    """The draft's name in statistics."""
    return "dflash2" if p.selector is not None else "dspark" if p.markov is not None else "dflash"


def cache_layers(p: DraftParams) -> list[KvLayer]:
    """K/V layers of the draft's context: one row per committed token and layer."""
    return [
        KvLayer(p.n_kv_heads, p.head_dim, p.sliding_window if is_window else None)
        for is_window in p.window_layers
    ]


class DFlashDrafter(CachedDrafter):
    """A block-diffusion draft. Its context has rows of committed tokens, followed by a block's own rows.

    Args:
        to_target: The target's id of each of the draft's ids, if they differ.
    """

    def __init__(
        self,
        host: Host,
        p: DraftParams,
        weights: Weights,
        candidates: int,
        n_rows: int,
        to_target: NDArray[np.int32] | None = None,
    ) -> None:
        super().__init__(n_rows)
        self.host, self.device, self.params, self.weights = host, host.device, p, weights
        self.block, self.depth, self.taps = p.block_size, p.depth, p.taps
        self.name, self.to_target = kind_of(p), to_target
        self.context = Context(self.device, cache_layers(p), host.kv_type, n_rows, self.block, host.n_states)
        target, shared, head = host.target, host.weights, host.target.head_name
        self.parts = Parts(
            self.device,
            weights,
            p,
            self.context,
            features=host.features,
            embedding=weights[EMBEDDING] if EMBEDDING in weights else shared[target.embedding_name],
            head=weights[HEAD] if HEAD in weights else shared[head],
            head_scale=None if HEAD in weights else shared.get(head.replace(".weight", ".scale")),
            candidates=candidates,
        )
        self.graphs = host.graphs
        self._is_narrow = self.device.is_gpu and any(is_quantised(t.type) for t in weights.values())
        self._steps = np.arange(self.block, dtype=np.int32)
        # whether a block's columns see no later ones, per group of the context
        self._causal = [
            p.causal_full if group.window is None else p.causal_window for group in self.context.groups
        ]

    # ---- memory

    @property
    def rows(self) -> Items[object]:
        return self.context.slices

    @property
    def rings(self) -> Items[tuple[Tensor, int, int]]:
        return self.context.rings

    @property
    def nbytes(self) -> dict[str, int]:
        return {"draft weights": self.weights.nbytes, "draft K/V": self.context.nbytes}

    def close(self) -> None:
        self.graphs.clear()
        self.context.close()
        self.weights.close()

    # ---- drafting

    def propose(
        self, sequences: Items[Sequence], budget: int, depth: int | None = None
    ) -> list[Candidates | NonFiniteDraft]:
        """Propose a block for each sequence: the pending token and mask tokens, at the positions after the committed ones."""
        most = self._most_blocks(self._columns(depth))
        passes = (sequences[at : at + most] for at in range(0, len(sequences), most))
        return [found for part in passes for found in self._batch(part, depth)]

    def _batch(self, sequences: Items[Sequence], depth: int | None) -> list[CandidateBlock | NonFiniteDraft]:
        """A block per sequence in one pass; padding blocks are not read."""
        p, block, n = self.params, self._columns(depth), batch_bucket(len(sequences))
        for sequence in sequences:
            if len(sequence.unseen) > block:
                self._take_in(sequence, len(sequence.unseen) - block)
        groups, m = self.context.groups, len(sequences)
        origins = [(s.first_row, s.state_index, s.n_tokens) for s in sequences]
        end, longest = max([row + n for row, _, n in origins]), max([n for _, _, n in origins])
        state_index = max([state_index for _, state_index, _ in origins])
        # shared rows are read up to the last one in use, rings up to the last ring in use
        n_kv = tuple(group.used(end - longest, state_index, longest + block) for group in groups)
        graph = self.graphs.get(
            ("draft", self.name, n_kv, block, n), lambda: draft_graph(self.parts, n_kv, block, n)
        )
        ints = graph.inputs["ints"].array.reshape(-1, n * block)
        self._fill_context(ints[0], ints[1], list(ints[4::2]), [(s, s.unseen, s.n_tokens) for s in sequences])
        ranges = [np.zeros((group.pieces, 2, n, block), np.int32) for group in groups]
        ids, positions, *rows = (row.reshape(n, block) for row in (*ints[2:4], *ints[5::2]))
        for group, of_group, seen in zip(groups, rows, ranges):
            of_group[m:] = group.spare((n - m) * block).reshape(-1, block)
            seen[0, 1, m:] = 1  # a column that sees nothing would be NaN
        first, indices, start = np.array(origins, np.int32).T[:, :, None]
        known = np.array([[self.known_from(s)] for s in sequences], np.int32)
        ids[:m] = 0 if p.has_mask_vector else p.mask_id
        if not p.has_mask_vector:
            ids[:m, 0] = [s.pending for s in sequences]
        positions[:m] = start + self._steps[:block]
        for group, of_group, seen, causal in zip(groups, rows, ranges, self._causal):
            of_group[:m] = group.rows_of(first, indices, positions[:m])
            seen[:, :, :m] = group.ranges(first, indices, known, start, block, causal)
        roots = graph.inputs["roots"].array.reshape(3, n)
        roots[:], roots[1] = 0, np.arange(n) * block
        roots[0, :m] = [s.pending for s in sequences]
        ids[m:], positions[m:] = 0, 0
        for i, seen in enumerate(ranges):
            range_mask.fill(graph, i, seen)
        graph.run()
        for s in sequences:
            s.unseen = ()
        return self._read(graph, block, m, n)

    def _columns(self, depth: int | None) -> int:
        """Columns of a block for so many tokens."""
        return self.block if depth is None else min(depth + self.params.first_row, self.block)

    def _most_blocks(self, columns: int) -> int:
        """Most blocks of so many columns in a pass: two passes with the narrow kernels take less time than one with the wide ones
        (27B shape, H200: 8 blocks of 8 columns 2.9 ms, 9 blocks 8.0 ms)."""
        has_pairs = self.params.selector is not None or self.params.markov is not None
        most = MOST_LATTICES if has_pairs else self.host.n_states
        return max(min(most, NARROW_COLUMNS // columns), 1) if self._is_narrow else most

    def _read(self, graph: Graph, block: int, n: int, batch: int) -> list[CandidateBlock | NonFiniteDraft]:
        """Read the candidates of the first n blocks of a pass."""
        depths = block - self.params.first_row
        if "lattice" in graph.outputs:
            whole, is_chain = self.device.read(graph.outputs["lattice"]), self.params.markov is not None
            lattices = whole.reshape(-1, len(whole) // batch)[:n]
            return [checked(partial(unpack, one, depths, self.to_target, is_chain)) for one in lattices]
        output = graph.outputs["best"]
        best = self.device.read(output).reshape(-1, depths, 2, output.ne[0])
        ids, scores = best[:, :, 0].astype(np.int32), np.ascontiguousarray(best[:, :, 1])
        if self.to_target is not None:
            ids = self.to_target[ids]
        return [checked(partial(CandidateBlock, ids[i], scores[i])) for i in range(n)]

    def take_in(self, sequences: Items[Sequence]) -> None:
        """See Drafter.take_in: a pass takes in a block of tokens of any sequences."""
        self._take([(s, s.unseen, s.n_tokens) for s in sequences])
        for s in sequences:
            s.unseen = ()

    def _take_in(self, sequence: Sequence, n: int) -> None:
        """Take in the first n unseen tokens."""
        part, left = sequence.unseen[:n], sequence.unseen[n:]
        self._take([(sequence, part, sequence.n_tokens - len(left))])
        sequence.unseen = left

    def _take(self, parts: list[Unseen]) -> None:
        """Take in these tokens, a block at a time."""
        while parts := [part for part in parts if part[1]]:
            taken, left, room = [], [], self.block
            for sequence, columns, end in parts:
                now, later = columns[:room], columns[room:]
                taken.append((sequence, now, end - len(later)))
                left.append((sequence, later, end))
                room -= len(now)
            graph = self.graphs.get(("context", self.name), lambda: context_graph(self.parts))
            ints = graph.inputs["ints"].array.reshape(-1, self.block)
            self._fill_context(ints[0], ints[1], list(ints[2:]), taken)
            graph.run()
            parts = left

    def _fill_context(
        self,
        columns: NDArray[np.int32],
        positions: NDArray[np.int32],
        rows: Items[NDArray[np.int32]],
        parts: Items[Unseen],
    ) -> None:
        """Set the inputs for tokens that a pass takes in: feature columns, positions, and cache rows in each group. Padding goes
        to spare rows."""
        groups = self.context.groups
        counts = [len(taken) for _, taken, _ in parts]
        origins = [
            (sequence.first_row, sequence.state_index, end - n)
            for (sequence, _, end), n in zip(parts, counts)
        ]
        at = sum(counts)
        columns[:at] = [column for _, taken, _ in parts for column in taken]
        positions[:at] = [start + i for (_, _, start), n in zip(origins, counts) for i in range(n)]
        first, state_index, _ = (
            np.repeat(np.array(origins, np.int32), counts, axis=0).T if len(origins) > 1 else origins[0]
        )
        self.held[first + positions[:at]] = True
        for group, of_group in zip(groups, rows):
            of_group[:at] = group.rows_of(first, state_index, positions[:at])
        if at < len(columns):
            columns[at:] = positions[at:] = 0
            for group, of_group in zip(groups, rows):
                of_group[at:] = group.spare(len(columns) - at)

    # ---- tokens taken in

    def append(self, graph: Graph, features: Tensor, ids: Tensor, positions: Tensor, rows: Tensor) -> None:
        """Rows in a ring are inputs of their own, one for each ring and call."""
        n, groups = features.ne[1], self.context.groups
        of_groups = [_ring_input(graph, group, n) if group.is_ring else rows for group in groups]
        append_context(graph, self.parts, features, positions, of_groups)

    def prefilled(self, sequence: Sequence, n: int, appended: bool) -> None:
        rows = sequence.rows(n)
        self.held[rows.start : rows.stop] = appended


def _ring_input(graph: Graph, group: ContextRows, n: int):
    """Input of a ring's rows for the next n tokens of a pass, int32 [n]: one for each draft, ring and call."""
    own = f"ring {id(group):x} "
    before = [part.tensor for name, part in graph.inputs.items() if name.startswith(own)]
    name, at = f"{own}{len(before)}", sum(t.ne[0] for t in before)

    def fill(sequence: Sequence) -> None:
        start = sequence.n_tokens + at
        graph.inputs[name].array[:] = group.rows(0, sequence.state_index, start, start + n)

    graph.fillers.append(fill)
    return graph.input(name, I32, n)
