"""Facts in every result: version, commit, machine."""

from __future__ import annotations

import importlib.metadata as distributions
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
GPU_FIELDS = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,memory.total"


def _output(*command: str) -> str | None:
    """Standard output of a command, None when it cannot be run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commit() -> str:
    """The checkout's commit, with "+" when files differ from it; "unknown" for a package outside its checkout."""
    git = ("git", "-C", str(PACKAGE))
    top = _output(*git, "rev-parse", "--show-toplevel")
    # a package inside another checkout, such as in its virtual environment, is not of that commit
    if top is None or Path(top, "src", "dflash_ggml").resolve() != PACKAGE:
        return "unknown"
    head = _output(*git, "rev-parse", "--short=12", "HEAD")
    dirty = _output(*git, "status", "--porcelain", "-uno")
    return "unknown" if head is None else head + ("+" if dirty else "")


def version() -> str:
    """The package's version."""
    return distributions.version("dflash-ggml")


def cpu_name() -> str:
    """Model name of the CPU."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()


def gpu_facts() -> dict[str, str]:
    """Name, driver, clocks and power limit of the first GPU, from nvidia-smi; empty without one."""
    line = _output("nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader")
    return dict(zip(GPU_FIELDS.split(","), line.splitlines()[0].split(", "))) if line else {}


def load_average() -> float:
    """Mean number of busy processes over the last minute."""
    return round(os.getloadavg()[0], 2)


def header(secrets: Sequence[str] = (), **more: object) -> dict[str, object]:
    """Facts for a result file; folders (which identify the user) and secrets are removed from its command."""
    words = [Path(sys.argv[0]).name, *sys.argv[1:]]
    for secret in secrets:
        renamed = {
            secret: "...",
            **{w: w.removesuffix(secret) + "..." for w in words if w.endswith(f"={secret}")},
        }
        words = [renamed.get(word, word) for word in words]
    words = [re.sub(r"(^|=)/(?:.*/)?(?=[^/])", r"\1", word) for word in words]
    return {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "version": version(),
        "commit": commit(),
        "cpu": cpu_name(),
        "cpus": os.cpu_count(),
        "load": load_average(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "command": shlex.join(words),
        **more,
    }
