"""Cache of graphs: built at the first use of a shape, replayed afterwards."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable

from .graph import Graph
from .store import Workspace


class GraphCache:
    """LRU cache of at most `limit` graphs by key, placed in one workspace."""

    def __init__(self, workspace: Workspace, limit: int = 48) -> None:
        self.workspace, self.limit = workspace, limit
        self.builds = 0
        self.cold = 0  # runs of new graphs, which take longer than later ones
        self._graphs: OrderedDict[Hashable, Graph] = OrderedDict()
        self._past_runs = 0  # runs of evicted graphs

    def get(self, key: Hashable, build: Callable[[], Graph]) -> Graph:
        """The graph of `key`, built and placed if it is missing or its memory has moved."""
        graph = self._graphs.get(key)
        if graph is not None and graph.valid:
            self._graphs.move_to_end(key)
            self.cold += graph.is_cold
            return graph
        if graph is not None:
            self._drop(key)
        graph = build().place(self.workspace)
        self.builds, self.cold = self.builds + 1, self.cold + 1
        self._graphs[key] = graph
        while len(self._graphs) > self.limit:
            self._drop(next(iter(self._graphs)))
        return graph

    def __len__(self) -> int:
        return len(self._graphs)

    def __iter__(self):
        return iter(self._graphs.items())

    @property
    def runs(self) -> int:
        """Graph runs so far."""
        return self._past_runs + sum(graph.runs for graph in self._graphs.values())

    @property
    def kinds(self) -> dict[str, int]:
        """Number of cached graphs by kind, the first word of a key; on a GPU as many are captured."""
        return dict(Counter(str(key[0] if isinstance(key, tuple) else key) for key in self._graphs))

    def clear(self) -> None:
        """Drop all graphs, before memory they point to moves."""
        for key in list(self._graphs):
            self._drop(key)

    def _drop(self, key: Hashable) -> None:
        graph = self._graphs.pop(key)
        self._past_runs += graph.runs
        graph.close()
