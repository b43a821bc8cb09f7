"""Time of the tree operations beside ggml's chain operations, at the shapes of the demo and of a 27B model.

usage: ops.py [--threads N] [--device NAME] [--shape demo|27b] [--seconds S] [--json]

One line per operation and width: microseconds per layer (best repetition). The chain column is what ggml
offers for the same number of tokens: ggml_gated_delta_net, and ggml_ssm_conv with its transpose and concat.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from dflash_ggml.ggml.bindings import ffi, lib
from dflash_ggml.ggml.device import F32, I32, Device, list_devices
from dflash_ggml.ggml.store import Store

WIDTHS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128)
LAYERS = 48  # each with its own state, so that caches are as cold as in a model


@dataclass(frozen=True, slots=True)
class Shape:
    """Delta-net sizes of one layer."""

    name: str
    size: int  # S, of a head's keys and values
    n_key: int
    n_value: int
    taps: int = 4

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return (2 * self.n_key + self.n_value) * self.size

    @property
    def row(self) -> int:
        """Floats per node in the result of the delta-net tree operation."""
        return 2 * self.size * self.n_value + self.size * self.n_key + self.n_value


SHAPES = {"demo": Shape("demo", 64, 2, 8), "27b": Shape("27b", 128, 16, 48)}


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table; `chain_us` is None where ggml has no counterpart."""

    shape: str
    op: str
    n: int
    tree_us: float
    chain_us: float | None


class Bench:
    """Builds graphs of identical operations on one device and times them."""

    def __init__(self, device: Device, shape: Shape, n: int, seconds: float) -> None:
        self.device, self.shape, self.n, self.seconds = device, shape, n, seconds
        self.rng = np.random.default_rng(0)
        self.store = Store(device, 1024)
        self._fill: list[tuple[object, np.ndarray]] = []

    def floats(self, *ne: int, low: float = -1.0, high: float = 1.0):
        """A float32 tensor of shape `ne` (dimension 0 contiguous) with uniform values."""
        t = self.store.tensor(F32, *ne)
        self._fill.append((t, self.rng.uniform(low, high, ne[::-1]).astype(np.float32)))
        return t

    def ints(self, values: np.ndarray):
        """An int32 tensor [len, 1]."""
        t = self.store.tensor(I32, len(values), 1)
        self._fill.append((t, values.astype(np.int32)))
        return t

    def time(self, build: Callable[[object, int], object], nodes: int = LAYERS) -> float:
        """Microseconds per layer; `build(ctx, i)` returns node i, all nodes together are LAYERS layers."""
        arena = ffi.new("char[]", lib.ggml_graph_overhead_custom(1024, False) + 1024)
        graph_ctx = lib.ggml_init({"mem_size": len(arena), "mem_buffer": arena, "no_alloc": True})
        graph = lib.ggml_new_graph_custom(graph_ctx, 1024, False)
        for i in range(nodes):
            lib.ggml_build_forward_expand(graph, build(self.store.ctx, i))
        self.store.allocate()
        for t, values in self._fill:
            self.device.write(t, values)
        for _ in range(3):  # CUDA captures the second run as a graph
            lib.ggml_backend_graph_compute(self.device.backend, graph)
        best, stop = float("inf"), time.perf_counter() + self.seconds
        while time.perf_counter() < stop:
            start = time.perf_counter()
            lib.ggml_backend_graph_compute(self.device.backend, graph)
            best = min(best, time.perf_counter() - start)
        lib.ggml_free(graph_ctx)
        self.store.close()
        return best / LAYERS * 1e6


def tree_parents(n: int, depth: int = 15) -> np.ndarray:
    """A tree as best-first drafting makes them: one path of up to `depth` nodes, the rest branches off it."""
    rng = np.random.default_rng(1)
    parents, depths = [-1], [0]
    for i in range(1, n):
        parent = (
            i - 1 if i <= min(depth, n // 2) else int(rng.choice(np.flatnonzero(np.array(depths) < depth)))
        )
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return np.array(parents)


def delta_net(bench: Bench, tree: bool) -> float:
    """One delta-net layer over `n` tokens."""
    s, n = bench.shape, bench.n
    q, k = (bench.floats(s.size, s.n_key, n, 1, low=-0.1, high=0.1) for _ in range(2))
    v = bench.floats(s.size, s.n_value, n, 1)
    g = bench.floats(1, s.n_value, n, 1, low=-0.5, high=-1e-4)
    beta = bench.floats(1, s.n_value, n, 1, low=0.0)
    states = [bench.floats(s.size, s.size, s.n_value, 1) for _ in range(LAYERS)]
    if not tree:
        return bench.time(lambda ctx, i: lib.ggml_gated_delta_net(ctx, q, k, v, g, beta, states[i], 1))
    parents = bench.ints(tree_parents(n))
    op = lib.ggml_gated_delta_net_tree_persist
    return bench.time(lambda ctx, i: op(ctx, q, k, v, g, beta, states[i], parents))


def delta_net_commit(bench: Bench, n_path: int) -> float:
    """Moving the states of all layers to the end of a path of `n_path` nodes, in one operation."""
    s = bench.shape
    state = bench.floats(s.size, s.size, s.n_value, LAYERS)
    factors = bench.floats(s.row - s.size * s.n_value, bench.n, LAYERS, low=-1e-3, high=-1e-4)
    path = bench.ints(np.arange(n_path))
    return bench.time(lambda ctx, i: lib.ggml_gated_delta_net_tree_commit(ctx, state, factors, path), nodes=1)


def conv(bench: Bench, tree: bool) -> float:
    """One convolution over `n` tokens; the chain form includes the transpose and concat of its input."""
    s = bench.shape
    states = [bench.floats(s.taps - 1, s.channels, 1) for _ in range(LAYERS)]
    x = bench.floats(s.channels, bench.n, 1)
    c = bench.floats(s.taps, s.channels)
    if tree:
        parents = bench.ints(tree_parents(bench.n))
        return bench.time(lambda ctx, i: lib.ggml_ssm_conv_tree(ctx, states[i], x, c, parents))

    def chain(ctx: object, i: int) -> object:
        return lib.ggml_ssm_conv(ctx, lib.ggml_concat(ctx, states[i], lib.ggml_transpose(ctx, x), 0), c)

    return bench.time(chain)


def conv_commit(bench: Bench, n_path: int) -> float:
    """Moving the windows of all layers to the end of a path of `n_path` nodes, in one operation."""
    s = bench.shape
    state = bench.floats(s.taps - 1, s.channels, LAYERS)
    x = bench.floats(s.channels, bench.n, LAYERS)
    path = bench.ints(np.arange(n_path))
    return bench.time(lambda ctx, i: lib.ggml_ssm_conv_tree_commit(ctx, state, x, path), nodes=1)


def measure(device: Device, shape: Shape, seconds: float) -> list[Result]:
    """Every operation at every width."""

    def at(n: int) -> Bench:
        return Bench(device, shape, n, seconds)

    results = []
    for n in WIDTHS:
        results.append(
            Result(shape.name, "gated_delta_net", n, delta_net(at(n), True), delta_net(at(n), False))
        )
        results.append(Result(shape.name, "ssm_conv", n, conv(at(n), True), conv(at(n), False)))
    for n_path in (1, 6, 16):
        results.append(
            Result(shape.name, "gated_delta_net commit", n_path, delta_net_commit(at(32), n_path), None)
        )
        results.append(Result(shape.name, "ssm_conv commit", n_path, conv_commit(at(32), n_path), None))
    return results


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=None, help="CPU threads (default: physical cores)")
    parser.add_argument("--device", default="CPU", help="a device name as ggml prints it, e.g. CUDA0")
    parser.add_argument("--shape", choices=sorted(SHAPES), action="append", help="repeatable; default: all")
    parser.add_argument("--seconds", type=float, default=0.3, help="time spent on each figure")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    found = {d.name: d for d in list_devices()}
    if args.device not in found:
        parser.error(f"no device {args.device}; this build sees {', '.join(found)}")
    device = Device(found[args.device], args.threads)
    results = [r for name in args.shape or SHAPES for r in measure(device, SHAPES[name], args.seconds)]
    if args.json:
        about = {
            "device": device.info.name,
            "description": device.info.description,
            "threads": device.n_threads,
        }
        json.dump({**about, "results": [asdict(r) for r in results]}, sys.stdout, indent=1)
        print()
        return 0
    print(f"{device.info.name} ({device.info.description}), {device.n_threads} threads")
    print(f"{'shape':6} {'operation':24} {'n':>4} {'tree us':>10} {'chain us':>10} {'ratio':>6}")
    for r in results:
        chain = f"{r.chain_us:10.1f} {r.chain_us / r.tree_us:5.1f}x" if r.chain_us else ""
        print(f"{r.shape:6} {r.op:24} {r.n:4d} {r.tree_us:10.1f} {chain}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
