"""Device memory: persistent tensors (`Store`), and the graphs' shared scratch memory (`Workspace`)."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

from ..errors import DeviceError
from .bindings import Tensor, ffi, lib
from .device import Device, key


class Store:
    """Persistent tensors (weights, caches), allocated in one buffer."""

    def __init__(self, device: Device, max_tensors: int, buffer_type=None) -> None:
        self.device = device
        self.buffer_type = device.buffer_type if buffer_type is None else buffer_type
        self._buffer = ffi.NULL
        self._pages = ffi.NULL  # host memory taken by `reserve`
        self._declared: list = []
        self._arena = ffi.new("char[]", (max_tensors + 1) * lib.ggml_tensor_overhead())
        self.ctx = lib.ggml_init({"mem_size": len(self._arena), "mem_buffer": self._arena, "no_alloc": True})

    def tensor(self, type_: int, *ne: int, name: str = "") -> Tensor:
        """Declare a tensor of ggml type `type_` and shape `ne` (dimension 0 contiguous, 1 to 4 dimensions)."""
        t = lib.ggml_new_tensor(self.ctx, type_, len(ne), ffi.new("int64_t[]", ne))
        lib.ggml_set_name(t, name.encode()[: lib.GGML_MAX_NAME - 1])
        self._declared.append(t)
        return t

    def view(self, t: Tensor, offset: int, *ne: int) -> Tensor:
        """Contiguous view of `t`, `offset` in bytes."""
        row = lib.ggml_row_size(t.type, ne[0])
        ne4 = (*ne, 1, 1, 1)[:4]
        return lib.ggml_view_4d(self.ctx, t, *ne4, row, row * ne4[1], row * ne4[1] * ne4[2], offset)

    def rows_as(self, t: Tensor, type_: int, offset: int, row: int, n_rows: int) -> Tensor:
        """View [row, n_rows] of the bytes of `t` from `offset` on as another type, with the row stride of `t`."""
        view = self.tensor(type_, row, n_rows)
        last = offset + (n_rows - 1) * t.nb[1] + lib.ggml_row_size(type_, row)
        if lib.ggml_row_size(type_, row) > t.nb[1] or last > lib.ggml_nbytes(t):
            raise ValueError(f"rows of {row} at {offset} leave tensor of shape {tuple(t.ne)}")
        view.view_src, view.view_offs = t, offset
        view.nb[1] = t.nb[1]
        view.nb[2] = view.nb[3] = n_rows * t.nb[1]
        if t.data != ffi.NULL:
            view.buffer, view.data = t.buffer, ffi.cast("char *", t.data) + offset
        return view

    def allocate(self, clear: bool = True, weights: bool = False) -> Store:
        """Allocate every declared tensor, zeroed unless `clear` is False.

        Raises:
            DeviceError: It does not fit.
        """
        size = self.wanted
        if size == 0:
            return self
        buffer = lib.ggml_backend_alloc_ctx_tensors_from_buft(self.ctx, self.buffer_type)
        if buffer == ffi.NULL:
            raise self._no_room(size)
        # free what a failed load drops unclosed
        self._buffer = ffi.gc(buffer, lib.ggml_backend_buffer_free)
        self.device.holds(buffer)
        if weights:
            lib.ggml_backend_buffer_set_usage(self._buffer, lib.GGML_BACKEND_BUFFER_USAGE_WEIGHTS)
        if clear:
            lib.ggml_backend_buffer_clear(self._buffer, 0)
        return self

    def reserve(self) -> Store:
        """Reserve memory that reads as zeros for every declared tensor. A CPU commits a page only when it is written, so unused
        memory costs nothing. Declare views afterwards.

        Raises:
            DeviceError: It does not fit.
        """
        if self.device.is_gpu:
            return self.allocate()
        size = self.wanted
        if size == 0:
            return self
        # malloc does not guarantee zeros, and clearing would touch every page
        try:
            pages = mmap.mmap(-1, size, access=mmap.ACCESS_COPY)
        except (OSError, OverflowError) as error:
            raise self._no_room(size) from error
        self._pages = ffi.from_buffer(pages, require_writable=True)
        buffer = lib.ggml_backend_cpu_buffer_from_ptr(self._pages, size)
        self._buffer = ffi.gc(buffer, lib.ggml_backend_buffer_free)
        self.device.holds(buffer)
        at, unit = 0, self.device.alignment
        for t in self._declared:
            address = ffi.cast("char *", self._pages) + at
            if lib.ggml_backend_tensor_alloc(buffer, t, address) != lib.GGML_STATUS_SUCCESS:
                raise DeviceError(f"{self.device.info.name}: a tensor could not be placed")
            at += -(-lib.ggml_nbytes(t) // unit) * unit
        return self

    def _no_room(self, size: int) -> DeviceError:
        return DeviceError(
            f"{self.device.info.name}: no room for {size / 2**20:.0f} MiB; "
            "lower the context (-c) or the budget, or take a smaller model"
        )

    @property
    def wanted(self) -> int:
        """Bytes that `allocate` will take."""
        return lib.ggml_backend_alloc_ctx_tensors_from_buft_size(self.ctx, self.buffer_type)

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return 0 if self._buffer == ffi.NULL else lib.ggml_backend_buffer_get_size(self._buffer)

    def close(self) -> None:
        """Free the memory."""
        if self._buffer != ffi.NULL:
            self.device.wait_before_free()
            ffi.release(self._buffer)
            self._buffer = ffi.NULL
        if self._pages != ffi.NULL:
            ffi.release(self._pages)
            self._pages = ffi.NULL
        if self.ctx != ffi.NULL:
            lib.ggml_free(self.ctx)
            self.ctx = ffi.NULL


class Stored:
    """Base of what has its tensors in stores of its own."""

    _stores: Sequence[Store] = ()

    @property
    def nbytes(self) -> int:
        """Bytes on all sides."""
        return sum(store.nbytes for store in self._stores)

    def nbytes_on(self, side: Device) -> int:
        """Bytes on a side."""
        return sum(store.nbytes for store in self._stores if store.device is side)

    def close(self) -> None:
        """Free the memory."""
        for store in self._stores:
            store.close()


class Workspace:
    """Scratch memory shared by the graphs of a device, on each of its sides. Graphs run one after another, so their intermediate
    results may overlap.

    `generation` increases when the memory moves; graphs placed before that are invalid.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.generation = 0
        types = [
            device.host_buffer_type if side is device.host else side.scratch_type for side in device.sides
        ]
        self._sides = len(types)
        self._alloc = lib.ggml_gallocr_new_n(types, len(types))

    @property
    def nbytes(self) -> int:
        """Bytes on the first side."""
        return self.sizes[0]

    @property
    def sizes(self) -> list[int]:
        """Bytes on each side; sides with the same kind of memory share the first one's."""
        if self._alloc == ffi.NULL:
            return [0]
        return [lib.ggml_gallocr_get_buffer_size(self._alloc, side) for side in range(self._sides)]

    def place(self, cgraph: Any, sides: Sequence[int] | None = None) -> int:
        """Allocate each tensor of a graph; returns the generation for which that is valid.

        Args:
            sides: Side of each node, if not all are on the first.

        Raises:
            DeviceError: It does not fit.
        """
        before = self.sizes
        self.device.wait_before_free()  # the memory may have to move
        fits = True
        if self._sides > 1:  # for a single side, ggml determines the size itself
            nodes = ffi.NULL if sides is None else ffi.new("int[]", sides)
            fits = lib.ggml_gallocr_reserve_n(self._alloc, cgraph, nodes, ffi.NULL)
        if not fits or not lib.ggml_gallocr_alloc_graph(self._alloc, cgraph):
            self.generation += 1  # the old memory is already freed
            raise DeviceError(
                f"{self.device.info.name}: no room for the graph's scratch memory; lower n_batch, the budget or the context"
            )
        if self.sizes != before:
            self.generation += 1
        # so that results are read in place
        for i in range(lib.ggml_graph_n_nodes(cgraph) if self._sides > 1 else 0):
            node = lib.ggml_graph_node(cgraph, i)
            if node.view_src == ffi.NULL:
                self.device.homes[key(node.buffer)] = 0 if sides is None else sides[i]
        return self.generation

    def close(self) -> None:
        """Free the memory; graphs placed in it can no longer run."""
        if self._alloc != ffi.NULL:
            self.device.wait_before_free()
            lib.ggml_gallocr_free(self._alloc)
            self._alloc = ffi.NULL


def is_host(t: Tensor) -> bool:
    """Whether the memory of `t` is CPU-accessible."""
    buffer = t.view_src.buffer if t.view_src != ffi.NULL else t.buffer
    return buffer != ffi.NULL and lib.ggml_backend_buffer_is_host(buffer)
