"""Graphs over a device and the CPU beside it. Here both are CPUs: every crossing is a copy all the same. 1 second."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dflash_ggml.errors import DeviceError
from dflash_ggml.ggml import weights as module
from dflash_ggml.ggml.bindings import ffi, lib
from dflash_ggml.ggml.device import F32, I32, Device
from dflash_ggml.ggml.graph import Graph
from dflash_ggml.ggml.pages import spans
from dflash_ggml.ggml.split import Split
from dflash_ggml.ggml.store import Workspace
from dflash_ggml.ggml.weights import Source, Weights
from reference.deferred import defer, part_memory

N = 16


@pytest.fixture
def device() -> Iterator[Device]:
    device = Device.cpu(1, reference=True)
    device.host = Device.cpu(1, reference=True)
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

    def __init__(self, name: str, ranges: list[tuple[int, int]]) -> None:
        self.locked, self.closed = self.can, False
        self.held = spans(ranges) if self.can else []

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
    weights = Weights(device, found, kept=["there"]).fill(is_short=where == "too little room")
    assert weights.kept_bytes == 4 * N * N
    assert caplog.text.count("are copied to memory") == (where == "not locked")
    room[:] = room if not copied else 0
    pages = weights._kept._pages
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
    assert not device.kept and not device.locked and (pages is None or pages.closed)
    workspace.close()


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
    monkeypatch.setattr(module, "lib", asked := Refusing(device))
    n = mmap.PAGESIZE // 4
    room = np.empty(10 * mmap.PAGESIZE, np.uint8)
    words = room[-room.ctypes.data % mmap.PAGESIZE + 4 :][: 32 * n].view(np.float32)  # 4 bytes into a page
    words[:] = np.random.default_rng(0).standard_normal(len(words))

    def source(first: int, end: int) -> Source:
        return Source(F32, (end - first,), words[first:end].view(np.uint8))

    # beside it none is aligned, so that none is used where it lies
    inside = {"before": source(0, n + 90), "there": source(n + 95, 2 * n + 95)}
    inside |= {"between": source(2 * n + 96, 2 * n + 196), "behind": source(2 * n + 200, 4 * n)}
    weights = Weights(device, inside, kept=["there"]).fill()
    outside = {"later": source(2 * n + 200, 5 * n), "far": source(5 * n, 6 * n)}
    later = Weights(device, outside).fill()
    assert asked.copies == 2 + 1 + 2 + 2 + 1
    for w, found in ((weights, inside), (later, outside)):
        for name, s in found.items():
            np.testing.assert_array_equal(device.read(w[name]), s.data.view(np.float32))
    for thing in (later, weights):
        thing.close()


def test_each_side_computes_its_parts(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Weights(device, sources(matrices()), kept=["there"]).fill()
    workspace, g = Workspace(device), Graph(device, 64)
    both(g, weights, g.input("x", F32, N, 1))
    g.place(workspace)
    asked: list[str] = []
    for name, who in (("device", device), ("host", device.host)):
        compute = who.compute
        monkeypatch.setattr(who, "compute", lambda part, n=name, c=compute: asked.append(n) or c(part))
    g.run()
    assert asked == ["device", "device", "host", "host", "device"]
    for thing in (g, workspace, weights):
        thing.close()


def test_graphs_share_memory_and_fall_void_together(device: Device) -> None:
    weights = Weights(device, sources(matrices()), kept=["there"]).fill()
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


def test_a_node_reads_from_one_side(device: Device) -> None:
    weights = Weights(device, sources(matrices()), kept=["there"]).fill()
    g = Graph(device, 64)
    x = g.input("x", F32, N, 1)
    g.output(g.add(*g.to_host(x), g.mul_mat(weights["here"], x)))
    with pytest.raises(ValueError, match="both sides"):
        g.place(Workspace(device))
    g.close()
    weights.close()


def test_a_failing_side_is_named(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Weights(device, sources(matrices()), kept=["there"]).fill()
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
    weights = Weights(device, sources(w), kept=["there"]).fill()
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

    def synchronize(self) -> None:
        self.asked.append("all")

    def run(self, cgraph) -> None:
        self.asked.append("compute")
        super().run(cgraph)


def test_the_host_waits_for_what_it_reads_only() -> None:
    """Copies there, then a mark, then the device's other work: the host waits for the mark, and for all where nothing else is."""
    device = Marking(Device.cpu(1).info, 1, True)
    device.asked, device.host = [], Device.cpu(1, reference=True)
    weights = Weights(device, sources(matrices()), kept=["there"]).fill()
    workspace, g = Workspace(device), Graph(device, 64)
    both(g, weights, g.input("x", F32, N, 1))
    g.place(workspace)
    device.asked.clear()
    g.run()
    assert device.asked == ["compute", "mark", "compute", "wait", "all", "compute"]
    assert isinstance(g._split, Split)
    for thing in (g, workspace, weights, device):
        thing.close()
