"""Devices: listing of those available, and `Device`, an open ggml backend."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from typing import Any

import numpy as np

from ..errors import ConfigError, DeviceError
from .bindings import Tensor, ffi, lib
from .threads import IDLE, WINDOW, Pool, ThreadCount

F32, F16, BF16, I32 = lib.GGML_TYPE_F32, lib.GGML_TYPE_F16, lib.GGML_TYPE_BF16, lib.GGML_TYPE_I32
I64 = lib.GGML_TYPE_I64
FP8 = (9, 0)  # compute capability of the GPUs with scales per row and column in matmuls of 8-bit floats
NARROW_COLUMNS = 64  # columns up to which CUDA matmuls use our kernels
# largest read through pinned memory, in bytes: a row of logits, ids, choices, a block of K/V rows of target and draft
_PINNED = 1 << 25
NUMPY_TYPES: dict[int, np.dtype[Any]] = {
    F32: np.dtype(np.float32),
    F16: np.dtype(np.float16),
    I32: np.dtype(np.int32),
}


def key(t: Tensor) -> int:
    """The identity of a tensor."""
    return int(ffi.cast("uintptr_t", t))


def usable_cpus() -> int:
    """Number of CPUs this process may run on."""
    return len(_cpus())


def _cpus() -> set[int]:
    # macOS has no affinity
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def physical_cores() -> int:
    """Number of CPUs this process may run on, hyper-threads counted once if the system reports them."""
    cores = set()
    for cpu in _cpus():
        try:
            with open(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") as f:
                cores.add(f.read().strip())
        except OSError:
            cores.add(str(cpu))
    return max(1, len(cores))


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device that ggml finds: `name` is ggml's ("CPU", "CUDA0"), memory in bytes."""

    name: str
    description: str
    is_gpu: bool
    memory_free: int
    memory_total: int
    handle: object


def list_devices() -> list[DeviceInfo]:
    """Every device of this build that is present on this machine, GPUs first."""
    found = []
    for i in range(lib.ggml_backend_dev_count()):
        dev = lib.ggml_backend_dev_get(i)
        kind = lib.ggml_backend_dev_type(dev)
        if kind not in (
            lib.GGML_BACKEND_DEVICE_TYPE_CPU,
            lib.GGML_BACKEND_DEVICE_TYPE_GPU,
            lib.GGML_BACKEND_DEVICE_TYPE_IGPU,
        ):
            continue
        free, total = ffi.new("size_t *"), ffi.new("size_t *")
        lib.ggml_backend_dev_memory(dev, free, total)
        text = [
            ffi.string(f(dev)).decode() for f in (lib.ggml_backend_dev_name, lib.ggml_backend_dev_description)
        ]
        found.append(
            DeviceInfo(text[0], text[1], kind != lib.GGML_BACKEND_DEVICE_TYPE_CPU, free[0], total[0], dev)
        )
    return sorted(found, key=lambda d: not d.is_gpu)


def built_backends() -> list[str]:
    """Names of this build's backends ("CPU", "CUDA", "Vulkan"), whether or not they find a device."""
    names = {"HIP": "ROCm", "METAL": "Metal", "VULKAN": "Vulkan"}
    return [names.get(name, name) for name in ffi.string(lib.dflash_backends()).decode().split()]


def cpu_features() -> list[str]:
    """Features that ggml's CPU kernels were compiled with, by ggml's names ("AVX2", "LLAMAFILE")."""
    return backend_features(next(d for d in list_devices() if not d.is_gpu))


def backend_features(info: DeviceInfo) -> list[str]:
    """Features that a device's backend was compiled with, by ggml's names; empty if it lists none."""
    reg = lib.ggml_backend_dev_backend_reg(info.handle)
    address = lib.ggml_backend_reg_get_proc_address(reg, b"ggml_backend_get_features")
    if address == ffi.NULL:
        return []
    listed = ffi.cast("struct ggml_backend_feature *(*)(ggml_backend_reg_t)", address)(reg)
    found: list[str] = []
    while listed != ffi.NULL and listed[len(found)].name != ffi.NULL:
        found.append(ffi.string(listed[len(found)].name).decode())
    return found


def open_driver() -> ctypes.CDLL | None:
    """NVIDIA's driver; None if there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def cuda_capability(name: str) -> tuple[int, int] | None:
    """Compute capability of the CUDA device with ggml's name `name` ("CUDA0"), from the driver; None for others."""
    if not name.startswith("CUDA") or not name[4:].isdigit() or (driver := open_driver()) is None:
        return None
    device, value, found = ctypes.c_int(), ctypes.c_int(), []
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), int(name[4:])):
        return None
    for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
            return None
        found.append(value.value)
    return found[0], found[1]


def cuda_driver() -> int | None:
    """The CUDA version supported by the installed driver, in its numbering (12040: 12.4); None without a driver."""
    driver, version = open_driver(), ctypes.c_int()
    return None if driver is None or driver.cuDriverGetVersion(ctypes.byref(version)) else version.value


class Buffers:
    """Reuse of unreferenced host buffers by size: touching fresh pages takes longer than the copy. A thread touches buffers that
    are expected to be taken."""

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = {}
        self._lock = threading.Lock()  # of what follows
        self._to_touch: dict[int, int] = {}  # by size
        self._thread: threading.Thread | None = None

    def take(self, size: int) -> np.ndarray:
        """`size` bytes, uint8. They are reused once neither this array nor a view of it is referenced."""
        free = self._free.setdefault(size, [])
        try:
            memory = free.pop()
        except IndexError:
            memory = np.empty(size, np.uint8)
        # via a memoryview, so that the base of views is this array, not `memory`
        array = np.frombuffer(memory.data, np.uint8)
        weakref.finalize(array, free.append, memory).atexit = False
        return array

    @property
    def free_nbytes(self) -> int:
        """Bytes of the buffers that are free."""
        return sum(size * len(free) for size, free in list(self._free.items()))

    def keep(self, expected: Mapping[int, int], most: int) -> dict[int, int]:
        """Free memory of other buffers, so that `most` bytes hold the expected ones and all that stay free; ends `warm`.

        Args:
            expected: Number of buffers that will be taken, by size.

        Returns:
            As many of them as `most` allows.
        """
        with self._lock:
            self._to_touch = {}
        left, possible = max(most, 0), dict[int, int]()
        for size, n in expected.items():
            possible[size] = min(n, left // size)
            left -= possible[size] * size
        for size, free in list(self._free.items()):
            surplus = max(len(free) - possible.get(size, 0), 0)
            n = min(surplus, left // size)
            left -= n * size
            del free[: surplus - n]
        return possible

    def warm(self, expected: Mapping[int, int], most: int) -> None:
        """As `keep`, and let a thread touch the expected buffers that are not free yet; replaces an earlier call."""
        possible = self.keep(expected, most)
        with self._lock:
            self._to_touch = {size: n - len(self._free.setdefault(size, [])) for size, n in possible.items()}
            if self._thread is None and any(n > 0 for n in self._to_touch.values()):
                self._thread = threading.Thread(target=self._touch, name="dflash-buffers", daemon=True)
                self._thread.start()

    def _touch(self) -> None:
        while True:
            with self._lock:
                size = next((size for size, n in self._to_touch.items() if n > 0), None)
                if size is None:
                    self._thread = None
                    return
            try:
                memory = np.empty(size, np.uint8)
            except MemoryError:  # taking a buffer raises it again
                self.keep({}, 0)
                continue
            memory[:: mmap.PAGESIZE] = 0  # releases the interpreter's lock
            with self._lock:
                if self._to_touch.get(size, 0) > 0:
                    self._to_touch[size] -= 1
                    self._free[size].append(memory)


class Pinned:
    """Pinned host memory for copies from a GPU; none for a device without such a `buffer_type`."""

    def __init__(self, buffer_type, size: int) -> None:
        self.array, self._buffer = np.empty(0, np.uint8), ffi.NULL
        if buffer_type == ffi.NULL:
            return
        buffer = lib.ggml_backend_buft_alloc_buffer(buffer_type, size)
        if buffer != ffi.NULL:
            self._buffer = ffi.gc(buffer, lib.ggml_backend_buffer_free)
            self.array = np.frombuffer(ffi.buffer(lib.ggml_backend_buffer_get_base(buffer), size), np.uint8)

    def close(self) -> None:
        """Free the memory."""
        if self._buffer != ffi.NULL:
            self.array = np.empty(0, np.uint8)
            ffi.release(self._buffer)
            self._buffer = ffi.NULL


class Device:
    """An open ggml backend. `lock` guards it: ggml backends are not re-entrant and cffi releases the GIL."""

    def __init__(
        self,
        info: DeviceInfo,
        n_threads: int | None = None,
        reference: bool = False,
        yielding: bool = False,
        stock: bool = False,
    ) -> None:
        """Open a device.

        Args:
            info: The device.
            n_threads: CPU threads (None: physical cores).
            reference: Use the CPU's plain kernels, whose results do not depend on the width of a batch. Attention of a single
                column over 512 rows or more is still summed per thread: its last bits depend on their number.
                yielding: Use fewer threads while other processes need the cores.
                stock: Compose our operations of ggml's own even if there are kernels (slow, for tests).

        Raises:
            DeviceError: The backend cannot be opened.
            ConfigError: The number of threads is out of range.
        """
        self.info = info
        self._process = os.getpid()
        self.lock = threading.RLock()
        self.n_threads = physical_cores() if n_threads is None else n_threads
        if not 1 <= self.n_threads <= lib.GGML_MAX_N_THREADS:
            raise ConfigError(f"n_threads: {n_threads} is outside 1..{lib.GGML_MAX_N_THREADS}")
        self.reference, self.stock = reference, stock
        self.composed: set[str] = set()  # operations composed so far, for messages (see `stock`)
        self._pool: Pool | None = None
        self._count = ThreadCount(self.n_threads) if yielding and self.n_threads > 1 else None
        self._computed = self._waited = 0.0  # seconds, since the last decision and before it
        self._since = self._ended = 0.0  # start of that period, and end of the last graph
        self._caller = 0  # the computing thread
        self._before_waiting: Callable[[], None] | None = None
        self.backend = lib.ggml_backend_dev_init(info.handle, ffi.NULL)
        if self.backend == ffi.NULL:
            raise DeviceError(f"{info.name}: ggml could not open this device ({info.description})")
        if not info.is_gpu:
            self._pool = Pool(self.backend, self.n_threads)
            lib.ggml_backend_cpu_set_use_ref(self.backend, reference)
        elif reference:
            raise ConfigError(f"reference kernels exist on the CPU only, not on {info.name}")
        self.buffers = Buffers()
        self._pinned = Pinned(lib.ggml_backend_dev_host_buffer_type(info.handle), 2 * _PINNED)
        # all devices that share its graphs, this one included, and its own number; see `join`
        self.sides: list[Device] = [self]
        self.index, self.main = 0, self
        self.host: Device | None = None  # the side that is a CPU with weights in host memory
        self.has_layers = True
        # number of first sides that compute parts of every layer at the same time; see `rank_with`
        self.n_ranks = 1
        self._thread: ThreadPoolExecutor | None = None
        self.homes: dict[int, int] = {}  # buffers of persistent tensors -> side
        # locked host pages (address, bytes) that it reads directly
        self.locked: list[tuple[int, int]] = []
        self._mark = self._free = ffi.NULL

    @classmethod
    def cpu(cls, n_threads: int | None = None, **how: bool) -> Device:
        """The CPU of this machine; `how`: the constructor's other arguments."""
        return cls(next(d for d in list_devices() if not d.is_gpu), n_threads, **how)

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU."""
        return self.info.is_gpu

    @property
    def capability(self) -> tuple[int, int] | None:
        """Compute capability of an NVIDIA GPU, None for other devices."""
        return cuda_capability(self.info.name)

    @property
    def lacks_bf16(self) -> bool:
        """Whether this is an NVIDIA GPU without BF16 tensor cores (before Ampere)."""
        capability = self.capability
        return capability is not None and capability < (8, 0)

    @cached_property
    def has_fp8_matmuls(self) -> bool:
        """Whether it has kernels for matmuls with both operands in E4M3 (`patches/`, mmw-e4m3)."""
        return self.capability == FP8 and "E4M3_MUL_MAT" in backend_features(self.info)

    @property
    def buffer_type(self) -> Any:
        """Buffer type of this device's ordinary tensors."""
        return lib.ggml_backend_dev_buffer_type(self.info.handle)

    @property
    def scratch_type(self) -> Any:
        """Buffer type of the graphs' scratch memory. Ranks compute at the same time, so CPU ranks must not share one."""
        if self.is_gpu or self.main.n_ranks == 1:
            return self.buffer_type
        return lib.dflash_cpu_buffer_type(self.index)

    @property
    def has_pinned_memory(self) -> bool:
        """Whether it distinguishes pinned host memory, which it reads directly, from other host memory."""
        return lib.ggml_backend_dev_host_buffer_type(self.info.handle) != ffi.NULL

    @property
    def host_buffer_type(self) -> Any:
        """Buffer type of host memory that this device copies from: pinned, if it has such."""
        pinned = lib.ggml_backend_dev_host_buffer_type(self.info.handle)
        if pinned != ffi.NULL:
            return pinned
        host = self.main.host
        return self.buffer_type if host is None else host.buffer_type

    def join(self, other: Device, is_host: bool = False, has_layers: bool = True) -> Device:
        """Add another device as a side: graphs are split between the two, and both are closed together.

        Args:
            other: The device.
            is_host: It is the CPU that computes with weights in host memory, and the last side.
            has_layers: Whether it may have layers.

        Returns:
            `other`.
        """
        assert self.host is None, "the host comes last"
        other.has_layers = has_layers and not is_host
        other.main, other.index, other.sides, other.homes = self, len(self.sides), self.sides, self.homes
        other.lock = self.lock
        self.sides.append(other)
        if is_host:
            self.host = other
        return other

    def rank_with(self, other: Device) -> None:
        """Make this device and a joined one ranks, which compute halves of every layer at the same time.

        Raises:
            DeviceError: They cannot write into each other's memory.
        """
        names = f"{self.label} and {other.label}"
        if self.is_gpu:
            if self._kind != "CUDA":
                raise DeviceError(
                    f"{names}: halves of a layer are computed by CUDA devices only; share whole layers (-sm layer)"
                )
            if not lib.ggml_backend_cuda_connect_peers(self.backend, other.backend):
                raise DeviceError(f"{names} cannot reach each other's memory; share whole layers (-sm layer)")
        self.n_ranks = 2

    def begin(self, work: Callable[[], object]) -> Future:
        """Run `work` in this side's own thread."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, f"dflash-{self.label}")
        return self._thread.submit(work)

    @property
    def label(self) -> str:
        """Its name, unique among the sides."""
        alike = [side for side in self.sides[: self.index] if side.info.name == self.info.name]
        return f"{self.info.name}#{len(alike)}" if alike else self.info.name

    def side(self, t: Tensor) -> int | None:
        """The number of the side whose memory holds a tensor; None if it has no memory yet."""
        buffer = (t if t.view_src == ffi.NULL else t.view_src).buffer
        return None if buffer == ffi.NULL else self.homes.get(key(buffer), 0)

    def owner(self, t: Tensor) -> Device:
        """The side whose memory holds a tensor."""
        return self.sides[self.side(t) or 0]

    def holds(self, buffer: Any) -> None:
        """Register a buffer of persistent tensors of this side."""
        self.homes[key(buffer)] = self.index

    @property
    def alignment(self) -> int:
        """Alignment in bytes of tensors in this device's memory."""
        return lib.ggml_backend_buft_get_alignment(self.buffer_type)

    @cached_property
    def has_own_kernels(self) -> bool:
        """Whether its backend has kernels for our operations (CPU and CUDA); others compose them."""
        if self.stock:
            return False
        ctx = lib.ggml_init({"mem_size": 4096, "mem_buffer": ffi.NULL, "no_alloc": True})
        ranges = lib.ggml_new_tensor(ctx, I32, 2, ffi.new("int64_t[]", (1, 2)))
        found = lib.ggml_backend_dev_supports_op(self.info.handle, lib.ggml_range_mask(ctx, ranges, 256))
        lib.ggml_free(ctx)
        return found

    @property
    def view_alignment(self) -> int:
        """Alignment in bytes that a view needs for every kernel; 1 if kernels take addresses. ggml-vulkan binds memory at such
        offsets, and its ROPE ignores the remainder for positions."""
        return 1 if self.info.name.startswith(("CPU", "CUDA", "ROCm")) else max(self.alignment, 64)

    def matmul_buffer_types(self) -> list[Any]:
        """Buffer types that hold weights in a layout made for this device's matmuls, best first."""
        if self.is_gpu or self.reference:
            return []
        reg = lib.ggml_backend_dev_backend_reg(self.info.handle)
        address = lib.ggml_backend_reg_get_proc_address(reg, b"ggml_backend_dev_get_extra_bufts")
        if address == ffi.NULL:
            return []
        listed = ffi.cast("ggml_backend_buffer_type_t *(*)(ggml_backend_dev_t)", address)(self.info.handle)
        found: list[Any] = []
        while listed != ffi.NULL and listed[len(found)] != ffi.NULL:
            found.append(listed[len(found)])
        return found

    def before_waiting(self, work: Callable[[], None]) -> None:
        """Schedule `work` for the next wait for graphs, replacing a previously scheduled one."""
        self._before_waiting = work

    def _waits(self) -> None:
        if (work := self._before_waiting) is not None:
            self._before_waiting = None
            work()

    def read(self, t: Tensor, count: int | None = None, offset: int = 0) -> np.ndarray:
        """Copy `count` elements (all by default) of tensor `t` from byte `offset` on, after all earlier graphs."""
        dtype = NUMPY_TYPES[t.type]
        out = np.empty(lib.ggml_nelements(t) if count is None else count, dtype)
        return self.read_bytes(t, out.view(np.uint8), offset).view(dtype)

    def read_bytes(self, t: Tensor, out: np.ndarray, offset: int = 0) -> np.ndarray:
        """Fill `out`, uint8, with bytes of tensor `t` from byte `offset` on, after all earlier graphs."""
        self.read_pieces([([(t, offset, out.nbytes)], out)])
        return out

    def read_pieces(self, reads: Iterable[tuple[Sequence[tuple[Tensor, int, int]], np.ndarray]]) -> None:
        """Fill arrays, uint8, each with concatenated pieces of tensors (tensor, first byte, bytes), after all earlier graphs.

        Pinned memory has two halves: the host copies one to its array while the device fills the other.
        """
        self.main._waits()
        halves = cycle((slice(0, _PINNED), slice(_PINNED, 2 * _PINNED)))
        with self.lock:
            landed: tuple[np.ndarray, np.ndarray] | None = None
            for pieces, out in reads:
                if not out.nbytes:
                    continue
                owners = [self if len(self.sides) == 1 else self.owner(t) for t, _, _ in pieces]
                pinned, at = owners[0]._pinned.array[next(halves)][: out.nbytes], 0
                landing = pinned if len(pinned) == out.nbytes else out
                for owner, (t, offset, size) in zip(owners, pieces):
                    target = ffi.from_buffer(landing[at : at + size], require_writable=True)
                    lib.ggml_backend_tensor_get_async(owner.backend, t, target, offset, size)
                    at += size
                if landed is not None:
                    landed[0][:] = landed[1]
                for owner in dict.fromkeys(owners):
                    lib.ggml_backend_synchronize(owner.backend)
                landed = None if landing is out else (out, landing)
            if landed is not None:
                landed[0][:] = landed[1]

    def write(self, t: Tensor, array: np.ndarray, offset: int = 0) -> None:
        """Copy a contiguous array into tensor `t` from byte `offset` on, after all earlier graphs."""
        if array.nbytes:
            with self.lock:
                backend = self.owner(t).backend
                lib.ggml_backend_tensor_set_async(backend, t, ffi.from_buffer(array), offset, array.nbytes)
                lib.ggml_backend_synchronize(backend)

    def use_narrow_matmuls(
        self, on: bool, type_: int = lib.GGML_TYPE_COUNT, min_width: int = 1, max_width: int = NARROW_COLUMNS
    ) -> None:
        """Choose between our kernels for narrow matmuls (the default) and ggml's own; no effect on devices other than CUDA.
        CUDA graphs are captured again, so do not call it during generation.

        Args:
            on: Use ours.
            type_: ggml type of the weights (GGML_TYPE_COUNT: all).

        Raises:
            ValueError: Widths are outside 1..64.
        """
        if not 1 <= min_width <= max_width <= NARROW_COLUMNS:
            raise ValueError(f"widths {min_width}..{max_width} are outside 1..{NARROW_COLUMNS}")
        for side in self.sides:
            if side.info.name.startswith("CUDA"):
                with self.lock:
                    lib.ggml_backend_cuda_set_narrow_mul_mat(side.backend, type_, min_width, max_width, on)

    def use_wide_matmuls(self, on: bool, type_: int = lib.GGML_TYPE_COUNT) -> None:
        """Choose our kernels for matmuls of more than 64 columns (the default), or ggml's own; see `use_narrow_matmuls`."""
        for side in self.sides:
            if side.info.name.startswith("CUDA"):
                with self.lock:
                    lib.ggml_backend_cuda_set_wide_mul_mat(side.backend, type_, on)

    def run(self, cgraph: Any) -> None:
        """Launch a placed graph as `compute` does.

        Raises:
            DeviceError: The backend fails.
        """
        status = self.compute(cgraph)
        if status != lib.GGML_STATUS_SUCCESS:
            raise DeviceError(f"{self.info.name}: graph ended with status {status}")

    def compute(self, cgraph: Any) -> int:
        """Launch a placed graph; a GPU may still be running it on return.

        Returns:
            ggml's status.

        Raises:
            DeviceError: This process was forked after the GPU was opened, and so cannot use it.
        """
        if self._pool is not None:
            self._pool.in_this_process()
        elif self._process != os.getpid():
            raise DeviceError(
                f"{self.info.name}: opened before this process was forked; load the model in the child, or start it by spawn"
            )
        if self._count is None or self._pool is None:
            return lib.ggml_backend_graph_compute_async(self.backend, cgraph)
        began = time.perf_counter()
        if began - self._ended > IDLE or self._caller != threading.get_native_id():
            self._computed, self._since, self._waited = 0.0, began, self._pool.waited()
            self._caller = threading.get_native_id()
        status = lib.ggml_backend_graph_compute_async(self.backend, cgraph)
        self._ended = time.perf_counter()
        self._computed += self._ended - began
        if self._computed >= WINDOW:
            so_far, before = self._pool.waited(), self._pool.n_threads
            # a GPU's parts in between count too, since CPU threads poll meanwhile
            self._pool.resize(self._count.judge(self._ended - self._since, so_far - self._waited))
            same = self._pool.n_threads == before
            self._computed, self._since = 0.0, time.perf_counter()
            self._waited = so_far if same else self._pool.waited()  # of the current threads
        return status

    @property
    def threads_now(self) -> int:
        """CPU threads of the next graph: fewer than `n_threads` while other processes need the cores."""
        if self.host is not None:
            return self.host.threads_now
        return self._pool.n_threads if self._pool else self.n_threads

    def synchronize(self) -> None:
        """Wait for all graphs, on all sides."""
        for side in self.sides:
            side.finish()

    def finish(self) -> None:
        """Wait for this side alone."""
        self._waits()
        lib.ggml_backend_synchronize(self.backend)

    def wait_before_free(self) -> None:
        """Wait for graphs that may still use memory about to be freed. CUDA's free waits by itself, others do not."""
        for side in self.sides:
            if side.is_gpu and side.view_alignment > 1 and side.backend != ffi.NULL:
                lib.ggml_backend_synchronize(side.backend)

    def can_mark(self) -> bool:
        """Whether marks can be waited for without later work: on a GPU whose memory only this device writes."""
        if self._mark == ffi.NULL and self.is_gpu:
            self._mark = lib.ggml_backend_event_new(self.info.handle)
        return self._mark != ffi.NULL

    def mark(self) -> None:
        """Record a mark after all work so far."""
        lib.ggml_backend_event_record(self._mark, self.backend)

    def wait_for_mark(self) -> None:
        """Wait for all work before the last mark."""
        lib.ggml_backend_event_synchronize(self._mark)

    def copy(self, source: Tensor, other: Device, twin: Tensor) -> None:
        """Copy `source` on this side to `twin` on another, ordered with the work of both.

        Two GPUs of one CUDA or HIP backend order the copy themselves; for all others this waits."""
        if self.is_gpu and self._kind in ("CUDA", "ROCm") and self._kind == other._kind:
            # ggml makes `other` wait for the copy; the copy must also wait for readers of the memory of `twin`
            if other._free == ffi.NULL:
                other._free = lib.ggml_backend_event_new(other.info.handle)
            lib.ggml_backend_event_record(other._free, other.backend)
            lib.ggml_backend_event_wait(self.backend, other._free)
        else:
            self.finish()
            other.finish()
        lib.ggml_backend_tensor_copy_async(self.backend, other.backend, source, twin)

    @property
    def _kind(self) -> str:
        """Its backend's name."""
        return self.info.name.rstrip("0123456789")

    def close(self) -> None:
        """Free the backend and those of its other sides. Close every store, graph and workspace on it first."""
        others, self.sides, self.host = self.sides[1:] if self.main is self else [], [self], None
        for other in others:
            other.close()
        if self._thread is not None:
            self._thread.shutdown()
        self.buffers.keep({}, 0)
        self._pinned.close()
        for event in (self._mark, self._free):
            if event != ffi.NULL:
                lib.ggml_backend_event_free(event)
        self._mark = self._free = ffi.NULL
        if self.backend != ffi.NULL:
            lib.ggml_backend_free(self.backend)
            self.backend = ffi.NULL
            if self._pool is not None:
                self._pool.close()
