"""Page-locking of a file's mapping, so that a CUDA device copies from it, or its kernels read it, directly.

CUDA allocates pinned memory at 2 GB/s; pages already in the page cache are locked at 50 GB/s and need no second copy
(bench/notes-moe.md). ggml registers memory only with an environment variable; here the driver is called directly.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable
from typing import Any

from .device import open_driver

_PORTABLE, _MAPPED, _READ_ONLY = 0x01, 0x02, 0x08  # CU_MEMHOSTREGISTER_*
_READ_ONLY_SUPPORTED = 113  # CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED
_SAME_ADDRESS = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM

_FUNCTIONS = (
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemHostGetDevicePointer_v2",
)


def kernels_read_host(name: str) -> bool:
    """Whether kernels of the CUDA device with ggml's name `name` read locked host memory at the address that it has there."""
    device, value = ctypes.c_int(), ctypes.c_int()
    if not name.startswith("CUDA") or not name[4:].isdigit() or (driver := open_driver()) is None:
        return False
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), int(name[4:])):
        return False
    return not driver.cuDeviceGetAttribute(ctypes.byref(value), _SAME_ADDRESS, device) and bool(value.value)


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

    Args:
        name: The device.
        ranges: Addresses and bytes.
        mapped: Kernels read them too, at the same addresses.
    """

    def __init__(self, name: str, ranges: Iterable[tuple[int, int]], mapped: bool = False) -> None:
        self._driver: ctypes.CDLL | None = None
        self._device, self.held = ctypes.c_int(), []  # address, bytes
        ranges = list(ranges)
        self.locked = (
            name.startswith("CUDA") and name[4:].isdigit() and self._open(int(name[4:]), bool(ranges))
        )
        flags = _PORTABLE | _READ_ONLY | (_MAPPED if mapped else 0)
        for address, size in spans(ranges) if self.locked else ():
            if self._call("cuMemHostRegister_v2", address, ctypes.c_size_t(size), ctypes.c_uint(flags)):
                self.close()
                return
            self.held.append((address, size))
            if mapped and not self.is_mapped(address):
                self.close()
                return

    def _open(self, ordinal: int, locks: bool) -> bool:
        """Retain the primary context, which CUDA's runtime uses.

        Args:
            locks: Pages of a file will be locked, which not every device allows.
        """
        driver = open_driver()
        if driver is None or not all(hasattr(driver, function) for function in _FUNCTIONS):
            return False
        supported = ctypes.c_int()
        if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(self._device), ordinal):
            return False
        if driver.cuDeviceGetAttribute(ctypes.byref(supported), _READ_ONLY_SUPPORTED, self._device):
            return False
        self._context = ctypes.c_void_p()
        if (locks and not supported.value) or driver.cuDevicePrimaryCtxRetain(
            ctypes.byref(self._context), self._device
        ):
            return False
        self._driver = driver
        return True

    def is_mapped(self, address: int) -> bool:
        """Whether kernels read the host memory at this address; False for unlocked memory."""
        there = ctypes.c_uint64()
        call = ctypes.byref(there), ctypes.c_void_p(address), ctypes.c_uint(0)
        return not self._call("cuMemHostGetDevicePointer_v2", *call) and there.value == address

    def _call(self, function: str, first: Any, *more: Any) -> int:
        """Call the driver with the device's context current; 0 is success.

        Args:
            first: An address, or an argument as it is.
        """
        assert self._driver is not None
        if failed := self._driver.cuCtxPushCurrent_v2(self._context):
            return failed
        first = ctypes.c_void_p(first) if isinstance(first, int) else first
        answer = getattr(self._driver, function)(first, *more)
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
