"""Tests of cached graphs: reused while their memory is valid, rebuilt when it has moved, the oldest dropped first."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_ggml.ggml.device import F32, Device
from dflash_ggml.ggml.graph import Graph
from dflash_ggml.ggml.graph_cache import GraphCache
from dflash_ggml.ggml.store import Workspace


@pytest.fixture()
def device():
    with_one_thread = Device.cpu(1)
    yield with_one_thread
    with_one_thread.close()


def doubling(device: Device, n: int) -> Graph:
    g = Graph(device, 16)
    x = g.input("x", F32, n)
    g.output(g.scale(g.add(x, x), 1.0), "y")
    return g


def run(device: Device, cache: GraphCache, n: int) -> None:
    graph = cache.get(n, lambda: doubling(device, n))
    graph.inputs["x"].array[:] = np.arange(n)
    graph.run()
    assert np.array_equal(device.read(graph.outputs["y"]), 2 * np.arange(n, dtype=np.float32))


def test_used_again_and_dropped(device):
    cache = GraphCache(Workspace(device), limit=2)
    run(device, cache, 100_000)  # the scratch memory is large enough for all that follow
    for n in (8, 16, 8, 8):
        run(device, cache, n)
    assert cache.builds == 3 and [key for key, _ in cache] == [16, 8]
    run(device, cache, 32)
    assert [key for key, _ in cache] == [8, 32], "16 was used longest ago"
    assert cache.runs == 6, "runs of dropped graphs count"
    cache.clear()
    assert not list(cache) and cache.runs == 6


def test_a_graph_whose_memory_moved_is_built_again(device):
    cache = GraphCache(Workspace(device))
    run(device, cache, 8)
    run(device, cache, 1_000_000)
    built = cache.builds
    run(device, cache, 8)
    assert cache.builds == built + 1
    cache.clear()


def test_graphs_are_cold_until_they_have_run_a_few_times(device):
    cache = GraphCache(Workspace(device))
    found = []
    for _ in range(4):
        run(device, cache, 8)
        found.append((cache.cold, dict(cache)[8].is_cold))
    assert found == [(1, True), (2, False), (2, False), (2, False)]
    cache.clear()
