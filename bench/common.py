"""What every benchmark here says about itself, and where results go."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import get_args

from dflash_ggml.bench.facts import header
from dflash_ggml.config import CacheType

__all__ = ["ROOT", "add_cache_types", "cache_types", "header", "save"]

ROOT = Path(__file__).resolve().parents[1]


def add_cache_types(parser: argparse.ArgumentParser) -> None:
    """Options for the types of the K/V caches."""
    for short, what in (("-ctk", "k"), ("-ctv", "v")):
        parser.add_argument(short, f"--cache-type-{what}", choices=get_args(CacheType), default="auto")


def cache_types(args: argparse.Namespace) -> dict[str, CacheType]:
    """What they say, as fields of EngineConfig."""
    return {"type_k": args.cache_type_k, "type_v": args.cache_type_v}


def save(path: str | None, result: dict) -> None:
    """Write a result as JSON when a path is given."""
    if path:
        Path(path).write_text(json.dumps(result, indent=1) + "\n")
        print(f"written to {path}", file=sys.stderr)
