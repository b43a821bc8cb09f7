"""A CPU that behaves as a GPU does to whoever reads too early: it does nothing until it is waited for, and then in order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from dflash_ggml.ggml import split
from dflash_ggml.ggml.bindings import lib
from dflash_ggml.ggml.device import DEVICE, Device
from dflash_ggml.ggml.graph import Graph


class Deferred(Device):
    """Graphs and copies wait in `queue`; a copy reads and writes the host's memory when its turn comes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Device.cpu(1).info, 1, True, **options)
        self.queue: list[Callable[[], object]] = []
        self._marked = 0

    def compute(self, cgraph: Any) -> int:
        self.queue.append(partial(super().compute, cgraph))
        return lib.GGML_STATUS_SUCCESS

    def can_mark(self) -> bool:
        return True

    def mark(self) -> None:
        self._marked = len(self.queue)

    def wait_for_mark(self) -> None:
        self._do(self._marked)

    def synchronize(self) -> None:
        self._do(len(self.queue))

    def _do(self, n: int) -> None:
        for work in self.queue[:n]:
            work()
        del self.queue[:n]
        self._marked = max(self._marked - n, 0)


class DeferredCopies:
    """ggml's library as `split` sees it, with the device's copies in its queue. Install with `monkeypatch.setattr`."""

    def __init__(self, device: Deferred) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(lib, name)

    def ggml_backend_tensor_get_async(self, *arguments: Any) -> None:
        self._device.queue.append(partial(lib.ggml_backend_tensor_get_async, *arguments))

    def ggml_backend_tensor_set_async(self, *arguments: Any) -> None:
        self._device.queue.append(partial(lib.ggml_backend_tensor_set_async, *arguments))


def part_memory(device: Deferred, g: Graph) -> None:
    """Before `g` is placed: let the host use no memory that the device has used. On a GPU they have their own."""
    sides = split.Split(device, g.cgraph, g._crossings).sides
    for i, side in enumerate(sides):
        if side == DEVICE:
            lib.ggml_set_output(lib.ggml_graph_node(g.cgraph, i))


def defer(monkeypatch: Any) -> Deferred:
    """A device with a host whose work is deferred."""
    device = Deferred()
    device.host = Device.cpu(1, reference=True)
    monkeypatch.setattr(split, "lib", DeferredCopies(device))
    return device
