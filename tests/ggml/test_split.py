"""Tests of graphs over several devices, and the CPU beside them. Here all are CPUs: every crossing is a copy all the same. 1
second."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from dflash_ggml.errors import DeviceError
from dflash_ggml.ggml import graph as graph_module
from dflash_ggml.ggml import weights as module
from dflash_ggml.ggml.bindings import ffi, lib
from dflash_ggml.ggml.device import F32, I32, Device
from dflash_ggml.ggml.graph import Graph
from dflash_ggml.ggml.pages import spans
from dflash_ggml.ggml.split import Split
from dflash_ggml.ggml.store import Workspace
from dflash_ggml.ggml.weights import Source, Weights
from reference.deferred import Deferred, DeferredCopies, defer, part_memory

N = 16


@pytest.fixture
def device() -> Iterator[Device]:
    device = Device.cpu(1, reference=True)
    device.join(Device.cpu(1, reference=True), is_host=True)
    yield device
    device.close()


def matrices(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal((N, N)).astype(np.float32) for name in ("here", "there", "late")}


def sources(w: dict[str, np.ndarray]) -> dict[str, Source]:
    return {name: Source(F32, x.shape[::-1], x.view(np.uint8).reshape(-1)) for name, x in w.items()}


def both(g: Graph, w: Weights, x) -> None:
    """here, there and back, with results of each side that are needed late."""
    a = g.expand(g.mul_mat(w["here"], x))
    (sent,) = g.to_host(a)
    beside = g.expand(g.mul_mat(w["late"], a))
    b = g.mul_mat(w["there"], sent)
    c = g.to_device(g.add(b, sent))
    again = g.to_device(g.mul_mat(w["there"], *g.to_host(c)))
    g.output(g.add(g.add(again, beside), a), "out")


def expected(w: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    a = x @ w["here"].T
    c = a @ w["there"].T + a
    return c @ w["there"].T + a @ w["late"].T + a


class Locks:
    """Pages that are locked, or not, without a driver."""

    can = True

    def __init__(self, name: str, ranges: Iterable[tuple[int, int]], mapped: bool = False) -> None:
        self.locked, self.closed, self.mapped = self.can, False, mapped
        self.held = spans(ranges) if self.can else []

    def is_mapped(self, address: int) -> bool:
        return False

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    "where, copied",
    [
        ("a CPU", False),
        ("pages locked", False),
        ("not locked", True),
        ("too little room", False),
        ("unaligned", True),
    ],
)
def test_computes_with_weights_wherever_they_lie(
    device: Device, monkeypatch, caplog, where: str, copied: bool
) -> None:
    w = matrices()
    room = np.empty(4 * N * N + 64, np.uint8)
    at = -room.ctypes.data % 32 + (4 if where == "unaligned" else 0)
    room[at : at + 4 * N * N] = w["there"].view(np.uint8).ravel()
    found = sources(w) | {"there": Source(F32, (N, N), room[at : at + 4 * N * N])}
    if where in ("pages locked", "not locked", "too little room"):
        monkeypatch.setattr(Device, "has_pinned_memory", True)
        monkeypatch.setattr(module, "LockedPages", Locks)
        monkeypatch.setattr(Locks, "can", where == "pages locked")
    weights = Weights(device, found, on_host=["there"]).fill(is_short=where == "too little room")
    assert weights.host_bytes == 4 * N * N
    assert caplog.text.count("are copied to memory") == (where == "not locked")
    room[:] = room if not copied else 0
    pages = weights._on_host._pages
    assert (pages is not None) == (where in ("pages locked", "not locked"))
    held = sum(size for _, size in device.locked)
    assert held >= 4 * N * N if where == "pages locked" else held == 0
    workspace = Workspace(device)
    g = Graph(device, 64)
    both(g, weights, g.input("x", F32, N, 3))
    g.place(workspace)
    for seed in range(3):
        x = np.random.default_rng(seed).standard_normal((3, N)).astype(np.float32)
        g.inputs["x"].array[...] = x
        g.run()
        found = device.read(g.outputs["out"]).reshape(3, N)
        np.testing.assert_allclose(found, expected(w, x), rtol=1e-4, atol=1e-4)
    g.close()
    weights.close()
    assert not device.locked and (pages is None or pages.closed)
    workspace.close()


@pytest.mark.parametrize("locks", [None, True, False], ids=["a CPU", "pages locked", "copied"])
def test_looks_up_rows_in_host_memory(device: Device, monkeypatch, locks: bool | None) -> None:
    """On the device's side, though a host is beside it: the graph is not divided for it."""
    if locks is not None:
        monkeypatch.setattr(Device, "has_pinned_memory", True)
        monkeypatch.setattr(module, "LockedPages", Locks)
        monkeypatch.setattr(Locks, "can", locks)
    w = matrices()
    room = np.empty(4 * N * N + 32, np.uint8)
    room = room[-room.ctypes.data % 32 :][: 4 * N * N]
    room[:] = w["there"].view(np.uint8).ravel()
    found = sources(w) | {"there": Source(F32, (N, N), room)}
    weights = Weights(device, found, gathered=["there"], read_there=["there"])
    assert weights.wanted + 4 * N * N == sum(s.nbytes for s in found.values())
    assert weights.read_there == {"there": 4 * N * N} and weights.host_bytes == 0
    weights.fill()
    pages = weights._read_there._pages
    assert pages is None if locks is None else pages.locked == locks and pages.mapped
    assert device.side(weights["there"]) == device.index
    g, workspace = Graph(device, 16), Workspace(device)
    y = g.output(g.get_rows(weights["there"], g.input("ids", I32, 3)))
    g.place(workspace)
    g.inputs["ids"].array[...] = 5, 0, 5
    g.run()
    assert g._split is None
    np.testing.assert_array_equal(device.read(y).reshape(3, N), w["there"][[5, 0, 5]])
    for thing in (g, workspace, weights):
        thing.close()
    assert not device.locked


def test_without_pinned_memory_a_gpu_gets_no_rows(device: Device, monkeypatch) -> None:
    monkeypatch.setattr(Device, "has_pinned_memory", True)
    monkeypatch.setattr(Device, "is_gpu", True)
    monkeypatch.setattr(module, "LockedPages", Locks)
    monkeypatch.setattr(Locks, "can", False)
    weights = Weights(device, sources(matrices()), gathered=["there"], read_there=["there"])
    with pytest.raises(DeviceError, match="no pinned memory"):
        weights.fill()
    weights.close()


class Refusing:
    """ggml's functions, for a device that takes copies from locked pages alone, or from beside them alone, as CUDA does."""

    def __init__(self, device: Device) -> None:
        self.device, self.copies = device, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(lib, name)

    def ggml_backend_tensor_set(self, t, data, offset: int, size: int) -> None:
        first = int(ffi.cast("uintptr_t", data))
        shared = [max(min(first + size, at + n) - max(first, at), 0) for at, n in self.device.locked]
        assert sum(shared) in (0, size), "a copy from both"
        self.copies += 1
        lib.ggml_backend_tensor_set(t, data, offset, size)


def test_what_shares_a_page_with_locked_weights_is_copied_in_pieces(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors before and behind a kept one in the same file, also those that another part of the file's user brings later."""
    monkeypatch.setattr(Device, "has_pinned_memory", True)
    monkeypatch.setattr(module, "LockedPages", Locks)
    monkeypatch.setattr(module, "lib", library := Refusing(device))
    n = mmap.PAGESIZE // 4
    room = np.empty(10 * mmap.PAGESIZE, np.uint8)
    words = room[-room.ctypes.data % mmap.PAGESIZE + 4 :][: 32 * n].view(np.float32)  # 4 bytes into a page
    words[:] = np.random.default_rng(0).standard_normal(len(words))

    def source(first: int, end: int) -> Source:
        return Source(F32, (end - first,), words[first:end].view(np.uint8))

    # beside it none is aligned, so that none is used where it lies
    inside = {"before": source(0, n + 90), "there": source(n + 95, 2 * n + 95)}
    inside |= {"between": source(2 * n + 96, 2 * n + 196), "behind": source(2 * n + 200, 4 * n)}
    weights = Weights(device, inside, on_host=["there"]).fill()
    outside = {"later": source(2 * n + 200, 5 * n), "far": source(5 * n, 6 * n)}
    later = Weights(device, outside).fill()
    assert library.copies == 2 + 1 + 2 + 2 + 1
    for w, found in ((weights, inside), (later, outside)):
        for name, s in found.items():
            np.testing.assert_array_equal(device.read(w[name]), s.data.view(np.float32))
    for thing in (later, weights):
        thing.close()


def test_each_side_computes_its_parts(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Weights(device, sources(matrices()), on_host=["there"]).fill()
    workspace, g = Workspace(device), Graph(device, 64)
    both(g, weights, g.input("x", F32, N, 1))
    g.place(workspace)
    order: list[str] = []
    for name, who in (("device", device), ("host", device.host)):
        compute = who.compute
        monkeypatch.setattr(who, "compute", lambda part, n=name, c=compute: order.append(n) or c(part))
    g.run()
    assert order == ["device", "device", "host", "host", "device"]
    for thing in (g, workspace, weights):
        thing.close()


def test_graphs_share_memory_and_are_invalidated_together(device: Device) -> None:
    weights = Weights(device, sources(matrices()), on_host=["there"]).fill()
    workspace, small, large, plain = (
        Workspace(device),
        Graph(device, 64),
        Graph(device, 64),
        Graph(device, 64),
    )
    both(small, weights, small.input("x", F32, N, 1))
    small.place(workspace)
    plain.output(plain.mul_mat(weights["here"], plain.input("x", F32, N, 1)), "out")
    plain.place(workspace)
    assert small.valid and plain.valid
    both(large, weights, large.input("x", F32, N, 200))
    large.place(workspace)
    assert large.valid and not small.valid and not plain.valid
    for thing in (small, large, plain, workspace, weights):
        thing.close()


def test_strided_results_cross(device: Device) -> None:
    """What has gaps is packed on its side first."""
    workspace, g = Workspace(device), Graph(device, 64)
    x = g.input("x", I32, 7, 4)
    (part,) = g.to_host(g.view(x, (3, 4), (x.nb[1],), offset=4))
    g.output(g.to_device(g.cont(part)), "out")
    g.place(workspace)
    g.inputs["x"].array[...] = np.arange(28).reshape(4, 7)
    g.run()
    np.testing.assert_array_equal(
        device.read(g.outputs["out"]).reshape(4, 3), np.arange(28).reshape(4, 7)[:, 1:4]
    )
    g.close()
    workspace.close()


def test_a_failing_side_is_named(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Weights(device, sources(matrices()), on_host=["there"]).fill()
    g = Graph(device, 64)
    both(g, weights, g.input("x", F32, N, 1))
    g.place(Workspace(device))
    monkeypatch.setattr(device.host, "compute", lambda part: -1)
    with pytest.raises(DeviceError, match="status -1"):
        g.run()
    g.close()
    weights.close()


def test_nothing_is_read_before_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that computes as late as it may, runs behind one another too."""
    device, w = defer(monkeypatch), matrices()
    weights = Weights(device, sources(w), on_host=["there"]).fill()
    workspace, g = Workspace(device), Graph(device, 64)
    both(g, weights, g.input("x", F32, N, 3))
    part_memory(device, g)
    g.place(workspace)
    x = np.random.default_rng(0).standard_normal((3, N)).astype(np.float32)
    g.inputs["x"].array[...] = x
    for _ in range(3):
        g.run()
    assert device.queue, "what the host does not need is not waited for"
    device.synchronize()
    found = device.read(g.outputs["out"]).reshape(3, N)
    np.testing.assert_allclose(found, expected(w, x), rtol=1e-4, atol=1e-4)
    for thing in (g, workspace, weights, device):
        thing.close()


class Marking(Device):
    """A CPU that has marks like a GPU and notes what it is asked for."""

    def can_mark(self) -> bool:
        return True

    def mark(self) -> None:
        self.asked.append("mark")

    def wait_for_mark(self) -> None:
        self.asked.append("wait")

    def finish(self) -> None:
        self.asked.append("all")

    def run(self, cgraph) -> None:
        self.asked.append("compute")
        super().run(cgraph)


def test_the_host_waits_for_what_it_reads_only() -> None:
    """Copies there, then a mark, then the device's other work: the host waits for the mark, and for all where nothing else is."""
    device = Marking(Device.cpu(1).info, 1, True)
    device.asked = []
    device.join(Device.cpu(1, reference=True), is_host=True)
    weights = Weights(device, sources(matrices()), on_host=["there"]).fill()
    workspace, g = Workspace(device), Graph(device, 64)
    both(g, weights, g.input("x", F32, N, 1))
    g.place(workspace)
    device.asked.clear()
    g.run()
    assert device.asked == ["compute", "mark", "compute", "wait", "all", "compute"]
    assert isinstance(g._split, Split)
    for thing in (g, workspace, weights, device):
        thing.close()


# ---- several devices, of which nothing in the graph speaks


@pytest.fixture
def three() -> Iterator[Device]:
    device = Device.cpu(1, reference=True)
    for _ in range(2):
        device.join(Device.cpu(1, reference=True))
    yield device
    device.close()


def layers(g: Graph, w: Weights, ids, x) -> None:
    """Residual layers of two, one and one matrices on sides 0, 1, 2; all see an input and a mask that is made of inputs, and a
    norm lies at each border."""
    steps = g.view(ids, (3,), offset=12)
    mask = g.mul(x, x)
    for name in ("here", "late", "there", "last"):
        y = g.rms_norm(x, 1e-5, w[f"{name}.norm"])
        y = g.expand(g.mul_mat(w[name], g.add(y, mask)))
        x = g.add(g.add(y, x), g.get_rows(w[f"{name}.table"], steps))
    g.output(g.mul_mat(w["here"], x), "out")
    g.output(x, "x")


NAMES = {"here": 0, "late": 0, "there": 1, "last": 2}


def layer_sources() -> dict[str, Source]:
    rng = np.random.default_rng(1)
    found = {}
    for name in NAMES:
        for part, shape in (("", (N, N)), (".norm", (N,)), (".table", (N, 5))):
            x = rng.standard_normal(int(np.prod(shape))).astype(np.float32)
            found[name + part] = Source(F32, shape, x.view(np.uint8))
    return found


def sided(device: Device, sides: dict[str, int]) -> Weights:
    found = layer_sources()
    gathered = [f"{name}.table" for name in NAMES]
    where = {name: sides[name.split(".")[0]] for name in found}
    return Weights(device, found, gathered, sides=where).fill()


def results(device: Device, sides: dict[str, int], runs: int = 3) -> list[np.ndarray]:
    """What several runs of `layers` give, each of other inputs."""
    weights, workspace, g = sided(device, sides), Workspace(device), Graph(device, 128)
    layers(g, weights, g.input("ids", I32, 6), g.input("x", F32, N, 3))
    if any(sides.values()) and isinstance(device, Deferred):
        part_memory(device, g)
    g.place(workspace)
    found = []
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        g.inputs["x"].array[...] = rng.standard_normal((3, N)).astype(np.float32)
        g.inputs["ids"].array[...] = rng.integers(0, 5, 6)
        g.run()
        found += [device.read(g.outputs[name]) for name in ("out", "x")]
    for thing in (g, workspace, weights):
        thing.close()
    return found


def test_sides_give_the_bits_of_one(three: Device) -> None:
    alone = Device.cpu(1, reference=True)
    for sides in (NAMES, dict(zip(NAMES, (2, 1, 0, 1))), dict.fromkeys(NAMES, 2)):
        for a, b in zip(results(alone, dict.fromkeys(NAMES, 0)), results(three, sides), strict=True):
            np.testing.assert_array_equal(a, b)
    alone.close()


def test_a_side_has_its_layers_in_one_part_and_a_hidden_state_crosses_once(three: Device) -> None:
    weights, workspace, g = sided(three, NAMES), Workspace(three), Graph(three, 128)
    layers(g, weights, g.input("ids", I32, 6), g.input("x", F32, N, 3))
    order: list[object] = []
    for side in three.sides:
        side.compute = lambda part, i=side.index, f=side.compute: order.append(i) or f(part)  # type: ignore[method-assign]
        side.copy = lambda s, o, t, i=side.index, f=side.copy: order.append((i, o.index)) or f(s, o, t)  # type: ignore[method-assign]
    g.place(workspace)
    g.run()
    # the mask and the hidden state, which cross to the next side, and back for the matmul behind all layers
    assert [one for one in order if isinstance(one, int)] == [0, 1, 2, 0]
    assert sorted(one for one in order if not isinstance(one, int)) == [
        (0, 1),
        (0, 1),
        (0, 2),
        (1, 2),
        (2, 0),
    ]
    assert list(g._replicas) == [1, 2], "inputs come from the host to each side"
    for thing in (g, workspace, weights):
        thing.close()


def test_nothing_is_read_or_written_too_early_on_any_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """On devices that compute as late as they may, each in its own order only, runs behind one another too."""
    alone = Device.cpu(1, reference=True)
    expected = results(alone, dict.fromkeys(NAMES, 0))[-2:]
    device = defer(monkeypatch, others=2)
    monkeypatch.setattr(graph_module, "lib", DeferredCopies(device))
    weights, workspace, g = sided(device, NAMES), Workspace(device), Graph(device, 128)
    layers(g, weights, g.input("ids", I32, 6), g.input("x", F32, N, 3))
    part_memory(device, g)
    g.place(workspace)
    for seed in (7, 2):
        rng = np.random.default_rng(seed)
        # uploads read the host's memory when their turn comes: runs of different inputs have to be waited for
        device.synchronize()
        g.inputs["x"].array[...] = rng.standard_normal((3, N)).astype(np.float32)
        g.inputs["ids"].array[...] = rng.integers(0, 5, 6)
        for _ in range(3):
            g.run()
    assert all(side.queue for side in device.sides if isinstance(side, Deferred)), "a device was waited for"
    device.sides[2].finish()
    device.sides[0].finish()
    for name, want in zip(("out", "x"), expected):
        np.testing.assert_array_equal(device.read(g.outputs[name]), want)
    for thing in (g, workspace, weights, device, alone):
        thing.close()


def test_layers_on_two_sides_beside_a_host(three: Device) -> None:
    """Weights that the host keeps, in the middle of another side's layers."""
    three.join(Device.cpu(1, reference=True), is_host=True)
    rng, w = np.random.default_rng(0), matrices()
    weights = Weights(three, sources(w), on_host=["there"], sides={"late": 1}).fill()
    workspace, g = Workspace(three), Graph(three, 64)
    a = g.mul_mat(weights["late"], g.mul_mat(weights["here"], g.input("x", F32, N, 2)))
    (sent,) = g.to_host(a)
    back = g.to_device(g.mul_mat(weights["there"], sent), weights["late"])
    g.output(g.add(back, g.mul_mat(weights["late"], a)), "out")
    g.place(workspace)
    g.inputs["x"].array[...] = x = rng.standard_normal((2, N)).astype(np.float32)
    g.run()
    h = x @ w["here"].T @ w["late"].T
    found = three.read(g.outputs["out"]).reshape(2, N)
    np.testing.assert_allclose(found, h @ w["there"].T + h @ w["late"].T, rtol=1e-3, atol=1e-3)
    assert [g._split.owner(i).index for i in range(g.n_nodes) if g._split.owner(i)] == [0, 1, 1, 3, 1]
    for thing in (g, workspace, weights):
        thing.close()


def test_a_large_input_crosses_as_a_result_does(three: Device) -> None:
    """Beyond what travels with the others it has no replica; the part that is read keeps its address."""
    weights = Weights(three, sources(matrices()), sides={"late": 1}).fill()
    workspace, g = Workspace(three), Graph(three, 64)
    x = g.input("x", F32, N, 2048)
    g.output(g.mul_mat(weights["late"], g.view(x, (N, 3), offset=5 * x.nb[1])), "out")
    g.output(g.mul_mat(weights["here"], g.view(x, (N, 2))), "beside")
    g.place(workspace)
    assert not g._replicas and g._split is not None
    for seed in range(2):
        values = np.random.default_rng(seed).standard_normal((2048, N)).astype(np.float32)
        g.inputs["x"].array[...] = values
        g.run()
        found = three.read(g.outputs["out"]).reshape(3, N)
        np.testing.assert_allclose(found, values[5:8] @ matrices()["late"].T, rtol=1e-4, atol=1e-4)
    for thing in (g, workspace, weights):
        thing.close()
