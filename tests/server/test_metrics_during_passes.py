"""Tests of the figures behind /metrics, read in the event loop's thread while another runs passes and caches graphs."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from dflash_ggml.config import EngineConfig
from dflash_ggml.engine.engine import Engine
from dflash_ggml.server.runner import Runner
from dflash_ggml.session.session import Session


class Moving(OrderedDict):
    """One that changes whenever somebody goes through it."""

    def __iter__(self) -> Any:
        raise RuntimeError("OrderedDict mutated during iteration")

    values = keys = items = __iter__


def test_graphs_are_counted_while_they_change(toy_pair: tuple[Path, Path]) -> None:
    config = EngineConfig(*toy_pair, n_ctx=256, parallel=2, n_threads=1, calibrate="never")
    with Engine.load(config) as engine:
        slot = engine.open()
        slot.prefill([1, 2, 3])
        slot.close()
        session = Session(engine)
        graphs = engine.passes.graphs
        kept, graphs._graphs = graphs._graphs, Moving(graphs._graphs)
        try:
            load = Runner.load(cast(Runner, SimpleNamespace(session=session)))
        finally:
            graphs._graphs = kept
        assert load["graphs"] == len(kept) and load["built"] == graphs.builds > 0
