"""A graph over a device and the CPU beside it: one ggml graph, cut where a tensor crosses from one to the other.

A crossing is a node that ggml never computes: its memory lies on the other side, and the bytes of its source are copied there.
So ggml's allocator sees one graph, what is needed late stays where it is, and every part between crossings keeps an identity of
its own, by which a GPU replays it.

ggml_backend_sched was the other design. It splits one graph at a time: of the graphs that alternate here (plain, verify, draft,
commit) each would be cut again, and compared node by node, at every turn; and for many columns it waits for the ids of the
experts to copy them one by one, where whole matrices are wanted anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from .bindings import ffi, lib
from .device import DEVICE, HOST, Device, key

_NO_WORK = {"NONE", "RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE"}


class Split:
    """The parts and crossings of one graph, in order.

    crossings: node -> the side that it leads to. A node belongs to the side of what it reads; weights that lie with the host are
    the host's, all else that no node computes is the device's.
    """

    def __init__(self, device: Device, cgraph, crossings: Mapping[int, int]) -> None:
        """Raises ValueError for a node that reads from both sides."""
        assert device.host is not None
        self.device, self.host = device, device.host
        self._cgraph, self._crossings = cgraph, crossings
        self.sides: list[int] = []  # of each node
        found: dict[int, int] = {}
        for i in range(lib.ggml_graph_n_nodes(cgraph)):
            node = lib.ggml_graph_node(cgraph, i)
            side = crossings.get(key(node))
            if side is None:
                read = {found.get(key(t), device.side(t)) for t in node.src if t != ffi.NULL}
                if len(read) > 1:
                    raise ValueError(f"'{ffi.string(node.name).decode()}' reads what lies on both sides")
                side = read.pop() if read else DEVICE
            found[key(node)] = side
            self.sides.append(side)
        self._parts: list[Any] = []
        self._actions: list[Callable[[], object]] = []
        # while the list is made: copies since the last mark that nothing waits for; whether some since the last wait came here
        self._is_copying, self._brings = True, False

    def owner(self, i: int) -> Device | None:
        """Who computes node `i`; None for a crossing."""
        if key(lib.ggml_graph_node(self._cgraph, i)) in self._crossings:
            return None
        return self.host if self.sides[i] == HOST else self.device

    def cut(self) -> None:
        """Make the list of what a run does, once the graph has its memory."""
        first, n = 0, len(self.sides)
        for i in range(n):
            node = lib.ggml_graph_node(self._cgraph, i)
            if key(node) in self._crossings:
                self._add_part(first, i)
                self._add_copy(node, self.sides[i])
                first = i + 1
            elif i > first and self.sides[i] != self.sides[i - 1]:
                self._add_part(first, i)
                first = i
        self._add_part(first, n)

    def run(self) -> None:
        """Do it all; the device may still be at it on return. Raises DeviceError when a backend fails."""
        for action in self._actions:
            action()

    def close(self) -> None:
        self._actions.clear()
        self._parts.clear()

    def _add_copy(self, node, side: int) -> None:
        """The bytes of a crossing's source, in the order of the device's other work."""
        source, size = node.src[0], lib.ggml_nbytes(node)
        if side == HOST:
            copy = partial(lib.ggml_backend_tensor_get_async, self.device.backend, source, node.data, 0, size)
        else:
            copy = partial(lib.ggml_backend_tensor_set_async, self.device.backend, node, source.data, 0, size)
        self._actions.append(copy)
        self._is_copying, self._brings = True, self._brings or side == HOST

    def _add_part(self, first: int, end: int) -> None:
        """Nodes that one side computes, none of which is a crossing."""
        nodes = (lib.ggml_graph_node(self._cgraph, i) for i in range(first, end))
        if all(ffi.string(lib.ggml_op_desc(node)).decode() in _NO_WORK for node in nodes):
            return
        part = ffi.gc(lib.dflash_graph_part(self._cgraph, first, end), lib.dflash_graph_part_free)
        self._parts.append(part)
        if self.sides[first] == HOST:
            # copies read and write what the host is about to use; behind the event is work that it need not wait for
            if self._is_copying:
                self._actions.append(self.device.synchronize)
            elif self._brings:
                self._actions.append(self.device.wait_for_mark)
            self._is_copying = self._brings = False
        elif self._brings and self._is_copying and self.device.can_mark():
            self._actions.append(self.device.mark)
            self._is_copying = False
        who = self.host if self.sides[first] == HOST else self.device
        self._actions.append(partial(who.run, part))
