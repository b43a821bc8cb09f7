"""What every benchmark here says about itself, and where results go."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dflash_ggml.bench.facts import header

__all__ = ["ROOT", "header", "save"]

ROOT = Path(__file__).resolve().parents[1]


def save(path: str | None, result: dict) -> None:
    """Write a result as JSON when a path is given."""
    if path:
        Path(path).write_text(json.dumps(result, indent=1) + "\n")
        print(f"written to {path}", file=sys.stderr)
