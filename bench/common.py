"""What every benchmark says about itself: commit, machine, build; and where results go."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = ROOT / "bench" / "prompts" / "python.jsonl"


def prompts(limit: int | None = None) -> list[dict]:
    """Prompts as dicts with id, category, prompt."""
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()][:limit]


def commit() -> str:
    """The checkout's commit, with "+" when files differ from it; "unknown" outside a checkout."""
    try:
        git = ["git", "-C", str(ROOT)]
        head = subprocess.run(
            [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
        )
        dirty = subprocess.run(
            [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def cpu_name() -> str:
    """Model name of the CPU."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()


def header(**more) -> dict:
    """Facts for a result file."""
    return {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "cpu": cpu_name(),
        "python": platform.python_version(),
        "command": " ".join(sys.argv),
        **more,
    }


def save(path: str | None, result: dict) -> None:
    """Write a result as JSON when a path is given."""
    if path:
        Path(path).write_text(json.dumps(result, indent=1) + "\n")
        print(f"written to {path}", file=sys.stderr)


def repeats(tokens: list[int], period: int = 32, share: float = 0.5) -> bool:
    """Whether at least `share` of the tokens repeat the text some 1..`period` tokens before: a loop flatters acceptance."""
    n = len(tokens)
    return any(
        sum(tokens[i] == tokens[i - p] for i in range(p, n)) >= share * n
        for p in range(1, min(period, n - 1) + 1)
    )
