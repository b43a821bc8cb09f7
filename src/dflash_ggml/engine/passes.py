"""The four device passes of a step, one method each: fill the inputs, run the graph, read the small outputs.

A pass knows where rows lie and what a mask hides; it knows nothing of sampling, stopping or modes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from ..config import EngineConfig
from ..decode.tree import Tree, observers
from ..drafts.dflash.graphs import append_context, context_graph, draft_graph
from ..drafts.dflash.params import DraftParams
from ..ggml.device import Device, Workspace
from ..ggml.graph import Graph
from ..ggml.weights import Weights
from ..models.qwen35 import linear_graph, tree_graph
from ..models.qwen35_params import TargetParams
from ..state.caches import DraftState, TargetState, commit_graph, kv_bucket
from ..state.mask import HIDDEN, SlotMask

MAX_GRAPHS = 24  # graphs kept; the least recently used goes first


def padded_width(nodes: int) -> int:
    """Columns of a verify pass over `nodes` nodes and the root: exact up to 8, then multiples of 8 (kernel tiles)."""
    width = nodes + 1
    return width if width <= 8 else -(-width // 8) * 8


def tree_width(budget: int, block_size: int) -> int:
    """Columns of the widest verify pass: a tree of `budget` nodes or the whole chain, whichever is wider."""
    return padded_width(max(budget, block_size - 1))


class Passes:
    """Graphs, states and scratch memory of one sequence on one device."""

    def __init__(
        self,
        device: Device,
        config: EngineConfig,
        n_ctx: int,
        target: tuple[TargetParams, Weights],
        draft: tuple[DraftParams, Weights] | None,
    ) -> None:
        self.device, self.n_ctx = device, n_ctx
        self.params, self.weights = target
        self.draft_params, self.draft_weights = draft if draft else (None, None)
        self.taps = self.draft_params.taps if draft else ()
        self.block = self.draft_params.block_size if draft else 0
        self.candidates = config.candidates
        self.max_width = tree_width(config.budget, self.block) if draft else 0
        # a tree near the end of the context still needs rows for all its nodes
        self._max_rows = -(-(n_ctx + max(self.max_width, 1) + self.block) // 256) * 256
        first = min(self._max_rows, 4096)
        self.state = TargetState(device, self.params, config.kv_type, first, self.max_width, len(self.taps))
        self.draft_state = (
            DraftState(device, self.draft_params, config.kv_type, first + self.block) if draft else None
        )
        self.in_draft = np.zeros(self._max_rows, bool)  # which positions the draft's context holds
        self.tree_mask: SlotMask | None = None
        self.draft_masks: list[SlotMask] = []
        self._block_seen_by: list[np.ndarray] = []  # who sees each column of a block, as bits, per draft mask
        self._n_rows = 0  # committed and spare rows that caches and masks all have
        self._make_masks(first)
        self.workspace = Workspace(device)
        self._graphs: OrderedDict[tuple, Graph] = OrderedDict()
        self.builds = 0
        self._past_runs: list[int] = []  # of graphs that are gone

    # ---- graphs

    def _graph(self, key: tuple, build: Callable[[], Graph]) -> Graph:
        graph = self._graphs.get(key)
        if graph is not None and graph.valid:
            self._graphs.move_to_end(key)
            return graph
        if graph is not None:
            self._drop(key)
        graph = build().place(self.workspace)
        self.builds += 1
        self._graphs[key] = graph
        while len(self._graphs) > MAX_GRAPHS:
            self._drop(next(iter(self._graphs)))
        return graph

    def _drop(self, key: tuple) -> None:
        graph = self._graphs.pop(key)
        self._past_runs.append(graph.runs)
        graph.close()

    def ensure_rows(self, rows: int) -> int:
        """Make the caches hold `rows`; returns the bucket of rows that a graph over them sees."""
        if rows > self._n_rows:
            want = min(self._max_rows, max(2 * self._n_rows, -(-rows // 256) * 256))
            for key in list(self._graphs):
                self._drop(key)
            # after an error one of them may have grown already
            if self.state.kv.n_rows < want:
                self.state.kv.grow(want)
            if self.draft_state and self.draft_state.kv.n_rows < want + self.block:
                self.draft_state.kv.grow(want + self.block)
            self._make_masks(want)
        return min(kv_bucket(rows), self._n_rows)

    def _make_masks(self, n_rows: int) -> None:
        """Masks of `n_rows` slots, which the caches have."""
        self._close_masks()
        p, self._n_rows = self.draft_params, 0
        if p:
            self.tree_mask = SlotMask(self.device, self.max_width, self.block, n_rows)
            windows = [None, p.sliding_window] if any(p.window_layers) else [None]
            self.draft_masks = [SlotMask(self.device, self.block, self.block, n_rows, w) for w in windows]
            every = np.ones((self.block, self.block), bool)
            self._block_seen_by = [
                np.packbits(np.triu(every) if causal else every, axis=1, bitorder="little")
                for causal in (p.causal_full, p.causal_window)
            ]
        self._n_rows = n_rows

    def _close_masks(self) -> None:
        for mask in (*self.draft_masks, *([self.tree_mask] if self.tree_mask else [])):
            mask.close()
        self.tree_mask, self.draft_masks = None, []

    # ---- passes

    def linear(self, ids: Sequence[int], start: int, feed_draft: bool) -> Graph:
        """Run `ids` at positions start.. through the target and commit them; returns the graph for `logits` and `choice`."""
        n = len(ids)
        n_kv = self.ensure_rows(start + n)
        feed_draft = feed_draft and self.draft_params is not None

        def append(g, features, positions, rows):
            append_context(
                g, self.draft_weights, self.draft_params, self.draft_state, features, positions, rows
            )

        graph = self._graph(
            ("linear", n, n_kv, feed_draft),
            lambda: linear_graph(
                self.device,
                self.weights,
                self.params,
                self.state,
                n,
                n_kv,
                self.taps,
                append if feed_draft else None,
            ),
        )
        steps = np.arange(n, dtype=np.int32)
        graph.inputs["ints"].array.reshape(5, n)[:] = ids, start + steps, start + steps, steps - 1, steps
        mask = graph.inputs["mask"].array.reshape(n, n_kv)
        mask[:, :start] = 0
        mask[:, start:] = np.where(np.arange(n_kv - start) > steps[:, None], HIDDEN, np.float16(0))
        graph.run()
        self.in_draft[start : start + n] = feed_draft
        return graph

    def draft(self, pending: int, start: int, path: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Draft a block for the positions start.. whose first token is `pending`.

        `path` is the last committed path (nodes of the last verify pass), whose features the draft takes in first.
        Returns ids int32 and log-probabilities float32, [B-1, candidates], best first.
        """
        p, block = self.draft_params, self.block
        n_kv = self.ensure_rows(start + block)
        graph = self._graph(
            ("draft", n_kv),
            lambda: draft_graph(
                self.device,
                self.draft_weights,
                p,
                self.draft_state,
                self.weights,
                self.state,
                self.head_name,
                self.draft_masks,
                n_kv,
                self.candidates,
            ),
        )
        own = range(start, start + block)
        ids = (pending, *[p.mask_id] * (block - 1))
        graph.inputs["ints"].array[:] = (*self._path_columns(path, start), *ids, *own, *own)
        for i, (mask, seen_by) in enumerate(zip(self.draft_masks, self._block_seen_by)):
            mask.fill(graph, f"mask{i}", start, seen_by, self.in_draft)
        graph.run()
        for mask in self.draft_masks:
            mask.ran()
        best = self.device.read(graph.best).reshape(block - 1, 2, -1)
        return best[:, 0].astype(np.int32), best[:, 1]

    def feed_path(self, start: int, path: Sequence[int]) -> None:
        """Let the draft take in the last committed path (which ends before position `start`) without drafting."""
        graph = self._graph(
            ("context",),
            lambda: context_graph(
                self.device, self.draft_weights, self.draft_params, self.draft_state, self.state
            ),
        )
        graph.inputs["ints"].array[:] = self._path_columns(path, start)
        graph.run()

    def _path_columns(self, path: Sequence[int], end: int) -> tuple[int, ...]:
        """Nodes | positions | cache rows of the context append of a path; columns it leaves over go to spare rows."""
        start, over, spare = end - len(path), self.block - len(path), self.draft_state.spare_row
        self.in_draft[start:end] = True
        positions, rows = range(start, end + over), (*range(start, end), *range(spare, spare + over))
        return (*path, *[0] * over, *positions, *rows)

    def verify(self, tree: Tree, start: int) -> Graph:
        """Run a tree whose root sits at position `start` through the target; `choice` and `logits` have one column a node."""
        width = padded_width(tree.n_nodes)
        n_kv = self.ensure_rows(start + width)
        graph = self._graph(
            ("verify", width, n_kv),
            lambda: tree_graph(
                self.device, self.weights, self.params, self.state, self.tree_mask, width, n_kv, self.taps
            ),
        )
        w = tree.width
        ids, positions, rows, parents = graph.inputs["ints"].array.reshape(4, width)
        ids[:w], ids[w:] = tree.tokens, tree.tokens[0]
        positions[:w], positions[w:] = tree.depths + start, start + 1
        rows[:] = range(start, start + width)
        parents[:w], parents[w:] = tree.parents, 0  # padding: children of the root, never looked at
        self.tree_mask.fill(graph, "mask", start, observers(tree, width))
        graph.run()
        self.tree_mask.ran()
        return graph

    def commit(self, path: Sequence[int], start: int) -> None:
        """Make the nodes of `path` (root first, root at position `start`) the next committed tokens."""
        block, over = self.block, self.block - len(path)
        path = tuple(path)
        move = path != tuple(range(len(path)))
        graph = self._graph(("commit", move), lambda: commit_graph(self.device, self.state, block, move))
        graph.inputs["path"].array[:] = (*path, *[-1] * over)
        if move:
            to = range(start, start + block)
            graph.inputs["to"].array[:] = to
            graph.inputs["from"].array[:] = (*[start + node for node in path], *to[len(path) :])
        graph.run()

    # ---- odds and ends

    @property
    def head_name(self) -> str:
        return "token_embd.weight" if self.params.tied_head else "output.weight"

    def choices(self, graph: Graph) -> np.ndarray:
        """The target's best token after each column of a pass, int32."""
        return self.device.read(graph.choice)

    def logits_row(self, graph: Graph, column: int = 0) -> np.ndarray:
        """One column of a pass's logits, float32 [n_vocab], a copy; read it before the next pass runs."""
        n = self.params.n_vocab
        return self.device.read(graph.logits, n, offset=4 * n * column)

    @property
    def nbytes(self) -> dict[str, int]:
        """Device bytes by part."""
        parts = {"target weights": self.weights.nbytes, **self.state.nbytes}
        if self.draft_state:
            parts |= {"draft weights": self.draft_weights.nbytes, "draft kv": self.draft_state.kv.nbytes}
        return parts | {"scratch": self.workspace.nbytes}

    def replay_counts(self) -> dict[str, int]:
        """Graph runs so far. With CUDA a graph's first run is eager, its second is captured, all later ones are replayed."""
        runs = [*self._past_runs, *(g.runs for g in self._graphs.values())]
        return {
            "eager": sum(n > 0 for n in runs),
            "captured": sum(n > 1 for n in runs),
            "replayed": sum(max(0, n - 2) for n in runs),
        }

    def close(self) -> None:
        for key in list(self._graphs):
            self._drop(key)
        self.workspace.close()
        self.state.close()
        self._close_masks()
        if self.draft_state:
            self.draft_state.close()
            self.draft_weights.close()
        self.weights.close()
