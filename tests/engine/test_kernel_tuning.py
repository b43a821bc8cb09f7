"""Tests of the choice of matmul kernels for few columns: the decision from timings, the measurement, and applying it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.quants import quantize

from dflash_ggml.engine.kernel_tuning import (
    SAMPLE_BYTES,
    TUNED,
    TYPES,
    WIDTHS,
    MatmulTable,
    StockRange,
    Timing,
    apply,
    copies_by_heads,
    measure_matmuls,
    sample,
    wide_bytes,
    without_kernels,
    worth_measuring,
)
from dflash_ggml.errors import DeviceError
from dflash_ggml.ggml.bindings import lib
from dflash_ggml.ggml.device import F32, Device, list_devices
from dflash_ggml.ggml.graph import Graph
from dflash_ggml.ggml.store import Store, Workspace
from dflash_ggml.ggml.weights import Source, Weights

WARM_UP = 5 * 7  # seconds of SlowKernels
ROOT = Path(__file__).resolve().parents[2]


def table(*rows: tuple[Any, ...]) -> MatmulTable:
    return MatmulTable(tuple(Timing(*row) for row in rows))


# ---- the decision


def test_without_measurements_ours_are_used_everywhere() -> None:
    assert MatmulTable().stock() == []


def test_only_more_than_noise_switches() -> None:
    assert table(("q8_0", 8, 1.0, 0.98), ("q8_0", 16, 1.0, 1.5), ("q8_0", 64, 1.0, 1.0)).stock() == []
    assert table(("q8_0", 8, 1.0, 0.96), ("q8_0", 64, 1.0, 1.0)).stock() == [StockRange("q8_0", 1, 8)]
    assert table(("q8_0", 8, 1.0, 0.92, 0.07)).stock() == [StockRange("q8_0", 1, 8)]
    assert table(("q8_0", 8, 1.0, 0.92, 0.09)).stock() == []


def test_a_width_speaks_down_to_the_next_measured_one() -> None:
    rows = [("q4_K", 8, 1.0, 2.0), ("q4_K", 4, 1.0, 0.5), ("q4_K", 16, 1.0, 0.5), ("q4_K", 32, 1.0, 2.0)]
    assert table(*rows).stock() == [StockRange("q4_K", 1, 4), StockRange("q4_K", 9, 16)]


def test_the_widest_speaks_for_all_wider_ones_and_neighbours_merge() -> None:
    rows = [("q6_K", 24, 1.0, 0.5), ("q6_K", 16, 1.0, 0.5), ("q6_K", 8, 1.0, 1.0)]
    assert table(*rows).stock() == [StockRange("q6_K", 9, 64)]
    assert table(*rows[:2], ("q6_K", 8, 1.0, 0.5)).stock() == [StockRange("q6_K", 1, 64)]


def test_none_speaks_across_8_columns() -> None:
    """ggml has other kernels there."""
    assert table(("q6_K", 8, 1.0, 0.5)).stock() == [StockRange("q6_K", 1, 8)]
    assert table(("q6_K", 32, 1.0, 0.5)).stock() == [StockRange("q6_K", 9, 64)]
    assert table(("q6_K", 1, 1.0, 0.5), ("q6_K", 16, 1.0, 0.5)).stock() == [
        StockRange("q6_K", 1, 1),
        StockRange("q6_K", 9, 64),
    ]


def test_types_are_decided_apart() -> None:
    rows = [("q6_K", 8, 1.0, 0.5), ("f16", 8, 1.0, 1.0), ("q4_0", 8, 1.0, 0.9)]
    assert table(*rows).stock() == [StockRange("q6_K", 1, 8), StockRange("q4_0", 1, 8)]


def test_a_width_given_twice_counts_once() -> None:
    assert table(("f16", 4, 1.0, 2.0), ("f16", 4, 1.0, 0.5)).stock() == [StockRange("f16", 1, 4)]


def test_a_timing_of_rounds() -> None:
    """Medians; iterations that differ by a tenth make a difference of a tenth noise, a single slow one does not."""
    steady = Timing.of("q8_0", 8, [1.0, 1.0, 1.01, 5.0, 1.0], [0.9, 0.91, 0.9, 0.9, 3.0])
    assert (steady.narrow_ms, steady.stock_ms) == (1.0, 0.9)
    assert steady.spread == pytest.approx(0.01 / 0.9)
    assert steady.stock_wins
    shaken = Timing.of("q8_0", 8, [1.0, 1.06, 1.0, 1.12, 1.12], [0.9, 0.9, 0.9, 0.9, 0.9])
    assert shaken.spread == pytest.approx(0.12)
    assert not Timing("q8_0", 8, 1.0, 0.9, shaken.spread).stock_wins
    assert Timing.of("q8_0", 8, [1.0], [0.5]) == Timing("q8_0", 8, 1.0, 0.5, 0.0)


def test_a_table_goes_through_json() -> None:
    t = table(("q4_K", 8, 0.25, 0.5, 0.01), ("bf16", 1, 0.1, 0.09))
    assert MatmulTable.from_json(json.loads(json.dumps(t.to_json()))) == t
    good = t.to_json()[0]
    for bad in (
        3,
        [3],
        [{"type": "q4_K"}],
        [good | {"type": "q9"}],
        [good | {"width": 65}],
        [good | {"width": 0}],
    ):
        with pytest.raises(ValueError, match="table of matmuls: .*measure again"):
            MatmulTable.from_json(bad)


def test_the_types_are_those_of_the_kernels() -> None:
    hunks = [
        hunk
        for path in (ROOT / "patches").glob("*.patch")
        for hunk in path.read_text(encoding="utf-8").split("\ndiff --git ")[1:]
    ]
    cases = [
        name
        for hunk in hunks
        if "/ggml-cuda/mmn" in hunk.splitlines()[0]  # attention has a list of its own
        for name in re.findall(r"^\+ +case GGML_TYPE_(\w+): +return \w+;$", hunk, re.MULTILINE)
    ]
    assert {name.upper() for name in TYPES} == set(cases)  # more than one list names them


# ---- the measurement


class SlowKernels(Device):
    """The CPU with a clock that `run` moves: a run takes 1 s with our kernels, `stock` seconds by type and width with ggml's."""

    stock: dict[tuple[int, int], float]

    def begin(self, stock: dict[tuple[int, int], float]) -> None:
        self.stock, self.now, self.off, self.asked = stock, 0.0, set[int](), 0
        self.calls: list[tuple[bool, int | None, int, int]] = []

    def use_narrow_matmuls(self, on, type_=None, min_width=1, max_width=64) -> None:
        self.calls.append((on, type_, min_width, max_width))
        if type_ is None:
            self.off = set() if on else set(TYPES.values())
        else:
            self.asked = type_
            (self.off.discard if on else self.off.add)(type_)

    def clock(self) -> float:
        return self.now


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowKernels]:
    run = Graph.run

    def timed(graph: Graph) -> None:
        run(graph)
        device = graph.device
        assert isinstance(device, SlowKernels)
        key = device.asked, lib.ggml_graph_node(graph.cgraph, graph.n_nodes - 1).ne[1]
        device.now += device.stock.get(key, 1.0) if device.asked in device.off else 1.0

    monkeypatch.setattr(Graph, "run", timed)
    device = SlowKernels(next(d for d in list_devices() if not d.is_gpu), 1)
    yield device
    device.close()


@pytest.fixture
def weights(slow: SlowKernels) -> Iterator[Weights]:
    """Two Q8_0 matrices that share an input, one more of another shape, one of F16, and what is not to be multiplied."""
    rng = np.random.default_rng(0)
    shapes = {"a": (256, 96), "b": (256, 96), "c": (512, 96)}
    sources = {
        name: Source(
            Type.Q8_0.value, shape, quantize(rng.standard_normal(shape[::-1], np.float32), Type.Q8_0)
        )
        for name, shape in shapes.items()
    }
    sources["half"] = Source(Type.F16.value, (256, 32), rng.standard_normal((32, 256)).astype(np.float16))
    sources["odd"] = Source(Type.F16.value, (40, 32), np.zeros((32, 40), np.float16))
    sources["norm"] = Source(F32, (256,), np.ones(256, np.float32))
    sources["single"] = Source(F32, (256, 32), np.ones((32, 256), np.float32))
    flat = {name: s._replace(data=s.data.view(np.uint8).reshape(-1)) for name, s in sources.items()}
    found = Weights(slow, flat).fill()
    yield found
    found.close()


def test_what_is_sampled(weights: Weights) -> None:
    found = sample(weights.values())
    assert list(found) == ["q8_0", "f16"]
    assert found == {"q8_0": [weights[name] for name in "abc"], "f16": [weights["half"]]}


def test_a_sample_has_an_end_and_a_head_counts_only_if_it_is_alone() -> None:
    device = Device.cpu(1)
    store = Store(device, 40)
    rows = SAMPLE_BYTES // 2048
    head = store.tensor(Type.F16.value, 1024, 3 * rows)
    thirds = [store.tensor(Type.F16.value, 1024, rows // 3) for _ in range(5)]
    small = [store.tensor(Type.F16.value, 256, 2) for _ in range(20)]
    assert sample([head, *thirds])["f16"] == thirds[:4]
    assert sample([*small, head])["f16"] == small[:16]
    assert sample([head])["f16"] == [head]
    assert sample([]) == {}
    store.close()
    device.close()


def test_all_is_measured_when_there_is_time(slow: SlowKernels, weights: Weights) -> None:
    """The type with most bytes first at every width; medians as the clock has them; ours are on afterwards."""
    q8_0, f16 = TYPES["q8_0"], TYPES["f16"]
    slow.begin({(q8_0, 8): 0.5, (f16, 8): 2.0, (q8_0, 16): 1.1, (f16, 4): 0.96})
    found = measure_matmuls(slow, weights.values(), 1e9, clock=slow.clock)
    assert [(t.type, t.width) for t in found.timings] == [(k, w) for w in WIDTHS for k in ("q8_0", "f16")]
    for t in found.timings:
        assert t.narrow_ms == pytest.approx(1e3)
        assert t.stock_ms == pytest.approx(1e3 * slow.stock.get((TYPES[t.type], t.width), 1.0))
    assert found.stock() == [StockRange("q8_0", 7, 8), StockRange("f16", 4, 4)]
    assert slow.calls[-1] == (True, None, 1, 64) and not slow.off


@pytest.mark.parametrize(("seconds", "pairs"), [(0.0, 0), (0.5, 1), (210.0, 1), (210.5, 2), (280.5, 3)])
def test_it_ends_with_its_time(slow: SlowKernels, weights: Weights, seconds: float, pairs: int) -> None:
    """A pair near a tie takes five iterations of two times seven runs, 70 s, the first 35 s more to warm up; what does not fit
    is not begun."""
    slow.begin({})
    found = measure_matmuls(slow, weights.values(), seconds, clock=slow.clock)
    assert len(found.timings) == pairs
    assert slow.now == 70 * pairs + (WARM_UP if pairs else 0)
    assert MatmulTable(found.timings[:1]).stock() == []


def test_one_round_is_enough_where_ours_win_clearly(slow: SlowKernels, weights: Weights) -> None:
    slow.begin({(TYPES["q8_0"], 8): 2.0, (TYPES["q8_0"], 16): 0.4})
    measure_matmuls(slow, [weights["a"]], 1e9, [8], slow.clock)
    assert slow.now == WARM_UP + 7 + 14
    measure_matmuls(slow, [weights["a"]], 1e9, [16], slow.clock)
    assert slow.now == pytest.approx(2 * WARM_UP + 7 + 14 + 5 * (7 + 2.8))


@pytest.mark.parametrize("left", [0, 3])
def test_what_does_not_fit_stays_unmeasured(
    slow: SlowKernels, weights: Weights, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    """The results of the fourth pair, or the inputs, do not fit: what is known is kept, and ours are on."""
    slow.begin({})
    place, room = Workspace.place, iter(range(left))

    def full(*_: Any, **__: Any) -> Any:
        raise DeviceError("no room")

    monkeypatch.setattr(Workspace, "place", lambda *a: place(*a) if next(room, None) is not None else full())
    if not left:
        monkeypatch.setattr(Store, "allocate", full)
    found = measure_matmuls(slow, weights.values(), 1e9, clock=slow.clock)
    assert len(found.timings) == left
    assert slow.calls[-1] == (True, None, 1, 64)


def test_nothing_to_measure(slow: SlowKernels, weights: Weights) -> None:
    slow.begin({})
    assert measure_matmuls(slow, [weights["norm"], weights["odd"]], 1e9, clock=slow.clock) == MatmulTable()
    assert slow.now == 0


def test_apply_puts_a_table_in_force_whatever_was_before(slow: SlowKernels) -> None:
    slow.begin({})
    apply(slow, table(("q8_0", 8, 1.0, 0.5), ("q8_0", 16, 1.0, 2.0), ("f16", 4, 1.0, 0.5)))
    assert slow.calls == [
        (True, None, 1, 64),
        (False, TYPES["q8_0"], 1, 8),
        (False, TYPES["f16"], 1, 4),
    ]


def test_a_cpu_is_not_worth_it() -> None:
    device = Device.cpu(1)
    assert device.capability is None and not worth_measuring(device)
    device.use_narrow_matmuls(False)  # nothing to switch there, and no error
    for widths in ((0, 4), (5, 4), (1, 65)):
        with pytest.raises(ValueError, match="outside 1..64"):
            device.use_narrow_matmuls(False, TYPES["f16"], *widths)
    device.close()


@pytest.mark.parametrize(
    ("capability", "dims", "expected"),
    [
        ((9, 0), [256], True),
        ((8, 6), [128, 64], True),
        ((9, 0), [96], False),
        ((7, 5), [256], False),
        (None, [64], False),
    ],
)
def test_where_caches_are_unpacked_by_heads(monkeypatch, capability, dims, expected) -> None:
    monkeypatch.setattr(Device, "capability", capability)
    device = Device.cpu(1)
    assert copies_by_heads(device, dims) == expected
    device.close()


MIB = 1 << 20


@pytest.mark.parametrize(
    ("capability", "shapes", "n_batch", "expected"),
    [
        ((9, 0), [(5120, 17408), (17408, 5120)], 2048, 170 * MIB + 68 * MIB + 32 * MIB),
        ((9, 0), [(1024, 512), (512, 1024)], 65, 1 * MIB + 2 * 1024 * 65 + 32 * MIB),
        ((8, 0), [(5120, 248320)], 512, 2 * 5120 * 19200 + 5 * MIB + 32 * MIB),  # 13 parts of a head
        ((9, 0), [(5120, 17408)], 64, 0),
        ((9, 0), [], 2048, 0),
        ((8, 6), [(5120, 17408)], 2048, 0),
        (None, [(5120, 17408)], 2048, 0),
    ],
)
def test_memory_of_wide_matmuls(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int] | None,
    shapes: list[tuple[int, int]],
    n_batch: int,
    expected: int,
) -> None:
    monkeypatch.setattr(Device, "capability", capability)
    device = Device.cpu(1)
    assert wide_bytes(device, shapes, n_batch) == expected
    sorted_input = 2 * 768 * (8 * n_batch + 8 * 32) + 17 * MIB  # 32 experts, 8 of them used, k of 700
    wide = wide_bytes(device, shapes, n_batch, [(700, 32), (64, 32)], 8)
    assert wide == (
        max(expected, sorted_input + 32 * MIB) if capability == (9, 0) and n_batch > 64 else expected
    )
    device.use_wide_matmuls(False)  # nothing to switch there, and no error
    device.close()


@pytest.mark.parametrize(
    ("capability", "worth"),
    [((7, 5), False), ((8, 0), True), ((8, 9), True), (TUNED, False), ((12, 0), True)],
)
def test_which_gpus_are_worth_it(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], worth: bool
) -> None:
    monkeypatch.setattr(Device, "capability", capability)
    device = Device.cpu(1)
    assert worth_measuring(device) is worth
    device.close()


def test_which_weights_have_no_kernels(
    slow: SlowKernels, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table that is only looked up does not count, nor do vectors and F32."""
    q5_1 = Source(Type.Q5_1.value, (256, 96), np.zeros(96 * 8 * 24, np.uint8))
    more = Weights(slow, {"x": q5_1, "token_embd.weight": q5_1}).fill()
    assert without_kernels(slow, {**weights, **more}) == {}
    monkeypatch.setattr(Device, "capability", (8, 0))
    assert without_kernels(slow, weights) == {}
    size, bytes_ = 96 * 8 * 24, 2 * 96 * 8 * 34 + 96 * 16 * 34 + 256 * 32 * 2 + 40 * 32 * 2
    assert without_kernels(slow, {**weights, **more}) == {"q5_1": 2 * size / (bytes_ + 2 * size)}
    assert without_kernels(slow, {**weights, **more, "output.weight": weights["half"]}) == {
        "q5_1": size / (bytes_ + size + 256 * 32 * 2)
    }
    more.close()


# ---- on a GPU


@pytest.fixture
def gpu() -> Iterator[Device]:
    found = [d for d in list_devices() if d.is_gpu]
    if not found:
        pytest.skip("no GPU in this build or machine")
    device = Device(found[0])
    if (device.capability or (0, 0)) < (8, 0):
        pytest.skip("no kernels of ours on this GPU")
    yield device
    apply(device, MatmulTable())
    device.close()


def test_every_type_and_width_follows_the_table(gpu: Device) -> None:
    """Bit for bit the result of the kernels that the table names, through graphs that were captured before it was set."""
    rng = np.random.default_rng(1)
    k, rows, widths = 1024, 256, (*range(1, 10), 16, 17, 32, 33, 64)
    sources = {}
    for kind in (Type.Q4_0, Type.Q8_0):
        packed = quantize(rng.standard_normal((rows, k), np.float32), kind)
        sources[kind.name.lower()] = Source(kind.value, (k, rows), packed.view(np.uint8).reshape(-1))
    weights = Weights(gpu, sources).fill()
    workspace, graphs = Workspace(gpu), {}
    for width in reversed(widths):  # the widest first: the scratch memory must not move any more
        for kind in weights:
            g = Graph(gpu, 16)
            g.output(g.mul_mat(weights[kind], g.input("x", F32, k, width)), "y")
            g.place(workspace)
            graphs[kind, width] = g
            x = g.inputs["x"].array
            x[...] = rng.standard_normal(x.shape, np.float32)

    def products() -> dict[tuple[str, int], np.ndarray]:
        found = {}
        for key, g in graphs.items():
            for _ in range(4):  # the last ones are replays
                g.run()
            found[key] = gpu.read(g.outputs["y"])
        return found

    assert all(g.valid for g in graphs.values())
    ours = products()
    gpu.use_narrow_matmuls(False)
    stock = products()
    for key in graphs:
        # one column of so small a matrix is left to ggml's own anyway
        assert np.array_equal(ours[key], stock[key]) == (key[1] == 1), key
    mixed = table(
        ("q4_0", 2, 1, 2),
        ("q4_0", 8, 1, 0.5),
        ("q4_0", 32, 1, 2),
        ("q4_0", 64, 1, 0.5),
        ("q8_0", 8, 1, 0.5),
        ("q8_0", 16, 1, 2),
    )
    apply(gpu, mixed)
    off = {("q4_0", w) for w in (*range(3, 9), *range(33, 65))} | {("q8_0", w) for w in range(1, 9)}
    for key, product in products().items():
        np.testing.assert_array_equal(product, (stock if key in off else ours)[key], err_msg=str(key))
    apply(gpu, MatmulTable())
    for key, product in products().items():
        np.testing.assert_array_equal(product, ours[key], err_msg=str(key))
    for thing in (*graphs.values(), workspace, weights):
        thing.close()


def test_a_number_beside_a_matrix_is_one_more_rounding(gpu: Device) -> None:
    """NVFP4 files have one per matrix. Whether the matmul kernel multiplies or a kernel of its own: the same bits."""
    rng = np.random.default_rng(2)
    k, rows, columns = 1024, 256, 16
    blocks = rng.integers(0, 256, (rows, k // 64, 36), np.uint8)
    blocks[:, :, :4] = rng.integers(40, 60, (rows, k // 64, 4))  # scales, in UE4M3
    numbers = np.float32([0.37, 1.91])
    sources = {
        f"w{i}": Source(lib.GGML_TYPE_NVFP4, (k, rows), np.roll(blocks, i, axis=0).reshape(-1))
        for i in range(2)
    }
    sources |= {f"s{i}": Source(F32, (1,), numbers[i : i + 1].view(np.uint8)) for i in range(2)}
    weights, workspace = Weights(gpu, sources).fill(), Workspace(gpu)
    g = Graph(gpu, 32)
    x = g.input("x", F32, k, columns)
    for i, y in enumerate([g.expand(g.mul_mat(weights[f"w{i}"], x)) for i in range(2)]):
        g.output(g.mul(y, weights[f"s{i}"]), f"scaled{i}")
    for i in range(2):
        g.output(g.mul_mat(weights[f"w{i}"], x), f"plain{i}")
    g.place(workspace)
    g.inputs["x"].array[...] = rng.standard_normal((columns, k), np.float32)
    g.run()
    for i in range(2):
        scaled, plain = (gpu.read(g.outputs[f"{name}{i}"]) for name in ("scaled", "plain"))
        assert np.isfinite(plain).all() and plain.std() > 1
        np.testing.assert_array_equal(scaled, plain * numbers[i])
    for thing in (g, workspace, weights):
        thing.close()
