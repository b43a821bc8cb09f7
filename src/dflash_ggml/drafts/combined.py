"""Several drafts of one target as one drafter: each proposes at every step, and their candidates grow one tree.

Other code does not depend on the number of drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ..decode.candidates import Candidates, CombinedCandidates, NonFiniteDraft
from ..decode.sequence import Sequence
from ..errors import ConfigError
from ..ggml.bindings import Tensor
from ..ggml.device import F32, Device
from ..ggml.graph import Graph
from ..ggml.store import Store
from ..models.target import Target
from ..state.kv_type import KvType
from ..state.memory import Part
from .drafter import Drafter, DraftSource, Host

T = TypeVar("T")


class CombinedSource(DraftSource):
    """Open drafts that fit the same target.

    Raises:
        ConfigError: A draft's tapped layers are not contiguous among all tapped ones.
    """

    def __init__(self, sources: Items[DraftSource]) -> None:
        self.sources = tuple(sources)
        self.name = "+".join(getattr(source, "name", "draft") for source in sources)
        self.title = " and ".join(source.title or "a draft" for source in sources)
        self.depth = max(source.depth for source in sources)
        self.taps = tuple(sorted({tap for source in sources for tap in source.taps}))
        self.head_dims = tuple(dim for source in sources for dim in source.head_dims)
        for source in sources:
            if self.taps[(first := self.first(source)) : first + len(source.taps)] != source.taps:
                raise ConfigError(f"{self.name}: taps must be contiguous: {source.taps} within {self.taps}")

    def first(self, source: DraftSource) -> int:
        """Index of a source's first tapped layer among all tapped ones."""
        return self.taps.index(source.taps[0])

    @property
    def identity(self) -> list:
        return [source.identity for source in self.sources]

    def check(self, target: Target, target_name: str) -> list[str]:
        return [note for source in self.sources for note in source.check(target, target_name)]

    def prepare(self, device: Device) -> list[str]:
        return [note for source in self.sources for note in source.prepare(device)]

    def narrow(self) -> bool:
        narrowed = [source.narrow() for source in self.sources]
        return any(narrowed)

    def parts(self, device: Device, kv_type: KvType, n_states: int = 1) -> list[Part]:
        found: dict[str, list[Part]] = {}
        for source in self.sources:
            for part in source.parts(device, kv_type, n_states):
                found.setdefault(part.name, []).append(part)
        return [_sum(name, parts) for name, parts in found.items()]

    def start(
        self, host: Host, candidates: int, n_rows: int, progress: Callable[[str, int, int], None] | None
    ) -> CombinedDrafter:
        width = host.target.n_embd
        store = Store(host.device, len(self.sources))
        drafters, spans = [], []
        for source in self.sources:
            first, row = self.first(source) * width, len(source.taps) * width
            part = store.rows_as(host.features, F32, 4 * first, row, host.features.ne[1])
            drafters.append(source.start(replace(host, features=part), candidates, n_rows, progress))
            spans.append((4 * first, row))
        return CombinedDrafter(drafters, spans, self, store)


class CombinedDrafter(Drafter):
    """Drafters that see the same tokens.

    Args:
        spans: Byte offset and length of each drafter's features in a row of all.
    """

    def __init__(
        self, drafters: Items[Drafter], spans: Items[tuple[int, int]], source: CombinedSource, store: Store
    ) -> None:
        self.drafters, self.spans, self._store = tuple(drafters), tuple(spans), store
        self.name, self.depth, self.taps = source.name, source.depth, source.taps

    def propose(
        self, sequences: Items[Sequence], budget: int, depth: int | None = None
    ) -> list[Candidates | NonFiniteDraft]:
        """See Drafter.propose; NaN from one draft ends drafting for the sequence."""
        found = self._all(sequences, lambda d: d.propose(sequences, budget, depth))
        merged: list[Candidates | NonFiniteDraft] = []
        for of_sequence in zip(*found):
            wrong = [one for one in of_sequence if isinstance(one, NonFiniteDraft)]
            merged.append(wrong[0] if wrong else CombinedCandidates(of_sequence))
        return merged

    def _all(self, sequences: Items[Sequence], work: Callable[[Drafter], T]) -> list[T]:
        """Let every drafter take in the unseen tokens; only then they count as seen."""
        unseen, found = [s.unseen for s in sequences], []
        for drafter in self.drafters:
            try:
                found.append(work(drafter))
            finally:
                for sequence, columns in zip(sequences, unseen):
                    sequence.unseen = columns
        for sequence in sequences:
            sequence.unseen = ()
        return found

    def take_in(self, sequences: Items[Sequence]) -> None:
        self._all(sequences, lambda d: d.take_in(sequences))

    def append(self, graph: Graph, features, ids, positions, rows) -> None:
        for drafter, (offset, row) in zip(self.drafters, self.spans):
            part = graph.view(features, (row, features.ne[1]), (features.nb[1],), offset=offset)
            if drafter.append is not None:
                drafter.append(graph, graph.cont(part), ids, positions, rows)

    def prefilled(self, sequence: Sequence, n: int, appended: bool) -> None:
        for drafter in self.drafters:
            drafter.prefilled(sequence, n, appended)

    def reset(self, sequence: Sequence) -> None:
        for drafter in self.drafters:
            drafter.reset(sequence)

    @property
    def rows(self) -> Items[object]:
        return [tensor for drafter in self.drafters for tensor in drafter.rows]

    @property
    def rings(self) -> Items[tuple[Tensor, int, int]]:
        return [ring for drafter in self.drafters for ring in drafter.rings]

    def seen(self, sequence: Sequence) -> NDArray[np.bool_]:
        """Positions that all have seen."""
        return np.logical_and.reduce([drafter.seen(sequence) for drafter in self.drafters])

    def restore_seen(self, sequence: Sequence, seen: NDArray[np.bool_]) -> None:
        for drafter in self.drafters:
            drafter.restore_seen(sequence, seen)

    @property
    def nbytes(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for drafter in self.drafters:
            for name, size in drafter.nbytes.items():
                total[name] = total.get(name, 0) + size
        return total

    def close(self) -> None:
        for drafter in self.drafters:
            drafter.close()
        self._store.close()


def _sum(name: str, parts: Items[Part]) -> Part:
    return Part(name, lambda rows: sum(part.nbytes(rows) for part in parts), parts[0].advice)
