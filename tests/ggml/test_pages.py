"""Tests of page-locked memory: the locked ranges, and that the driver's state is restored. No driver is needed."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from dflash_ggml.ggml import pages
from dflash_ggml.ggml.pages import LockedPages, kernels_read_host, pieces, spans


class Driver:
    """A fake libcuda that records locked pages. refuses: addresses that it does not lock."""

    def __init__(self, supported: int = 1, refuses: tuple[int, ...] = ()) -> None:
        self.supported, self.refuses = supported, refuses
        self.held: dict[int, int] = {}
        self.shift = 0  # of locked memory on the device
        self.flags = 9
        self.contexts = self.current = 0

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        return 0 if ordinal == 0 else 101

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:
        value._obj.value = self.supported
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        self.contexts += 1
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, device: Any) -> int:
        self.contexts -= 1
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        self.current += 1
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        self.current -= 1
        return 0

    def cuMemHostRegister_v2(self, address: Any, size: Any, flags: Any) -> int:
        assert self.current == 1 and flags.value == self.flags
        if address.value in self.refuses:
            return 801
        self.held[address.value] = size.value
        return 0

    def cuMemHostGetDevicePointer_v2(self, there: Any, address: Any, flags: Any) -> int:
        assert self.current == 1 and flags.value == 0
        there._obj.value = address.value + self.shift
        return 0 if any(at <= address.value < at + size for at, size in self.held.items()) else 1

    def cuMemHostUnregister(self, address: Any) -> int:
        assert self.current == 1
        del self.held[address.value]
        return 0


@pytest.mark.parametrize(
    "ranges, found",
    [
        ([], []),
        ([(4096, 4096)], [(4096, 4096)]),
        ([(4100, 1)], [(4096, 4096)]),
        ([(8191, 2)], [(4096, 8192)]),
        ([(20000, 10), (4096, 100), (5000, 100)], [(4096, 4096), (16384, 4096)]),
        ([(4096, 4096), (8192, 1)], [(4096, 8192)]),
        ([(4096, 40000), (8192, 1)], [(4096, 40960)]),
    ],
)
def test_spans_are_whole_pages_and_never_overlap(ranges, found) -> None:
    assert spans(ranges, 4096) == found


@pytest.mark.parametrize(
    "address, size, found",
    [
        (100, 50, [50]),
        (4000, 96, [96]),
        (4000, 97, [96, 97]),
        (4096, 8192, [8192]),
        (5000, 1000, [1000]),
        (4000, 9000, [96, 8288, 9000]),
        (12287, 2, [1, 2]),
        (12288, 8192, [8192]),
        (0, 40960, [4096, 12288, 20480, 24576, 40960]),
    ],
)
def test_a_copy_is_cut_where_locked_pages_begin_and_end(address: int, size: int, found: list[int]) -> None:
    assert pieces(address, size, [(4096, 8192), (20480, 4096)]) == found
    assert pieces(address, size, []) == [size]


def test_what_is_locked_is_unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    locked = LockedPages("CUDA0", [(1 << 20, 5000), (1 << 24, 10)])
    assert (
        locked.locked
        and dict(locked.held) == driver.held
        and len(driver.held) == 2
        and driver.contexts == 1
        and driver.current == 0
    )
    locked.close()
    assert not locked.locked and not locked.held and not driver.held and driver.contexts == 0
    locked.close()


@pytest.mark.parametrize("shift", [0, 4096])
def test_kernels_read_where_the_host_does(monkeypatch: pytest.MonkeyPatch, shift: int) -> None:
    """Memory that has another address on the device is given back."""
    driver = Driver()
    driver.flags, driver.shift = 11, shift
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    locked = LockedPages("CUDA0", [(1 << 20, 5000), (1 << 24, 10)], mapped=True)
    assert locked.locked == (shift == 0) and len(driver.held) == (0 if shift else 2)
    if not shift:
        assert locked.is_mapped((1 << 20) + 5) and not locked.is_mapped(5)
    locked.close()
    assert not driver.held and driver.contexts == driver.current == 0


def test_what_others_locked_is_found_without_locking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no file's pages can be locked."""
    driver = Driver(supported=0)
    driver.held = {1 << 20: 4096}
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    found = LockedPages("CUDA0", ())
    assert found.locked and found.is_mapped(1 << 20) and not found.is_mapped(1 << 21)
    found.close()
    assert driver.held and driver.contexts == 0


@pytest.mark.parametrize(
    "name, supported, reads",
    [("CUDA0", 1, True), ("CUDA0", 0, False), ("CUDA1", 1, False), ("ROCm0", 1, False), ("CPU", 1, False)],
)
def test_devices_whose_kernels_read_host_memory(
    monkeypatch: pytest.MonkeyPatch, name: str, supported: int, reads: bool
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda library: Driver(supported))
    assert kernels_read_host(name) == reads


def test_what_is_dropped_unclosed_is_unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    locked = LockedPages("CUDA0", [(1 << 20, 5000)])
    assert driver.held
    del locked
    assert not driver.held and driver.contexts == 0


class Old(Driver):
    """One that lacks a function."""

    @property
    def cuMemHostRegister_v2(self) -> Any:  # type: ignore[override]
        raise AttributeError


@pytest.mark.parametrize(
    "name, driver",
    [
        ("CUDA0", Driver(supported=0)),
        ("CUDA0", Driver(refuses=(1 << 24,))),
        ("CUDA1", Driver()),
        ("CPU", Driver()),
        ("ROCm0", Driver()),
        ("CUDA0", Old()),
        ("CUDA0", None),
    ],
    ids=["not supported", "refused", "no such device", "a CPU", "another kind", "old", "no driver"],
)
def test_what_cannot_be_locked_leaves_nothing_behind(monkeypatch, name: str, driver: Driver | None) -> None:
    def load(library: str) -> Driver:
        if driver is None:
            raise OSError(library)
        return driver

    monkeypatch.setattr(pages.ctypes, "CDLL", load)
    locked = LockedPages(name, [(1 << 20, 5000), (1 << 24, 10)])
    assert not locked.locked
    locked.close()
    assert driver is None or (not driver.held and driver.contexts == driver.current == 0)
