"""Division of a graph over several devices: one ggml graph, split where a tensor crosses from one to another.

A device has sides: itself, others with layers or a draft, and a CPU with weights in host memory. A node is computed on the side
of the weights or state that it reads, any other node on the side of its newest source; sources from other sides are copied once
to each side that needs them. Models are built as for one device.

A crossing is a node that ggml never computes: its memory is on the other side, and its source's bytes are copied there. So ggml's
allocator sees one graph, values that are needed late stay in place, and every part between crossings has an identity of its own,
by which a GPU replays it.

The alternative was ggml_backend_sched (docs/decisions/0009, 0010).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Any

from .bindings import Tensor, ffi, lib
from .device import Device, key

_VIEWS = {"RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE"}
_NO_WORK = {"NONE", *_VIEWS}


class Division:
    """The side that computes each node of a graph, and the crossings between sides.

    Attributes:
        cgraph: The graph; a new one, in another order, if crossings were added.
        sides: Side of each node.
        crossings: Node -> its destination side.
    """

    def __init__(
        self,
        device: Device,
        ctx: Any,
        cgraph: Any,
        crossings: Mapping[int, int],
        size: int,
        replica: Callable[[Tensor, int], Tensor | None],
    ) -> None:
        """Args:
        crossings: Those that the graph has already.
        size: Nodes that a graph may have.
        replica: (input, side) -> the same input on that side, None where it has to cross.
        """
        self.device, self.cgraph, self.crossings = device, cgraph, dict(crossings)
        self._ctx, self._size, self._replica = ctx, size, replica
        self._nodes = [lib.ggml_graph_node(cgraph, i) for i in range(lib.ggml_graph_n_nodes(cgraph))]
        self._ops = [ffi.string(lib.ggml_op_desc(node)).decode() for node in self._nodes]
        self._order = {key(node): i for i, node in enumerate(self._nodes)}
        # None: depends on inputs only, so any side will do
        self._side: dict[int, int | None] = {}
        self._copies: dict[tuple[int, int], Tensor] = {}  # crossed tensors and views rebuilt from them
        self._assign()
        if self._rewire():
            self._reorder()
        self.sides, last = list[int](), 0
        for i in range(lib.ggml_graph_n_nodes(self.cgraph)):
            node = lib.ggml_graph_node(self.cgraph, i)
            is_view = ffi.string(lib.ggml_op_desc(node)).decode() in _NO_WORK
            last = last if is_view else self._side.get(key(node)) or 0
            self.sides.append(last)

    # ---- assignment of nodes to sides

    def _assign(self) -> None:
        for i, node in enumerate(self._nodes):
            self._side[key(node)] = self._of_node(i, node)
        for node in self._nodes:
            side = self._side[key(node)]
            if side is not None and key(node) not in self.crossings:
                for t in _sources(node):
                    self._assign_inputs(t, side)
        for i, node in enumerate(self._nodes):
            if self._side[key(node)] is None and self._ops[i] not in _VIEWS:
                self._side[key(node)] = 0
        for node in self._nodes:  # a crossing to its source's own side is dropped
            at = key(node)
            if at in self.crossings and self._location(node.src[0]) == self.crossings[at]:
                del self.crossings[at]

    def _of_node(self, i: int, node) -> int | None:
        if (side := self.crossings.get(key(node))) is not None:
            return side
        if (side := self.device.side(node)) is not None:
            return side
        if node.view_src != ffi.NULL:
            return self._side.get(key(node.view_src))
        # rotation factors are one tensor for all layers
        read = _sources(node)[: 2 if self._ops[i] == "ROPE" else None]
        for t in read:
            if (side := self.device.side(t)) is not None:
                first = self._order.get(key(node.src[0]))
                if self._ops[i] == "MUL" and first is not None and self._ops[first] == "RMS_NORM":
                    # a norm is computed on its weight's side: then only its source crosses
                    self._side[key(node.src[0])] = side
                return side
        known = [t for t in read if self._side.get(key(t)) is not None]
        return self._side[key(max(known, key=lambda t: self._order[key(t)]))] if known else None

    def _assign_inputs(self, t, side: int) -> None:
        """Assign nodes that depend on inputs only to the first side that needs them."""
        at = key(t)
        if at not in self._order or self._side[at] is not None:
            return
        if t.view_src != ffi.NULL:
            self._assign_inputs(t.view_src, side)
            self._side[at] = self._side.get(key(t.view_src))
            return
        self._side[at] = side
        for source in _sources(t):
            self._assign_inputs(source, side)

    def _location(self, t) -> int | None:
        """The side whose memory has a tensor; None for an input or a view of one, which can be on any side."""
        if (side := self.device.side(t)) is not None:
            return side
        return self._side.get(key(t if t.view_src == ffi.NULL else t.view_src))

    # ---- crossings

    def _rewire(self) -> bool:
        """Replace sources on other sides by copies; returns whether there are any."""
        for node in self._nodes:
            side = self._side[key(node)]
            if side is None or key(node) in self.crossings:
                continue
            for i in range(len(node.src)):
                t = node.src[i]
                if t != ffi.NULL and (copied := self._moved(t, side)) is not t:
                    node.src[i] = copied
        return bool(self._copies)

    def _moved(self, t, side: int):
        """`t`, or its copy on another side."""
        location, root = self._location(t), t if t.view_src == ffi.NULL else t.view_src
        if location == side or (location is None and side == 0):
            return t
        if (copied := self._copies.get((key(t), side))) is None:
            if location is None and root is t:
                copied = self._replica(t, side) or self._cross(t, side)
            elif location is None or (
                self.device.side(root) is None and ffi.string(lib.ggml_op_desc(t)).decode() in _VIEWS
            ):
                copied = self._view_of(self._moved(root, side), t)
            else:
                copied = self._cross(t, side)
            self._side.setdefault(key(copied), side)
            self._copies[key(t), side] = copied
        return copied

    def _cross(self, t, side: int):
        if not lib.ggml_is_contiguous(t):
            packed = lib.ggml_cont(self._ctx, t)
            self._side[key(packed)] = self._location(t)
            t = packed
        copied = lib.ggml_cont(self._ctx, t)
        self.crossings[key(copied)] = side
        return copied

    def _view_of(self, root, t):
        """The same view as `t` of another tensor."""
        view = lib.ggml_view_4d(self._ctx, root, 1, 1, 1, 1, t.nb[1], t.nb[2], t.nb[3], t.view_offs)
        view.type = t.type
        for i in range(4):
            view.ne[i], view.nb[i] = t.ne[i], t.nb[i]
        return view

    # ---- order

    def _reorder(self) -> None:
        """Build the graph anew with the crossings. Each side computes all that it can before another continues, so that there are
        few parts; the order within a side stays. Explicit crossings of a model stay in place, to overlap with other work."""
        whole = lib.ggml_new_graph_custom(self._ctx, self._size, False)
        waiting: list[list[int]] = [[] for _ in self.device.sides]
        for i, node in enumerate(self._nodes):
            if (side := self._side[key(node)]) is not None:
                side = side if key(node) not in self.crossings else self._location(node.src[0]) or 0
                waiting[side].append(i)
        arriving = [
            [t for (_, to), t in self._copies.items() if to == side and key(t) in self.crossings]
            for side in range(len(waiting))
        ]
        done: set[int] = set()
        heads = [0] * len(waiting)

        def is_ready(side: int) -> bool:
            if heads[side] == len(waiting[side]):
                return False
            return all(self._has(t, done) for t in _sources(self._nodes[waiting[side][heads[side]]]))

        while ready := [side for side in range(len(waiting)) if is_ready(side)]:
            side = min(ready, key=lambda side: waiting[side][heads[side]])
            for copied in arriving[side]:  # immediately, so that they do not divide the side's part
                if self._has(copied.src[0], done):
                    lib.ggml_build_forward_expand(whole, copied)
            while is_ready(side):
                node = self._nodes[waiting[side][heads[side]]]
                lib.ggml_build_forward_expand(whole, node)
                done.add(key(node))
                heads[side] += 1
        assert heads == [len(of) for of in waiting], "nodes wait for each other"
        self.cgraph = whole

    def _has(self, t, done: set[int]) -> bool:
        """Whether a source is computed, or depends only on computed ones."""
        at = key(t)
        if at in done:
            return True
        if self._side.get(at) is not None and at in self._order:
            return False
        return all(self._has(source, done) for source in _sources(t))


class Split:
    """The parts and crossings of one graph, in execution order.

    Args:
        sides: Side of each node.
        crossings: Node -> its destination side, see Division.
    """

    def __init__(
        self, device: Device, cgraph: Any, sides: Sequence[int], crossings: Mapping[int, int]
    ) -> None:
        self.device, self.sides = device, list(sides)
        self._cgraph, self._crossings = cgraph, crossings
        self._parts: list[Any] = []
        self._actions: list[Callable[[], object]] = []
        # used while the actions are listed, by side: whether copies were added since the last mark, and whether any since the
        # last wait went to the host
        n = len(device.sides)
        self._is_copying, self._copies_to_host = [True] * n, [False] * n
        self._ranks: list[tuple[Device, Any]] = []  # parts that wait for each other

    def owner(self, i: int) -> Device | None:
        """The side that computes node `i`; None for crossings and views, which are not computed."""
        node = lib.ggml_graph_node(self._cgraph, i)
        if key(node) in self._crossings or ffi.string(lib.ggml_op_desc(node)).decode() in _NO_WORK:
            return None
        return self.device.sides[self.sides[i]]

    def cut(self) -> None:
        """Make the list of actions of a run, once the graph has its memory."""
        first, n = 0, len(self.sides)
        location: dict[int, int] = {}
        for i in range(n):
            node = lib.ggml_graph_node(self._cgraph, i)
            location[key(node)] = self.sides[i]
            if key(node) in self._crossings:
                self._add_part(first, i)
                source = node.src[0]
                at = location.get(key(source if source.view_src == ffi.NULL else source.view_src))
                by = self.device.owner(source) if at is None else self.device.sides[at]
                self._add_copy(node, by, self.device.sides[self.sides[i]])
                first = i + 1
            elif i > first and self.sides[i] != self.sides[i - 1]:
                self._add_part(first, i)
                first = i
        self._add_part(first, n)
        self._add_ranks()

    def run(self) -> None:
        """Run the actions; devices may still be working on return.

        Raises:
            DeviceError: A backend fails.
        """
        for action in self._actions:
            action()

    def close(self) -> None:
        """Free the parts."""
        self._actions.clear()
        self._parts.clear()

    def _add_copy(self, node, by: Device, to: Device) -> None:
        """Add the copy of a crossing's source, ordered with the work of both devices."""
        self._add_ranks()
        source, size, host = node.src[0], lib.ggml_nbytes(node), self.device.host
        if host is None or (by is not host and to is not host):
            self._actions.append(partial(by.copy, source, to, node))
            return
        if to is host:
            copy = partial(lib.ggml_backend_tensor_get_async, by.backend, source, node.data, 0, size)
        else:
            by = to
            copy = partial(lib.ggml_backend_tensor_set_async, by.backend, node, source.data, 0, size)
        self._actions.append(copy)
        self._is_copying[by.index] = True
        self._copies_to_host[by.index] |= to is host

    def _add_part(self, first: int, end: int) -> None:
        """Add a part: nodes of one side without crossings."""
        nodes = (lib.ggml_graph_node(self._cgraph, i) for i in range(first, end))
        ops = {ffi.string(lib.ggml_op_desc(node)).decode() for node in nodes}
        if ops <= _NO_WORK:
            return
        part = ffi.gc(lib.dflash_graph_part(self._cgraph, first, end), lib.dflash_graph_part_free)
        self._parts.append(part)
        side = self.sides[first]
        who = self.device.sides[side]
        if "ALL_REDUCE" in ops:
            self._ranks.append((who, part))
            return
        self._add_ranks()
        if who is self.device.host:
            # copies access memory that the host is about to use; wait for the event only, not for later work
            for i, other in enumerate(self.device.sides):
                if other is who:
                    continue
                if self._is_copying[i]:
                    self._actions.append(other.finish)
                elif self._copies_to_host[i]:
                    self._actions.append(other.wait_for_mark)
                self._is_copying[i] = self._copies_to_host[i] = False
        elif self._copies_to_host[side] and self._is_copying[side] and who.can_mark():
            self._actions.append(who.mark)
            self._is_copying[side] = False
        self._actions.append(partial(who.run, part))

    def _add_ranks(self) -> None:
        """Add the ranks' parts, which run at the same time since they wait for each other."""
        if self._ranks:
            assert len(self._ranks) == self.device.n_ranks, "a rank would wait for ever"
            self._actions.append(partial(_run_ranks, self._ranks))
            self._ranks = []


def _run_ranks(parts: Sequence[tuple[Device, Any]]) -> None:
    """Run the ranks' parts, each in a thread: a CPU computes in it, and a GPU's queue may be full before the other begins."""
    (first, own), *others = parts
    begun = [other.begin(partial(other.run, part)) for other, part in others]
    try:
        first.run(own)
    finally:
        wait(begun)
    for one in begun:
        one.result()


def _sources(node) -> list:
    """The sources of a node; a cast has itself as destination."""
    return [t for t in node.src if t not in (ffi.NULL, node)]
