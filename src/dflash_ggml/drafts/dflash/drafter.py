"""DFlash, DFlash2 and DSpark as drafters: one pass per block, over a context of the target's features."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

from ...decode.accept import Accepted
from ...decode.candidates import Rows
from ...decode.sequence import Sequence
from ...ggml.device import BF16, F32, Device
from ...ggml.graph import Graph
from ...ggml.weights import Source, Weights, bf16_as_f16
from ...models.target import Append, Target
from ...state.kv import KvCache, kv_bucket
from ...state.kv_type import KvType
from ...state.mask import SlotMask
from ...state.memory import Part
from ...state.spec import KvLayer, StateSpec
from ..dflash2.graphs import ZERO
from ..dflash2.params import AFTER as SELECTOR_AFTER
from ..dflash2.params import BEFORE as SELECTOR_BEFORE
from ..drafter import Drafter, DraftSource, Host
from ..dspark.params import AFTER, BEFORE, TO_TARGET
from ..lattice import unpack
from .file import DraftFile
from .graphs import append_context, context_graph, draft_graph
from .params import EMBEDDING, HEAD, MASK, DraftParams, check_pair, window_note

# tables of which single rows are looked up
GATHERED = (EMBEDDING, MASK, SELECTOR_BEFORE, SELECTOR_AFTER, BEFORE, AFTER, TO_TARGET)


class DFlashSource(DraftSource):
    """An open DFlash file, in any dialect."""

    def __init__(self, file: DraftFile, window: int | None = None) -> None:
        """`window`: the one that was asked for, see `DraftFile.open`."""
        self.file, self.params, self.title = file, file.params, file.title
        self._window = window
        self.head_dims = (file.params.head_dim,)
        self.name, self.depth, self.taps = kind_of(file.params), file.params.depth, file.params.taps
        self._weights: Weights | None = None

    @property
    def identity(self) -> list:
        return [(name, *self.file.kind(name)) for name in sorted(self.file.names)]

    def check(self, target: Target, target_name: str) -> list[str]:
        name = str(self.file.path)
        notes = check_pair(target, self.params, target_name, name)
        note = "" if self._window is not None else window_note(target_name, name, self.title, self.params)
        return [*notes, note] if note else notes

    def prepare(self, device: Device) -> list[str]:
        """Declare the weights on a device; notes on what had to be converted. Raises ModelFileError."""
        notes = []
        sources = {name: Source(*self.file.tensor(name)) for name in self.file.names}
        if self.params.selector is not None:
            zeros = np.zeros(self.params.n_embd, np.float32)
            sources[ZERO] = Source(F32, (self.params.n_embd, 1), zeros.view(np.uint8))
        if device.lacks_bf16 and any(part.type == BF16 for part in sources.values()):
            notes.append(
                f"{device.info.name} has no BF16 tensor cores: the draft's BF16 weights become float16"
            )
            sources = {name: bf16_as_f16(name, part) for name, part in sources.items()}
        self._weights = Weights(device, sources, gathered=GATHERED)
        return notes

    def parts(self, device: Device, kv_type: KvType) -> list[Part]:
        assert self._weights is not None, "prepare comes first"
        p, wanted, spec = self.params, self._weights.wanted, cache_spec(self.params)
        return [
            Part("draft weights", lambda rows: wanted),
            Part("draft K/V", lambda rows: spec.kv_bytes(rows + p.block_size, kv_type)),
            Part("draft masks", lambda rows: len(_windows(p)) * 2 * p.block_size * rows),
        ]

    def start(
        self,
        host: Host,
        candidates: int,
        n_rows: int,
        progress: Callable[[str, int, int], None] | None,
    ) -> DFlashDrafter:
        assert self._weights is not None, "prepare comes first"
        weights, self._weights = self._weights.fill(progress, "draft"), None
        return DFlashDrafter(host, self.params, weights, candidates, n_rows, self.file.to_target)


def kind_of(p: DraftParams) -> str:
    """The name by which statistics know the draft."""
    return "dflash2" if p.selector is not None else "dspark" if p.markov is not None else "dflash"


def cache_spec(p: DraftParams) -> StateSpec:
    """The draft's context: a row of keys and values per committed token and layer."""
    layers = (
        KvLayer(p.n_kv_heads, p.head_dim, p.sliding_window if is_window else None)
        for is_window in p.window_layers
    )
    return StateSpec(tuple(layers))


def _windows(p: DraftParams) -> list[int | None]:
    """The windows that masks are needed for: full layers, and window layers where there are any."""
    return [None, p.sliding_window] if any(p.window_layers) else [None]


class DFlashDrafter(Drafter):
    """A block-diffusion draft. Its context has one row per committed token in the token's slot, then spare rows for appends that
    nobody reads; a block's own rows lie behind the committed ones."""

    def __init__(
        self,
        host: Host,
        p: DraftParams,
        weights: Weights,
        candidates: int,
        n_rows: int,
        to_target: NDArray[np.int32] | None = None,
    ) -> None:
        """to_target: the target's id of each id of the draft, where they differ."""
        self.host, self.device, self.params, self.weights = host, host.device, p, weights
        self.block, self.depth, self.taps = p.block_size, p.depth, p.taps
        self.name, self.candidates, self.to_target = kind_of(p), candidates, to_target
        self.kv = KvCache(self.device, cache_spec(p).kv, host.kv_type, n_rows + self.block)
        self._n_rows = n_rows
        self.held = np.zeros(n_rows, bool)  # which slots hold a token's context
        self.graphs = host.graphs
        every = np.ones((self.block, self.block), bool)
        # who sees each column of a block, as bits, per mask
        self._seen_by = [
            np.packbits(np.triu(every) if causal else every, axis=1, bitorder="little")
            for causal in (p.causal_full, p.causal_window)
        ]
        self.masks = [SlotMask(self.device, self.block, self.block, n_rows, window) for window in _windows(p)]

    # ---- memory

    @property
    def rows(self) -> Items[object]:
        return self.kv.slices

    @property
    def nbytes(self) -> dict[str, int]:
        return {
            "draft weights": self.weights.nbytes,
            "draft K/V": self.kv.nbytes,
            "draft masks": sum(mask.nbytes for mask in self.masks),
        }

    def close(self) -> None:
        self.graphs.clear()
        for mask in self.masks:
            mask.close()
        self.kv.close()
        self.weights.close()

    # ---- drafting

    def propose(self, sequence: Sequence, budget: int, depth: int | None = None) -> Rows:
        """A block for the positions after the committed ones: the pending token and the mask token behind it."""
        p = self.params
        block = self.block if depth is None else min(depth + p.first_row, self.block)
        if len(sequence.unseen) > block:
            self._take_in(sequence, len(sequence.unseen) - block)
        slots = sequence.slots(block)
        n_kv = min(kv_bucket(slots.stop), self._n_rows)
        graph = self.graphs.get(("draft", n_kv, block), lambda: self._build(n_kv, block))
        start = sequence.n_tokens
        ids = (sequence.pending, *[0 if p.has_mask_vector else p.mask_id] * (block - 1))
        context = self._context_columns(sequence, sequence.unseen, start, block)
        graph.inputs["ints"].array[:] = (*context, *ids, *range(start, start + block), *slots)
        for i, (mask, seen_by) in enumerate(zip(self.masks, self._seen_by)):
            mask.fill(graph, f"mask{i}", n_kv, slots.start, seen_by[:block], self.held, sequence.first_slot)
        graph.run()
        for mask in self.masks:
            mask.ran()
        sequence.unseen = ()
        depths = block - p.first_row
        if "lattice" in graph.outputs:
            lattice = self.device.read(graph.outputs["lattice"])
            return unpack(lattice, depths, self.to_target, is_chain=p.markov is not None)
        best = self.device.read(graph.outputs["best"]).reshape(depths, 2, -1)
        drafted = best[:, 0].astype(np.int32)
        return Rows(drafted if self.to_target is None else self.to_target[drafted], best[:, 1])

    def _build(self, n_kv: int, block: int) -> Graph:
        """The graph of a draft of `block` columns."""
        target, weights, features = self.host.target, self.host.weights, self.host.state.features
        own, head = self.weights, target.head_name
        return draft_graph(
            self.device,
            self.weights,
            self.params,
            self.kv,
            features.tensor,
            own[EMBEDDING] if EMBEDDING in own else weights[target.embedding_name],
            own[HEAD] if HEAD in own else weights[head],
            None if HEAD in own else weights.get(head.replace(".weight", ".scale")),
            self.masks,
            n_kv,
            block,
            self.candidates,
        )

    def observe(self, sequence: Sequence, accepted: Accepted) -> None:
        """The path's features wait in `sequence.unseen`: the next proposal takes them in within its own pass."""

    def take_in(self, sequence: Sequence) -> None:
        self._take_in(sequence, len(sequence.unseen))

    def _take_in(self, sequence: Sequence, n: int) -> None:
        """See the first n of the unseen tokens, a block at a time."""
        while n > 0:
            part, left = sequence.unseen[: min(n, self.block)], sequence.unseen[min(n, self.block) :]
            graph = self.graphs.get(
                ("context",),
                lambda: context_graph(
                    self.device, self.weights, self.params, self.kv, self.host.state.features.tensor
                ),
            )
            end = sequence.n_tokens - len(left)
            graph.inputs["ints"].array[:] = self._context_columns(sequence, part, end, self.block)
            graph.run()
            sequence.unseen, n = left, n - len(part)

    def _context_columns(
        self, sequence: Sequence, columns: tuple[int, ...], end: int, room: int
    ) -> tuple[int, ...]:
        """Columns | positions | cache rows for the tokens whose features lie in `columns` and which end before position `end`;
        what is left over of `room` goes to spare rows."""
        start, over, spare = end - len(columns), room - len(columns), self.kv.n_rows - self.block
        slots = range(sequence.first_slot + start, sequence.first_slot + end)
        self.held[slots.start : slots.stop] = True
        return (*columns, *[0] * over, *range(start, end + over), *slots, *range(spare, spare + over))

    # ---- what it has seen

    @property
    def append(self) -> Append:
        return self._append

    def _append(self, graph, features, ids, positions, rows) -> None:
        append_context(graph, self.weights, self.params, self.kv, features, positions, rows)

    def prefilled(self, sequence: Sequence, n: int, appended: bool) -> None:
        slots = sequence.slots(n)
        self.held[slots.start : slots.stop] = appended

    def reset(self, sequence: Sequence) -> None:
        self.held[sequence.first_slot :] = False
        self._forget()

    def seen(self, sequence: Sequence) -> NDArray[np.bool_]:
        return self.held[sequence.first_slot :][: sequence.n_tokens].copy()

    def restore_seen(self, sequence: Sequence, seen: NDArray[np.bool_]) -> None:
        held = self.held[sequence.first_slot :]
        held[: len(seen)] = seen
        held[len(seen) :] = False
        self._forget()

    def _forget(self) -> None:
        """Other tokens are held than the masks know of."""
        for mask in self.masks:
            mask.forget()
