"""Loading of weights: each tensor into the memory where its operation runs best."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np

from ..errors import DeviceError, ModelFileError
from .bindings import ffi, lib
from .device import BF16, F16, F32, I32, Device
from .pages import LockedPages, pieces
from .store import Store

_READING = 4  # threads that fault in host weights from the file's mapping: one alone waits for its pages
TENSOR_ALIGNMENT = 32  # alignment of ggml's CPU buffers
# matrices with row lookup, which keep their layout
GATHERED = ("token_embd.weight", "per_layer_token_embd.weight", "rank1.token_embd.weight")
Progress = Callable[[str, int, int], None]
log = logging.getLogger("dflash_ggml")


class Source(NamedTuple):
    """One tensor of a file: ggml type, shape in ggml order, its bytes (an array or a memory view)."""

    type: int
    shape: tuple[int, ...]
    data: Any

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return memoryview(self.data).nbytes


def bf16_as_f16(name: str, s: Source) -> Source:
    """The tensor in float16, for GPUs with slow BF16; values below 6e-8 become 0.

    Raises:
        ModelFileError: A value is too large for float16.
    """
    if s.type != BF16:
        return s
    bits = np.frombuffer(s.data, np.uint16).astype(np.uint32) << 16
    values = bits.view(np.float32)
    if np.abs(values).max(initial=0) > np.finfo(np.float16).max:
        raise ModelFileError(
            f"tensor {name}: BF16 values beyond float16's range, and this GPU has no BF16 matmul; use a Q8_0 file"
        )
    return Source(F16, s.shape, values.astype(np.float16).view(np.uint8))


class Weights(Mapping):
    """ggml tensors by their GGUF name: declared first, so that their size is known, then filled.

    Matrices and stacked matrices take a layout made for matmuls if the device has one; on the CPU all others stay in the file's
    mapping.

    Args:
        device: The first of the devices.
        sources: The file's tensors.
        gathered: Matrices with row lookup, which keep their layout.
        on_host: Names of those that stay in host memory, for the host to compute with.
        read_there: Names of those that stay in host memory, where the device's kernels read them.
        sides: The side of each tensor that is not on the first.

    Raises:
        ModelFileError: A tensor has a type that the device cannot multiply.
    """

    def __init__(
        self,
        device: Device,
        sources: Mapping[str, Source],
        gathered: Iterable[str] = GATHERED,
        on_host: Iterable[str] = (),
        read_there: Iterable[str] = (),
        sides: Mapping[str, int] | None = None,
    ) -> None:
        self._device = device
        self._tensors: dict[str, Any] = {}
        self._groups: list[tuple[Store, list[str]]] = []  # of what has to be copied
        self._mapped: list[tuple[Device, tuple]] = []
        self._sources: Mapping[str, Source] | None = sources
        gathered = set(gathered)
        groups: dict[tuple[Device, Any], list[str]] = {}
        self._on_host = HostWeights(device, {name: sources[name] for name in on_host}, device.host)
        self._read_there = HostWeights(device, {name: sources[name] for name in read_there}, device)
        self._tensors |= self._on_host.tensors | self._read_there.tensors
        elsewhere = set(self._tensors)
        for name, s in sources.items():
            by = device if sides is None else device.sides[sides.get(name, 0)]
            plain = by.buffer_type
            is_matrix = len(s.shape) in (2, 3) and s.shape[1] > 1 and name not in gathered and s.type != F32
            layouts = by.matmul_buffer_types() if is_matrix and name not in elsewhere else []
            chosen = next((b for b in layouts if _suits(by, s, b)), plain)
            if is_matrix and chosen == plain and not _can_multiply(by, s, plain):
                kind = ffi.string(lib.ggml_type_name(s.type)).decode()
                raise ModelFileError(f"tensor {name}: {by.info.name} has no matmul for type {kind}")
            if name in gathered and not _can_gather(by, s):
                kind = ffi.string(lib.ggml_type_name(s.type)).decode()
                raise ModelFileError(
                    f"tensor {name}: {by.info.name} cannot look rows up in type {kind}; use another quantisation"
                )
            if name not in elsewhere:
                groups.setdefault((by, chosen), []).append(name)
        for (by, buffer_type), names in groups.items():
            store = Store(by, len(names), buffer_type)
            for name in names:
                self._tensors[name] = store.tensor(sources[name].type, *sources[name].shape, name=name)
            if buffer_type == by.buffer_type and not by.is_gpu:
                mapped = [name for name in names if _is_aligned(sources[name].data)]
                self._mapped += [
                    (by, _mapped(by, name, self._tensors[name], sources[name])) for name in mapped
                ]
                names = [name for name in names if name not in mapped]
            self._groups.append((store, names))

    def __getitem__(self, name: str):
        return self._tensors[name]

    def __iter__(self):
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def fill(
        self, progress: Progress | None = None, stage: str = "weights", is_short: bool = False
    ) -> Weights:
        """Upload the bytes to the device; `progress(stage, bytes done, bytes in all)`.

        Args:
            is_short: Host weights exceed host memory, and are read from the file repeatedly.

        Raises:
            DeviceError: They do not fit.
        """
        done, total = 0, sum(s.nbytes for s in self.sources.values())

        def count(size: int) -> None:
            nonlocal done
            done += size
            if progress:
                progress(stage, done, total)

        self._on_host.fill(is_short, count)
        self._read_there.fill(False, count)
        for store, names in self._groups:
            if not names:
                continue
            store.allocate(clear=False, weights=True)
            for name in names:
                s = self.sources[name]
                self._bring(self._tensors[name], s.data)
                count(s.nbytes)
        self._sources = None
        if progress:
            progress(stage, total, total)
        return self

    def _bring(self, t, data: Any) -> None:
        """Copy the bytes of a tensor, in pieces at the borders of locked pages."""
        data, begin = np.ascontiguousarray(data) if not memoryview(data).c_contiguous else data, 0
        for end in pieces(*_place(data), self._device.locked):
            lib.ggml_backend_tensor_set(t, ffi.from_buffer(data) + begin, begin, end - begin)
            begin = end

    @property
    def sources(self) -> Mapping[str, Source]:
        """The file's tensors, until they are filled."""
        assert self._sources is not None, "the weights have been filled"
        return self._sources

    @property
    def wanted(self) -> int:
        """Planned device bytes, on all sides."""
        return sum(self.wanted_on(side) for side in self._device.sides)

    def wanted_on(self, side: Device) -> int:
        """Planned device bytes on a side."""
        return self._mapped_bytes(side) + sum(
            store.wanted for store, _ in self._groups if store.device is side
        )

    @property
    def nbytes(self) -> int:
        """Device bytes, on all sides."""
        return sum(self.nbytes_on(side) for side in self._device.sides)

    def nbytes_on(self, side: Device) -> int:
        """Device bytes on a side."""
        return self._mapped_bytes(side) + sum(
            store.nbytes for store, _ in self._groups if store.device is side
        )

    def _mapped_bytes(self, side: Device) -> int:
        return sum(memoryview(data).nbytes for by, (_, data) in self._mapped if by is side)

    @property
    def host_sizes(self) -> dict[str, int]:
        """Bytes of each tensor in host memory with which the host computes."""
        return {name: lib.ggml_nbytes(t) for name, t in self._on_host.tensors.items()}

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory with which the host computes."""
        return self._on_host.nbytes

    @property
    def read_there(self) -> dict[str, int]:
        """Bytes of each tensor in host memory that the device's kernels read."""
        return {name: lib.ggml_nbytes(t) for name, t in self._read_there.tensors.items()}

    def close(self) -> None:
        """Free the device memory; tensors in the file's mapping stay as they are."""
        self._tensors.clear()
        self._on_host.close()
        self._read_there.close()
        for store, _ in self._groups:
            store.close()
        self._groups.clear()
        self._mapped.clear()


class HostWeights:
    """Weights in host memory: in the file's mapping, page-locked so that a GPU reads them directly; otherwise copied to pinned
    memory.

    Args:
        device: The first of the devices.
        sources: The file's tensors.
        user: The side that computes with them; needed if there are any.
    """

    def __init__(self, device: Device, sources: Mapping[str, Source], user: Device | None) -> None:
        self._device, self._sources, self._user = device, sources, user
        self.tensors: dict[str, Any] = {}
        self._pages: LockedPages | None = None  # released before the mapping
        self._mapped: list = []
        self._store: Store | None = None
        if sources:
            assert user is not None, "only a host keeps weights"
            self._store = Store(user, len(sources), device.host_buffer_type)
            for name, s in sources.items():
                self.tensors[name] = self._store.tensor(s.type, *s.shape, name=name)
        self.nbytes = self._store.wanted if self._store else 0

    def fill(self, is_short: bool, count: Callable[[int], None]) -> None:
        """Map or copy the bytes; `count` gets the bytes of each tensor.

        Args:
            is_short: They exceed host memory, so pages must stay evictable.

        Raises:
            DeviceError: Copies do not fit.
        """
        if self._store is None:
            return

        def read(s: Source) -> int:
            if not is_short:
                np.frombuffer(s.data, np.uint8)[:: mmap.PAGESIZE].max(initial=0)
            return s.nbytes

        with ThreadPoolExecutor(_READING) as pool:
            for size in pool.map(read, self._sources.values()):
                count(size)
            mapped = {name: s for name, s in self._sources.items() if _is_aligned(s.data)}
            if not is_short and self._device.has_pinned_memory:
                ranges = [_place(s.data) for s in mapped.values()]
                self._pages = LockedPages(self._device.info.name, ranges, mapped=self._user is self._device)
                self._device.locked += self._pages.held
                if not self._pages.locked:
                    self._warn_copied()
                    mapped = {}
            host = self._store.device
            self._mapped += [_mapped(host, name, self.tensors[name], s) for name, s in mapped.items()]
            if len(mapped) < len(self._sources):
                self._allocate(self._store)
            list(pool.map(self._copy, [name for name in self._sources if name not in mapped]))
        self._sources = {}

    def _allocate(self, store: Store) -> None:
        store.allocate(clear=False, weights=True)
        if self._user is not self._device or not self._device.is_gpu:
            return
        # without pinned memory ggml takes other host memory, which kernels cannot read
        with closing(LockedPages(self._device.info.name, ())) as driver:
            pinned = driver.locked and all(driver.is_mapped(_address(t)) for t in self.tensors.values())
        if not pinned:
            raise DeviceError(
                f"{self._device.info.name}: no pinned memory for {self.nbytes / 2**20:.0f} MiB of weights that stay in host "
                "memory; lower the context (-c)"
            )

    def _warn_copied(self) -> None:
        log.warning(
            "%s: pages of the model file cannot be locked here, so the %.0f MiB that stay with the host are copied to memory "
            "that the driver allocates: loading takes longer, and the file's pages stay there too until others need the room",
            self._device.info.name,
            self.nbytes / 2**20,
        )

    def _copy(self, name: str) -> None:
        s = self._sources[name]
        lib.ggml_backend_tensor_set(self.tensors[name], ffi.from_buffer(s.data), 0, s.nbytes)

    def close(self) -> None:
        """Free the copies and unlock the pages."""
        self.tensors.clear()
        if self._pages is not None:
            self._device.synchronize()
            self._device.locked = [span for span in self._device.locked if span not in self._pages.held]
            self._pages.close()
            self._pages = None
        if self._store is not None:
            self._store.close()
            self._store = None
        self._mapped.clear()


def _address(t) -> int:
    """Address of a tensor's data, 0 of one without."""
    return int(ffi.cast("uintptr_t", t.data))


def _place(data) -> tuple[int, int]:
    """Address and size of an array."""
    return int(ffi.cast("uintptr_t", ffi.from_buffer(data))), memoryview(data).nbytes


def _mapped(device: Device, name: str, t, s: Source) -> tuple:
    """Point `t` into the file's mapping; returns the object to keep alive. Raises ModelFileError, DeviceError."""
    data = memoryview(s.data)
    address = ffi.from_buffer(data)
    size = lib.ggml_nbytes(t)
    if size != data.nbytes:
        raise ModelFileError(f"tensor {name}: {data.nbytes} bytes in the file, {size} expected")
    buffer = lib.ggml_backend_cpu_buffer_from_ptr(address, size)
    device.holds(buffer)
    lib.ggml_backend_buffer_set_usage(buffer, lib.GGML_BACKEND_BUFFER_USAGE_WEIGHTS)
    if lib.ggml_backend_tensor_alloc(buffer, t, address) != lib.GGML_STATUS_SUCCESS:
        raise DeviceError(f"tensor {name}: cannot be mapped")
    return ffi.gc(buffer, lib.ggml_backend_buffer_free), data


def _is_aligned(data) -> bool:
    """Whether ggml can use the bytes in place; safetensors files have no alignment, and parts may be discontiguous."""
    return memoryview(data).c_contiguous and _place(data)[0] % TENSOR_ALIGNMENT == 0


def has_matmul_layout(device: Device, s: Source) -> bool:
    """Whether a matrix on this device takes a layout made for matmuls, which does not support row lookup."""
    return any(_suits(device, s, buffer_type) for buffer_type in device.matmul_buffer_types())


def _suits(device: Device, s: Source, buffer_type) -> bool:
    """Whether a matrix may use a layout made for matmuls. Rows of one block may not: from 32 columns on, ggml's AMX kernels
    add their sums to uninitialised memory."""
    return s.shape[0] > lib.ggml_blck_size(s.type) and _can_multiply(device, s, buffer_type)


def _can_multiply(device: Device, s: Source, buffer_type) -> bool:
    """Whether the device supports `mul_mat` (or `mul_mat_id`) with a matrix like `s` in a buffer of this type."""

    def op(ctx, w, probe: Store):
        if len(s.shape) == 2:
            return lib.ggml_mul_mat(ctx, w, probe.tensor(F32, s.shape[0], 16))
        return lib.ggml_mul_mat_id(ctx, w, probe.tensor(F32, s.shape[0], 1, 16), probe.tensor(I32, 1, 16))

    return _supports(device, s, buffer_type, op)


def _can_gather(device: Device, s: Source) -> bool:
    """Whether the device supports row lookup in a matrix like `s` in ordinary memory."""
    return _supports(
        device, s, device.buffer_type, lambda ctx, w, probe: lib.ggml_get_rows(ctx, w, probe.tensor(I32, 16))
    )


def _supports(device: Device, s: Source, buffer_type, make: Callable[[Any, Any, Store], Any]) -> bool:
    """Whether the device supports the operation `make(context, weights, store)` on weights like `s`."""
    probe = Store(device, 4)
    w = probe.tensor(s.type, *s.shape)
    op = make(probe.ctx, w, probe)
    buffer = lib.ggml_backend_buft_alloc_buffer(buffer_type, 0)
    w.buffer = buffer
    answer = lib.ggml_backend_dev_supports_op(device.info.handle, op)
    w.buffer = ffi.NULL
    lib.ggml_backend_buffer_free(buffer)
    probe.close()
    return bool(answer)
