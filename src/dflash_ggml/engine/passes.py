"""The target's device passes of a step, one method each: fill the inputs, run the graph, read the results.

Passes deal with cache rows and masks; drafts, sampling, stopping and modes are above.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ..decode.forest import Forest
from ..decode.reduced import KEPT, WATCHED, Watch
from ..decode.sampling import BLOCK
from ..decode.sequence import Sequence
from ..decode.tree import Tree, observers, verify_width
from ..errors import DeviceError
from ..ggml.bindings import Tensor
from ..ggml.device import Device
from ..ggml.graph import Graph
from ..ggml.graph_cache import GraphCache
from ..ggml.store import Workspace
from ..ggml.weights import Weights
from ..models.target import Append, Batch, Outputs, Reduction, Target
from ..state.kv import kv_bucket
from ..state.kv_type import KvType
from ..state.mask import ResidentMask
from ..state.memory import SCRATCH, part_on
from ..state.pool import ADJACENT, SPACED, RowPool
from ..state.ring import TreeColumns
from ..state.state import SPARE, TargetState, commit_graph, move_graph
from ..state.window import DecodeWindow
from .batches import joined_columns
from .kernel_tuning import FP8_COLUMNS
from .placement import ONE_SIDE, Placement

FOREST = 64  # columns up to which a matmul costs little more than one (bench/notes-matmul.md)
GRAPHS = 48  # kept for one sequence; batches have twice as many of their own
MOVED_AT_ONCE = 1024  # cache rows moved by one graph run
_REDUCIBLE = 1 << 19  # largest vocabulary of which a GPU picks the best KEPT
_REDUCTION = Reduction(KEPT, WATCHED, BLOCK)
_REDUCTIONS = Reduction(KEPT, WATCHED, BLOCK, each=True)


def most_columns(max_width: int, n_states: int) -> int:
    """Columns of the widest verify pass for trees of up to `max_width`; batches of sequences have more."""
    return max_width if n_states == 1 else max(max_width, FOREST, verify_width(n_states - 1))


def tree_width(budget: int, depth: int) -> int:
    """Columns of the widest verify pass: a tree of `budget` nodes or a whole chain, whichever is wider."""
    return verify_width(max(budget, depth))


class TargetPasses:
    """Graphs, state and scratch memory of a target on one device.

    Args:
        device: The first of the devices.
        target: The target.
        weights: Its weights on the device.
        kv_type: Types of the K/V caches.
        n_rows: Cache rows, reserved here.
        max_width: Columns of the widest tree, 0 for none.
        depth: Usual longest path, which commit graphs are built for.
        taps: Layers whose output the draft needs.
        window: Attention window while decoding, None: everything.
        n_states: Sequences.
        n_batch: Tokens of the longest linear pass.
        placement: The side of each part.
        workspace: Scratch memory shared with other passes.
        fp8: Matrices whose matmuls with many prompt tokens may round both operands to 8-bit floats.
    """

    def __init__(
        self,
        device: Device,
        target: Target,
        weights: Weights,
        kv_type: KvType,
        n_rows: int,
        max_width: int,
        depth: int,
        taps: tuple[int, ...],
        window: DecodeWindow | None = None,
        n_states: int = 1,
        n_batch: int = 0,
        placement: Placement = ONE_SIDE,
        workspace: Workspace | None = None,
        fp8: Items[Tensor] = (),
    ) -> None:
        self.device, self.target, self.weights = device, target, weights
        self.fp8 = fp8
        self.n_rows, self.max_width, self.taps = n_rows, max_width, taps
        # a CPU's rows are in host memory already
        self.reduces = device.is_gpu and target.n_vocab <= _REDUCIBLE
        self._usual_path = depth + 1
        feature_row = len(taps) * target.n_embd
        self.most_columns = most_columns(max_width, n_states)
        self.state = TargetState(
            device,
            replace(target.state_spec(), sides=placement.layers),
            kv_type,
            n_rows,
            self.most_columns,
            feature_row,
            n_states,
            n_batch,
            device.sides[placement.draft],
        )
        self.placement = placement
        # a path of prompt lookup may be as long as the tree is wide
        ranks = device.sides[: device.n_ranks]
        self.tree_mask = (
            ResidentMask(device, max_width, max_width, n_rows, ranks=ranks) if max_width else None
        )
        self.window = window
        self.rows = RowPool(n_rows, SPACED if device.is_gpu else ADJACENT)
        self._spare = np.arange(n_rows, n_rows + SPARE)
        self._steps = np.arange(max(self.most_columns, 1), dtype=np.int32)
        self.workspace = Workspace(device) if workspace is None else workspace
        self.graphs = GraphCache(self.workspace, limit=GRAPHS * (1 if n_states == 1 else 3))

    # ---- memory

    def bucket(self, rows: int) -> int:
        """Rows that a graph reads when `rows` are in use.

        Raises:
            DeviceError: There are fewer rows.
        """
        if rows > self.n_rows:
            raise DeviceError(f"{rows} cache rows needed, there are {self.n_rows}")
        return min(kv_bucket(rows, self.device.is_gpu), self.n_rows)

    def reserve(self, columns: int, append: Append | None) -> None:
        """Allocate the scratch memory of a prefill batch up front: graphs must be rebuilt when it grows."""
        columns, taps = min(columns, self.n_rows), self.taps if append else ()
        # with all rows: caches of other types than float16 are copied for a batch
        batch = Batch(columns, self.linear_rows(columns, self.n_rows), None, taps, append)
        self._build(batch).place(self.workspace).close()
        if self.can_join and self.device.is_gpu:
            n = joined_columns(self.state.n_states)
            batch = self._joined(max(columns - n, 1), n, append, None)
            self._build(batch).place(self.workspace).close()
        if self.window is not None:  # what its passes gather may be more
            batch = Batch(max(self.max_width, 1), 0, self.tree_mask, self.taps, window=self.window)
            self._build(batch).place(self.workspace).close()

    def linear_rows(self, columns: int, rows: int) -> int:
        """Rows that the graph of a linear pass reads when `rows` are in use: all, if hidden rows cost nothing (but a mask from
        the host) or less than another graph.

        Raises:
            DeviceError: There are fewer rows.
        """
        bucket = self.bucket(rows)
        narrow = columns == 1 and self.device.is_gpu
        return bucket if narrow or not self.device.has_own_kernels else self.n_rows

    def nbytes_on(self, side: Device) -> dict[str, int]:
        """Bytes on a side by part, named as in the memory plan."""
        found = {"target weights": self.weights.nbytes_on(side), **self.state.nbytes_on(side)}
        if side.index < self.device.n_ranks:
            found["tree mask"] = self.tree_mask.nbytes_on(side) if self.tree_mask else 0
        return found

    @property
    def takes_several(self) -> bool:
        """Whether a pass may have trees of several sequences; a decode window gathers rows for one only."""
        return self.window is None

    @property
    def can_join(self) -> bool:
        """Whether a prefill pass can also decode other sequences; windows and rings gather rows for one only, and decoding is
        exact where prefill is not."""
        return self.state.n_states > 1 and self.window is None and not self.state.rings and not self.fp8

    def _joined(self, columns: int, forest: int, append: Append | None, reduction: Reduction | None) -> Batch:
        """A prefill batch of `columns` columns behind a forest."""
        n_kv, n_states = self.n_rows, self.state.n_states
        first = Batch(forest, n_kv, None, self.taps, None, reduction, "every", None, n_states, True)
        taps = self.taps if append else ()
        return Batch(columns, n_kv, None, taps, append, seqs=1, forest=first)

    def _build(self, batch: Batch) -> Graph:
        graph = self.target.build(batch, self.state, self.weights)
        if self.fp8 and batch.mask is None and not batch.is_forest and batch.columns >= FP8_COLUMNS:
            graph.allow_fp8(self.fp8)
        return graph

    # ---- passes

    def linear(
        self,
        sequence: Sequence,
        ids: Items[int],
        append: Append | None = None,
        column: int | None = None,
        watch: Watch | None = None,
        outputs: Outputs = "last",
        decoding: bool = False,
    ) -> Graph:
        """Run `ids` after the committed tokens and advance the state.

        Args:
            sequence: Its committed tokens come before `ids`.
            ids: Tokens to run.
            append: The draft's part of the graph, which takes in these tokens in the same pass.
            column: Column for a single token's features.
            watch: Reduce the logits, for `reduced`.
            outputs: Logits and choice of the last token or of every one, or all hidden states.
            decoding: The token belongs to the answer, not to the prompt.

        Returns:
            The graph, whose outputs stay until the next pass runs.
        """
        n, ahead, state_index = len(ids), sequence.rows(len(ids)), sequence.state_index
        window = self._window(sequence.n_tokens + 1) if decoding and n == 1 else None
        n_kv = 0 if window else self.linear_rows(n, ahead.stop)
        feeds = "append" if append else "" if column is None else "keep"
        taps = self.taps if feeds else ()
        # graphs for any state index prefill as fast, and serve all of them
        seqs = int(state_index > 0 or (n > 1 and self.device.is_gpu and self.state.n_states > 1))
        reduction = _REDUCTION if watch else None
        graph = self.graphs.get(
            ("linear", n, n_kv, feeds, reduction, outputs, window is not None, seqs),
            lambda: self._build(Batch(n, n_kv, None, taps, append, reduction, outputs, window, seqs)),
        )
        if seqs:
            graph.inputs["seqs"].array[:] = state_index, 0, n
        if window is not None:
            alone = np.zeros(1, np.int32), np.ones((1, 1), bool)
            window.fill(graph, sequence.first_row, sequence.n_tokens, *alone)
        self._fill_linear(graph, sequence, ids)
        for ring in self.state.rings:
            ring.fill(graph, sequence.state_index, sequence.n_tokens, n)
        if feeds == "keep":
            graph.inputs["column"].array[:] = column
        if watch:
            fill_watches(graph, [(slice(None), watch)])
        graph.run()
        return graph

    def joined(
        self,
        sequence: Sequence,
        ids: Items[int],
        append: Append | None,
        forest: Forest,
        watches: Items[Watch | None],
        columns: Items[int],
    ) -> Graph:
        """Run a chunk of a prompt (as `linear`) and a forest (as `verify`) in one pass.

        Args:
            sequence: The prompt's sequence.
            ids: The chunk, after its committed tokens.
            append: The draft's part of the graph, which takes the chunk in.
            forest: Trees of one column each, of decoding sequences.
            watches: How to reduce the logits of each of these.
            columns: Columns for their features.

        Returns:
            The graph; its outputs have a column for each of the forest's, and behind them that of the last id.
        """
        n, first = len(ids), forest.width
        reduction = _REDUCTIONS if any(watches) else None
        graph = self.graphs.get(
            ("joined", n, first, append is None, reduction),
            lambda: self._build(self._joined(n, first, append, reduction)),
        )
        self._fill_forest(graph, forest, watches, columns)
        graph.inputs["chunk seqs"].array[:] = sequence.state_index, 0, n
        self._fill_linear(graph, sequence, ids, "chunk ")
        of_all = graph.inputs["joined"].array.reshape(3, first + n)
        of_all[:, :first] = graph.inputs["ints"].array.reshape(4, first)[:3]
        of_all[:, first:] = graph.inputs["chunk ints"].array.reshape(7, n)[:3]
        graph.run()
        return graph

    @staticmethod
    def _fill_linear(graph: Graph, sequence: Sequence, ids: Items[int], name: str = "") -> None:
        """Fill the position inputs of a linear batch."""
        n, first, start = len(ids), sequence.first_row, sequence.rows(1).start
        fill_span(graph, sequence, n, name)
        if n == 1:  # most passes of plain decoding
            graph.inputs[f"{name}ints"].array[:] = ids[0], sequence.n_tokens, start, -1, 0, first, start + 1
        else:
            steps = np.arange(n, dtype=np.int32)
            inputs = graph.inputs[f"{name}ints"].array.reshape(7, n)
            inputs[:5] = ids, sequence.n_tokens + steps, start + steps, steps - 1, steps
            inputs[5] = first
            np.add(steps, start + 1, inputs[6])
        for fill in graph.fillers:
            fill(sequence)

    def verify(
        self, forest: Forest, watches: Items[Watch | None] = (None,), columns: Items[int] = ()
    ) -> Graph:
        """Run the trees of a forest, each root after the committed tokens of its sequence.

        The pass commits trees of one column; other committed states stay unchanged. A lone sequence with state index 0 has
        graphs of its own, which are faster (bench/notes-step.md).

        Args:
            watches: How to reduce each sequence's logits (None: not reduced).
            columns: Feature columns, one for each column of the pass; see `fixed_columns`.

        Returns:
            The graph, whose outputs `choice` and `logits` have a column for each of the forest's.
        """
        if len(forest.sequences) > 1:
            return self._verify_forest(forest, watches, columns)
        (sequence,), (tree,), watch = forest.sequences, forest.trees, watches[0]
        if sequence.state_index:
            return self._verify_forest(forest, watches, columns)
        if tree.width == 1:
            column = columns[0] if columns else None
            return self.linear(sequence, tree.tokens.tolist(), column=column, watch=watch, decoding=True)
        return self._verify_tree(sequence, tree, watch)

    def fixed_columns(self, forest: Forest) -> bool:
        """Whether a node's features can only go to the column of its index."""
        return len(forest.sequences) == 1 and forest.used > 1 and not forest.sequences[0].state_index

    def _verify_tree(self, sequence: Sequence, tree: Tree, watch: Watch | None) -> Graph:
        """A lone tree of state index 0."""
        assert self.tree_mask is not None, "loaded without room for trees"
        width, n = verify_width(tree.n_nodes), tree.width
        ahead = sequence.rows(width)
        self.bucket(ahead.start + self.tree_rows(tree.n_nodes))  # the commit's rows must exist too
        window = None
        if self.window is not None:
            window = self._window(sequence.n_tokens + int(tree.depths.max()) + 1)
        n_kv = 0 if window else self.bucket(ahead.stop)
        reduction = _REDUCTION if watch else None
        graph = self.graphs.get(
            ("verify", width, n_kv, reduction),
            lambda: self._build(
                Batch(width, n_kv, self.tree_mask, self.taps, None, reduction, window=window)
            ),
        )
        ids, positions, rows, parents = graph.inputs["ints"].array.reshape(4, width)
        ids[:n], parents[:n] = tree.tokens, tree.parents
        np.add(tree.depths, sequence.n_tokens, positions[:n])
        if n < width:  # padding: children of the root, never read
            ids[n:], positions[n:], parents[n:] = tree.tokens[0], sequence.n_tokens + 1, 0
        np.add(self._steps[:width], ahead.start, rows)
        fill_span(graph, sequence, width)
        seen_by = observers(tree, width)
        if window is None:
            self.tree_mask.fill(graph, "mask", n_kv, ahead.start, seen_by, origin=sequence.first_row)
        if window is not None or self.state.rings:
            own = unpacked(seen_by, width)
            depths = positions - sequence.n_tokens
            if window is not None:
                window.fill(graph, sequence.first_row, sequence.n_tokens, depths, own)
            for ring in self.state.rings:
                ring.fill_trees(
                    graph, width, [TreeColumns(sequence.state_index, sequence.n_tokens, depths, own)]
                )
        if watch:
            fill_watches(graph, [(slice(None), watch)])
        graph.run()
        if window is None:
            self.tree_mask.ran()
        return graph

    def _window(self, end: int) -> DecodeWindow | None:
        """The decode window of a pass that ends before position `end`; None if it hides nothing."""
        return self.window if self.window is not None and self.window.hides(end) else None

    def commit(self, forest: Forest, paths: Items[tuple[int, ...]]) -> None:
        """Commit the nodes of these paths, one for each tree of the last forest, on the device.

        An empty path commits nothing.
        """
        if not any(paths):
            return
        if self.fixed_columns(forest):
            self._commit_path(forest.sequences[0], paths[0])
        else:
            self._commit_paths(forest, paths)

    def _commit_path(self, sequence: Sequence, path: tuple[int, ...]) -> None:
        """Commit a path of a lone tree of state index 0."""
        room = self._path_room(len(path))
        move = path != tuple(range(len(path)))
        if not (move or self.state.spec.recurrent):
            return  # the rows are in place, and there is no other state
        graph = self.graphs.get(
            ("commit", room, move), lambda: commit_graph(self.device, self.state, room, move * room)
        )
        if self.state.spec.recurrent:
            graph.inputs["path"].array[:] = (*path, *[-1] * (room - len(path)))
        if move:
            nodes, n = [*path, *range(len(path), room)], max(room, *path) + 1
            rings = (ring.rows(sequence.state_index, sequence.n_tokens, n) for ring in self.state.rings)
            for (prefix, cache), rows in zip(self.state.caches, [np.array(sequence.rows(n)), *rings]):
                graph.inputs[f"{prefix}to"].array[:] = rows[:room]
                for i in range(len(cache.wholes)):
                    graph.inputs[f"{prefix}from{i}"].array[:] = rows[nodes]
        graph.run()

    def _verify_forest(self, forest: Forest, watches: Items[Watch | None], columns: Items[int]) -> Graph:
        """Trees of several sequences, or one of any state index."""
        width, n_states = forest.width, self.state.n_states
        bucket = self.bucket(max(s.rows(n).stop for s, n in zip(forest.sequences, forest.widths)))
        window = None
        if not self.takes_several:
            (sequence,), (tree,) = forest.sequences, forest.trees
            window = self._window(sequence.n_tokens + int(tree.depths.max()) + 1)
        n_kv, reduction = 0 if window else bucket, _REDUCTIONS if any(watches) else None
        graph = self.graphs.get(
            ("forest", width, n_kv, reduction),
            lambda: self._build(
                Batch(width, n_kv, None, self.taps, None, reduction, "every", window, n_states, True)
            ),
        )
        self._fill_forest(graph, forest, watches, columns, window)
        graph.run()
        return graph

    def _fill_forest(
        self,
        graph: Graph,
        forest: Forest,
        watches: Items[Watch | None],
        columns: Items[int],
        window: DecodeWindow | None = None,
    ) -> None:
        """The inputs of a forest."""
        width, n_states, used = forest.width, self.state.n_states, forest.used
        widths, lasts = forest.widths, [s.n_tokens for s in forest.sequences]
        starts = [s.first_row + n for s, n in zip(forest.sequences, lasts)]
        ends = [start + n for start, n in zip(starts, widths)]
        ids, positions, rows, parents = graph.inputs["ints"].array.reshape(4, width)
        # one array for all per-sequence inputs: numpy calls per sequence would delay the pass
        firsts = [s.first_row for s in forest.sequences]
        shared = np.array([lasts, np.subtract(starts, forest.firsts), firsts, starts], np.int32)
        per_column, here = np.repeat(shared, widths, axis=1), slice(used)
        ids[here], parents[here] = forest.arrays
        np.concatenate([tree.depths for tree in forest.trees], out=positions[here])
        positions[here] += per_column[0]
        np.add(np.arange(used, dtype=np.int32), per_column[1], rows[here])
        seqs = graph.inputs["seqs"].array.reshape(n_states, 3)
        seqs[: len(widths)] = list(zip([s.state_index for s in forest.sequences], forest.firsts, widths))
        seqs[len(widths) :] = 0
        padding = slice(used, width)
        ids[padding], positions[padding], parents[padding] = 0, 0, -1
        rows[padding] = self._spare[: width - used]
        if window is None:
            ranges = graph.inputs["ranges"].array.reshape(2, width)
            ranges[:, here] = per_column[2:]
            ranges[0, padding], ranges[1, padding] = 0, 1  # a column that sees nothing would be NaN
            if "spans" in graph.inputs:
                spans = graph.inputs["spans"].array.reshape(n_states, 2)
                spans[: len(widths)] = list(zip(firsts, ends))
                spans[len(widths) :] = 0
        if window is not None:
            (sequence,), (tree,) = forest.sequences, forest.trees
            positions[padding] = sequence.n_tokens
            own = own_columns(tree, width)  # padding sees itself
            window.fill(graph, sequence.first_row, sequence.n_tokens, positions - sequence.n_tokens, own)
        if self.state.rings:
            trees = [
                TreeColumns(s.state_index, s.n_tokens, t.depths, own_columns(t, t.width))
                for s, t, _ in forest.blocks
            ]
            for ring in self.state.rings:
                ring.fill_trees(graph, width, trees)
        if "column" in graph.inputs:
            graph.inputs["column"].array[:] = columns
        if any(watches):
            fill_watches(graph, zip([columns for _, _, columns in forest.blocks], watches))

    def _commit_paths(self, forest: Forest, paths: Items[tuple[int, ...]]) -> None:
        """Commit paths of several sequences."""
        longest = max(map(len, paths))
        n = sum(node != at for path in paths for at, node in enumerate(path))
        if not (n or self.state.spec.recurrent):
            return
        room = self._path_room(longest)
        # few graph sizes move any number of rows
        moved = next(size for size in (0, 16, 64, 256, 1024) if size >= n)
        graph = self.graphs.get(
            ("commits", room, moved),
            lambda: commit_graph(self.device, self.state, room, moved, is_forest=True),
        )
        inputs, n_states = graph.inputs, self.state.n_states
        if self.state.spec.recurrent:
            nodes, seqs = (
                inputs["path"].array.reshape(n_states, room),
                inputs["seqs"].array.reshape(n_states, 3),
            )
            nodes[: len(paths)] = [(*path, *[-1] * (room - len(path))) for path in paths]
            nodes[len(paths) :] = -1
            seqs[: len(paths)] = list(
                zip([s.state_index for s in forest.sequences], forest.firsts, forest.widths)
            )
            seqs[len(paths) :] = 0
        for (prefix, cache), ring in zip(self.state.caches if moved else (), (None, *self.state.rings)):
            moves: list[tuple[int, int]] = []
            for sequence, path in zip(forest.sequences, paths):
                full = sequence.rows(max(path) + 1) if path else range(0)
                rows = (
                    full
                    if ring is None
                    else ring.rows(sequence.state_index, sequence.n_tokens, len(full)).tolist()
                )
                moves += [(rows[node], rows[at]) for at, node in enumerate(path) if node != at]
            moves += moves[:1] * (moved - len(moves))  # surplus entries repeat a move
            inputs[f"{prefix}to"].array[:] = [to for _, to in moves]
            for i in range(len(cache.wholes)):
                inputs[f"{prefix}from{i}"].array[:] = [source for source, _ in moves]
        graph.run()

    def move_rows(self, caches: Items[Tensor], first: int, to: int, n: int) -> None:
        """Copy n cache rows from row `first` to row `to`; the ranges may overlap."""
        starts = range(0, n, MOVED_AT_ONCE)
        for at in starts if to < first else reversed(starts):
            size = MOVED_AT_ONCE if n - at > MOVED_AT_ONCE // 4 else MOVED_AT_ONCE // 4
            graph = self.graphs.get(("move", size), partial(move_graph, self.device, caches, size))
            steps = at + np.arange(size)
            steps[n - at :] = at  # surplus entries repeat a copy
            graph.inputs["from"].array[:] = first + steps
            graph.inputs["to"].array[:] = to + steps
            graph.run()

    def tree_rows(self, nodes: int) -> int:
        """Cache rows behind the committed ones that verifying and committing a tree of `nodes` nodes touches."""
        width = verify_width(nodes)
        return max(width, self._path_room(width))

    def _path_room(self, length: int) -> int:
        """Entries of the commit graph for a path: the usual length, or that of the widest tree."""
        return self._usual_path if length <= self._usual_path else self.max_width

    # ---- outputs, valid until the next pass runs

    def choices(self, graph: Graph) -> np.ndarray:
        """The target's best token after each column of a pass, int32."""
        return self.device.read(graph.outputs["choice"])

    def nan_columns(self, graph: Graph, choices: NDArray[np.int32], first: int = 0) -> list[int]:
        """Which of these choices, of the columns from `first` on, come from NaN logits: for those the CPU picks 0, a GPU -1."""
        if min(choices.tolist()) > 0:  # checked in every pass, and numpy is slow for so few
            return []
        return [i for i in np.flatnonzero(choices <= 0).tolist() if self.is_nan(graph, first + i)]

    def is_nan(self, graph: Graph, column: int = 0) -> bool:
        """Whether a column's logits are NaN: one NaN among the values that they are made from makes all of them so.

        Raises:
            DeviceError: They are NaN because one of two ranks did not answer the other.
        """
        offset = 4 * self.target.n_vocab * column
        is_nan = bool(np.isnan(self.device.read(graph.outputs["logits"], 1, offset=offset)[0]))
        if is_nan and self.state.mailboxes is not None:
            self.state.mailboxes.check()
        return is_nan

    def logits_row(self, graph: Graph, column: int = 0) -> np.ndarray:
        """One column of a pass's logits, float32 [n_vocab], a copy; read it before the next pass runs."""
        n = self.target.n_vocab
        return self.device.read(graph.outputs["logits"], n, offset=4 * n * column)

    def hidden_rows(self, graph: Graph) -> np.ndarray:
        """The hidden states of a linear pass with that output, float32 [tokens, n_embd]."""
        return self.device.read(graph.outputs["hidden"]).reshape(-1, self.target.n_embd)

    def reduced_rows(self, graph: Graph) -> np.ndarray:
        """The reduced logits of all columns of a pass run with watches, float32 [columns, values per column], in one read."""
        output = graph.outputs["reduced"]
        return self.device.read(output).reshape(output.ne[1], output.ne[0])

    def logits_block(self, graph: Graph, column: int, block: int) -> np.ndarray:
        """Block `block` of a column's logits (blocks as in `Reduced.masses`), float32, a copy; read before the next pass runs."""
        n, first = self.target.n_vocab, BLOCK * block
        return self.device.read(
            graph.outputs["logits"], min(BLOCK, n - first), offset=4 * (n * column + first)
        )

    # ---- the end

    def close(self) -> None:
        """Free the device memory."""
        self.graphs.clear()
        self.workspace.close()
        self.state.close()
        if self.tree_mask is not None:
            self.tree_mask.close()
        self.weights.close()


def allocated(
    passes: TargetPasses, of_draft: Mapping[str, int], of_scorer: Mapping[str, int]
) -> dict[str, int]:
    """Device bytes by part of a target, its draft and a scorer, named as in the memory plan, and the graphs' scratch."""
    device, found = passes.device, dict[str, int]()
    for side, scratch in zip(device.sides, passes.workspace.sizes):
        if side is device.host:
            continue
        own = passes.nbytes_on(side)
        own.update(of_scorer if side.index == 0 else {})
        own.update(of_draft if side.index == passes.placement.draft else {})
        for name, size in (own | {SCRATCH: scratch}).items():
            if side.index == 0 or size:
                found[part_on(name, side.label) if side.index else name] = size
    return found


def fill_span(graph: Graph, sequence: Sequence, columns: int, name: str = "") -> None:
    """Set the span of rows that a pass of one sequence sees, if its graph has that input.

    Args:
        name: What the inputs' names begin with.
    """
    if f"{name}span" in graph.inputs:
        graph.inputs[f"{name}span"].array[:] = sequence.first_row, sequence.rows(columns).stop
        graph.inputs[f"{name}spanned"].array[:] = 0, 0, columns


def own_columns(tree: Tree, width: int) -> NDArray[np.bool_]:
    """Visibility among a tree's columns, bool [width, width]; padding columns see themselves."""
    return unpacked(observers(tree, width), width)


def unpacked(seen_by: NDArray[np.uint8], width: int) -> NDArray[np.bool_]:
    """Visibility from bits (observers of each column, [width, width / 8]) as a matrix [width, width]: what each column sees."""
    return np.unpackbits(seen_by, axis=1, bitorder="little")[:, :width].T.astype(bool)


def fill_watches(graph: Graph, watches: Iterable[tuple[slice, Watch | None]]) -> None:
    """The inputs of a reduction, by columns; unused entries name token 0."""
    temperatures = graph.inputs["temperature"].array.reshape(-1)
    ids = graph.inputs["watch"].array.reshape(-1, WATCHED)
    temperatures[:], ids[:] = 1.0, 0
    for columns, watch in watches:
        if watch is not None:
            temperatures[columns] = max(watch.temperature, 1e-30)
            ids[columns, : len(watch.ids)] = watch.ids
