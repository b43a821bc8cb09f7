"""Shared parts of the benchmarks: the header of a result, model options, where results are written."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, get_args

from dflash_ggml.bench.facts import header
from dflash_ggml.cli.arguments import memory_size
from dflash_ggml.config import CacheType, SplitMode

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from reference.engine_kit import Solo  # noqa: E402

__all__ = [
    "ROOT",
    "Solo",
    "add_cache_types",
    "add_memory_options",
    "cache_types",
    "header",
    "memory_options",
    "save",
]


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Options for where and how an engine runs, and for a file of results."""
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("-ngl", "--gpu-layers", type=int, default=-1)
    parser.add_argument("--json", metavar="FILE")
    add_cache_types(parser)
    add_memory_options(parser)


def add_memory_options(parser: argparse.ArgumentParser) -> None:
    """Options for what may be taken of the GPU, what the host keeps instead, and several devices."""
    parser.add_argument("--gpu-memory", type=memory_size, metavar="SIZE")
    parser.add_argument("-ncmoe", "--n-cpu-moe", type=int, metavar="N")
    parser.add_argument("-dev", "--device", type=lambda names: tuple(names.split(",")), metavar="NAME,...")
    parser.add_argument("-sm", "--split-mode", choices=get_args(SplitMode))
    parser.add_argument("-devd", "--device-draft", metavar="NAME", dest="draft_device")


def memory_options(args: argparse.Namespace) -> dict[str, Any]:
    """What they say, as fields of EngineConfig."""
    return {
        name: getattr(args, name)
        for name in ("gpu_memory", "n_cpu_moe", "device", "split_mode", "draft_device")
    }


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
