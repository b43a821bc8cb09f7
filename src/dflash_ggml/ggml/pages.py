"""Page-locking of a file's mapping, so that a CUDA device reads it directly.

CUDA allocates pinned memory at 2 GB/s; pages already in the page cache are locked at 50 GB/s and need no second copy
(bench/notes-moe.md). ggml registers memory only with an environment variable; here the driver is called directly.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable

from .device import open_driver

_PORTABLE, _READ_ONLY = 0x01, 0x08  # CU_MEMHOSTREGISTER_*
_READ_ONLY_SUPPORTED = 113  # CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED

_FUNCTIONS = (
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
)


def spans(ranges: Iterable[tuple[int, int]], page: int = mmap.PAGESIZE) -> list[tuple[int, int]]:
    """Whole pages (address, bytes) that cover the ranges (address, bytes), merged where adjacent."""
    found: list[tuple[int, int]] = []
    for address, size in sorted(ranges):
        first, end = address // page * page, -(-(address + size) // page) * page
        if found and first <= sum(found[-1]):
            begin = found[-1][0]
            found[-1] = begin, max(end, sum(found[-1])) - begin
        else:
            found.append((first, end - first))
    return found


def pieces(address: int, size: int, locked: Iterable[tuple[int, int]]) -> list[int]:
    """End offsets of the copies that transfer `size` bytes from `address` to a device: CUDA refuses a copy that is only partly in
    locked pages (address, bytes), and neighbours of a tensor in a file share a page with it."""
    edges = {edge - address for first, length in locked for edge in (first, first + length)}
    return [*sorted(edge for edge in edges if 0 < edge < size), size]


class LockedPages:
    """Page-locked memory for the device with ggml's name `name` ("CUDA0"), until `close`.

    `locked` is False if that is not possible: another kind of device, an old driver, a file system without support.
    """

    def __init__(self, name: str, ranges: Iterable[tuple[int, int]]) -> None:
        self._driver: ctypes.CDLL | None = None
        self._device, self.held = ctypes.c_int(), []  # address, bytes
        self.locked = name.startswith("CUDA") and name[4:].isdigit() and self._open(int(name[4:]))
        for address, size in spans(ranges) if self.locked else ():
            if self._call("cuMemHostRegister_v2", address, size, _PORTABLE | _READ_ONLY):
                self.close()
                return
            self.held.append((address, size))

    def _open(self, ordinal: int) -> bool:
        """Retain the primary context, which CUDA's runtime uses."""
        driver = open_driver()
        if driver is None or not all(hasattr(driver, function) for function in _FUNCTIONS):
            return False
        supported = ctypes.c_int()
        if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(self._device), ordinal):
            return False
        if driver.cuDeviceGetAttribute(ctypes.byref(supported), _READ_ONLY_SUPPORTED, self._device):
            return False
        self._context = ctypes.c_void_p()
        if not supported.value or driver.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), self._device):
            return False
        self._driver = driver
        return True

    def _call(self, function: str, address: int, *more: int) -> int:
        """Call the driver with the device's context current; 0 is success."""
        assert self._driver is not None
        if failed := self._driver.cuCtxPushCurrent_v2(self._context):
            return failed
        numbers = [ctypes.c_size_t(more[0]), ctypes.c_uint(more[1])] if more else []
        answer = getattr(self._driver, function)(ctypes.c_void_p(address), *numbers)
        self._driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        return answer

    def __del__(self) -> None:
        # unlock what a failed load drops unclosed; at exit the process's end unlocks the rest
        if not sys.is_finalizing():
            self.close()

    def close(self) -> None:
        """Unlock the pages; no copy may be in progress."""
        if self._driver is None:
            return
        for address, _ in self.held:
            self._call("cuMemHostUnregister", address)
        self.held.clear()
        self._driver.cuDevicePrimaryCtxRelease_v2(self._device)
        self._driver, self.locked = None, False
