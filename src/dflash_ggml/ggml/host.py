"""Free memory of the host, as the system reports it."""

from __future__ import annotations

import os
from pathlib import Path

_GROUP = Path("/sys/fs/cgroup")  # memory limit of a container


def free_memory() -> int:
    """Available bytes, as estimated by the system, within the limit of this process's control group."""
    return min(_available(), _left_to_group())


def _available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    # macOS reports total memory, and little of it as free: assume half is available
    free = "SC_AVPHYS_PAGES" in os.sysconf_names
    pages = os.sysconf("SC_AVPHYS_PAGES") if free else os.sysconf("SC_PHYS_PAGES") // 2
    return pages * os.sysconf("SC_PAGE_SIZE")


def _left_to_group() -> int:
    """Bytes left by a control group's limit; its file cache counts as free, since it can be evicted."""
    try:
        limit, taken, stat = ((_GROUP / f"memory.{name}").read_text() for name in ("max", "current", "stat"))
        cached = sum(int(line.split()[1]) for line in stat.splitlines() if line.split()[0] == "file")
        return max(int(limit) - int(taken) + cached, 0)
    except (OSError, ValueError):  # no such file, or no limit: "max"
        return 1 << 62
