"""Tests of how a graph's inputs reach the device and its results come back, with and without host-visible memory."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from dflash_ggml.errors import DeviceError
from dflash_ggml.ggml import device as devices
from dflash_ggml.ggml import graph as ggml
from dflash_ggml.ggml.bindings import Tensor
from dflash_ggml.ggml.device import F16, F32, I32, Device, Pinned
from dflash_ggml.ggml.graph import Graph, packed
from dflash_ggml.ggml.store import Store, Workspace

SHAPES = {"a": (F32, 7), "b": (F16, 5, 3), "c": (I32, 1), "large": (F32, 300, 100), "d": (F16, 1)}


class Counting:
    """ggml's library that notes the size of every upload."""

    def __init__(self, lib) -> None:
        self.lib, self.sizes = lib, []

    def __getattr__(self, name: str):
        return getattr(self.lib, name)

    def ggml_backend_tensor_set_async(self, backend, tensor, data, offset, size) -> None:
        self.sizes.append(size)
        self.lib.ggml_backend_tensor_set_async(backend, tensor, data, offset, size)


@pytest.mark.parametrize("touchable", [True, False])
def test_inputs_arrive_and_small_ones_are_batched(monkeypatch: pytest.MonkeyPatch, touchable: bool) -> None:
    counting = Counting(ggml.lib)
    monkeypatch.setattr(ggml, "lib", counting)
    if not touchable:
        monkeypatch.setattr(ggml, "is_host", lambda t: False)
    device = Device.cpu(1)
    g = Graph(device, 64)
    ints = packed(g, "ints", 3, 4)
    results = {name: g.output(g.cont(g.input(name, *shape))) for name, shape in SHAPES.items()}
    parts = [g.output(g.cont(t)) for t in ints]
    g.place(Workspace(device))
    rng = np.random.default_rng(0)
    for _ in range(3):
        for name in SHAPES:
            array = g.inputs[name].array
            array[...] = rng.integers(0, 100, array.shape)
        g.inputs["ints"].array[:] = rng.integers(0, 100, 7)
        given = {name: i.array.copy() for name, i in g.inputs.items()}
        counting.sizes.clear()
        g.run()
        for name, t in results.items():
            np.testing.assert_array_equal(device.read(t), given[name].ravel())
        np.testing.assert_array_equal(np.concatenate([device.read(t) for t in parts]), given["ints"])
        assert len(counting.sizes) == (0 if touchable else 2), "one for the small ones, one for the large"
    g.close()


def test_a_graph_that_goes_gives_its_pages_back(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref] = []

    def noted(size: int) -> mmap.mmap:
        found = pages(size)
        made.append(weakref.ref(found))
        return found

    pages, device = ggml._pages, Device.cpu(1)
    monkeypatch.setattr(ggml, "_pages", noted)
    for _ in range(2):
        g = Graph(device)
        g.output(g.cont(g.input("a", F32, 8)), "b")
        assert made[-1]() is not None
        g.close()
        del g
        assert made[-1]() is None
    assert len(made) == 2
    device.close()


def test_a_graph_that_does_not_fit_is_a_device_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*args: object, **kwargs: object) -> mmap.mmap:
        raise OSError(12, "Cannot allocate memory")

    device = Device.cpu(1)
    monkeypatch.setattr(ggml.mmap, "mmap", no_memory)
    with pytest.raises(DeviceError, match="no room for a graph of .* MiB; lower the context"):
        Graph(device)
    monkeypatch.undo()
    device.close()


@pytest.fixture
def pinned_device() -> Iterator[Device]:
    """A CPU with 128 bytes of pinned memory, which it would not have."""
    device = Device.cpu(1)
    assert not len(device._pinned.array), "the CPU needs none"
    device._pinned = Pinned(device.buffer_type, 128)
    yield device
    device.close()


@pytest.fixture
def stored(pinned_device: Device) -> Iterator[tuple[Tensor, np.ndarray]]:
    """A tensor on it, and its values."""
    store = Store(pinned_device, 1)
    t = store.tensor(I32, 400)
    store.allocate()
    values = np.arange(400, dtype=np.int32)
    pinned_device.write(t, values)
    yield t, values
    store.close()


def test_reads_through_pinned_memory_are_copies(
    pinned_device: Device, stored: tuple[Tensor, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_PINNED", 64)
    t, values = stored
    first = pinned_device.read(t, 16)
    np.testing.assert_array_equal(pinned_device.read(t, 5, offset=12), values[3:8])
    np.testing.assert_array_equal(pinned_device.read(t), values)
    np.testing.assert_array_equal(first, values[:16])


def test_arrays_of_all_sizes_are_read_through_two_halves(
    pinned_device: Device, stored: tuple[Tensor, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_PINNED", 64)
    t, values = stored
    rng = np.random.default_rng(1)
    firsts, counts = rng.integers(0, 350, 60), rng.integers(0, 25, 60)
    found = [np.empty(8 * n, np.uint8) for n in counts]
    pinned_device.read_pieces(
        ([(t, 4 * at, 4 * n)] * 2, out) for at, n, out in zip(firsts.tolist(), counts.tolist(), found)
    )
    for at, n, out in zip(firsts, counts, found):
        np.testing.assert_array_equal(out.view(np.int32), np.tile(values[at : at + n], 2))
