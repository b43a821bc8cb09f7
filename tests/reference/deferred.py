"""A CPU that behaves like a GPU on early reads: it computes nothing until it is waited for, and then in order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from dflash_ggml.ggml import split
from dflash_ggml.ggml.bindings import lib
from dflash_ggml.ggml.device import Device
from dflash_ggml.ggml.graph import Graph


class Deferred(Device):
    """Graphs and copies wait in `queue`; a copy reads and writes host memory when it is executed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Device.cpu(1).info, 1, True, **options)
        self.queue: list[Callable[[], object]] = []
        self._marked = self._done = 0

    def compute(self, cgraph: Any) -> int:
        self.queue.append(partial(super().compute, cgraph))
        return lib.GGML_STATUS_SUCCESS

    def can_mark(self) -> bool:
        return True

    def mark(self) -> None:
        self._marked = len(self.queue)

    def wait_for_mark(self) -> None:
        self._do(self._marked)

    def finish(self) -> None:
        self._do(len(self.queue))

    def copy(self, source: Any, other: Device, twin: Any) -> None:
        """As between two GPUs: the copy waits for what the other was asked for before, which waits for the copy."""
        assert isinstance(other, Deferred)
        before, done = other.asked, list[bool]()

        def move() -> None:
            other.do_until(before)
            lib.ggml_backend_tensor_copy_async(self.backend, other.backend, source, twin)
            done.append(True)

        self.queue.append(move)
        at = self.asked
        other.queue.append(lambda: done or self.do_until(at))

    @property
    def asked(self) -> int:
        """How much was asked for so far."""
        return self._done + len(self.queue)

    def do_until(self, n: int) -> None:
        """Do the first n things that were ever asked for."""
        self._do(max(n - self._done, 0))

    def _do(self, n: int) -> None:
        for _ in range(n):
            work = self.queue.pop(0)
            self._done += 1
            self._marked = max(self._marked - 1, 0)
            work()


class DeferredCopies:
    """ggml's library as `split` and `graph` see it, with a device's copies in its queue. Install with `monkeypatch.setattr`."""

    def __init__(self, device: Deferred) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(lib, name)

    def ggml_backend_tensor_get_async(self, backend: Any, *arguments: Any) -> None:
        self._queue(backend).append(partial(lib.ggml_backend_tensor_get_async, backend, *arguments))

    def ggml_backend_tensor_set_async(self, backend: Any, *arguments: Any) -> None:
        self._queue(backend).append(partial(lib.ggml_backend_tensor_set_async, backend, *arguments))

    def _queue(self, backend: Any) -> list[Callable[[], object]]:
        return next(s.queue for s in self._device.sides if s.backend == backend)  # type: ignore[attr-defined]


def part_memory(device: Deferred, g: Graph) -> None:
    """Before `g` is placed: let no side use memory that another has used. On GPUs they have their own."""
    g._divide()
    assert g._split is not None
    for i, side in enumerate(g._split.sides):
        if device.sides[side] is not device.host:
            lib.ggml_set_output(lib.ggml_graph_node(g.cgraph, i))


def defer(monkeypatch: Any, others: int = 0) -> Deferred:
    """A device with a host and so many other sides, whose work is deferred."""
    device = Deferred()
    for _ in range(others):
        device.join(Deferred())
    device.join(Device.cpu(1, reference=True), is_host=True)
    monkeypatch.setattr(split, "lib", DeferredCopies(device))
    return device
