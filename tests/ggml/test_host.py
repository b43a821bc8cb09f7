"""Tests of host memory and core counts where the system reports less, as macOS does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dflash_ggml.ggml import device, host


def test_a_system_that_reports_total_but_not_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}

    def read(path: Path, *_: object, **__: object) -> str:
        raise FileNotFoundError(path)

    def sysconf(name: str) -> int:
        if name not in sizes:
            raise ValueError("unrecognized configuration name")
        return sizes[name]

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(os, "sysconf", sysconf)
    monkeypatch.setattr(os, "sysconf_names", dict.fromkeys(sizes, 0))
    assert host.free_memory() == 500 * 4096


def test_a_system_without_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert device.usable_cpus() == os.cpu_count() and 1 <= device.physical_cores() <= device.usable_cpus()
