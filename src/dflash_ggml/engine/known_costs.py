"""Initial costs of an engine: from the user's cache, or measured now."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

from ..config import EngineConfig
from ..drafts.drafter import Drafter
from ..files.complete import complete
from ..ggml import bindings
from ..ggml.device import cuda_driver
from ..policy.costs import Pass, Point
from .calibrate import LONG, calibrate, warm_up
from .kernel_tuning import MatmulTable, apply, measure_matmuls, worth_measuring
from .passes import TargetPasses

FORMAT = 2  # of the file, and of how its figures are measured
SECONDS = {True: 1.5, False: 1.0}  # time limit for measuring, on a GPU and on the CPU
WARM_SECONDS = 0.25  # to build graphs in, where costs are known
log = logging.getLogger("dflash_ggml")


def default_folder() -> Path:
    """Where costs are kept for this user; where nothing can be, without a home folder."""
    try:
        home = Path.home()
    except RuntimeError:
        home = Path(os.devnull)
    return home / ".cache" / "dflash-ggml" / "costs"


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of an engine's passes.

    Attributes:
        points: Pass times; empty if no decision needs them.
        matmuls: Which kernels run narrow matmuls.
    """

    points: tuple[Point, ...]
    matmuls: MatmulTable


@dataclass(frozen=True, slots=True)
class CostCache:
    """The cost file of one configuration (`facts`: everything that pass times depend on)."""

    path: Path
    facts: dict[str, Any]

    @classmethod
    def of(cls, facts: dict[str, Any], folder: Path | None = None) -> CostCache:
        """The cache file of a set of facts, in `folder` or the user's own.

        Args:
            facts: Plain data, among them device, driver, threads, tensor types and shapes, version.
            folder: Where files are kept (None: `default_folder`).
        """
        text = json.dumps({"format": FORMAT, **facts}, sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:24] + ".json"
        return cls((folder or default_folder()) / name, facts)

    def read(self) -> Measured | None:
        """Earlier measurements; None if there is no readable file."""
        try:
            kept = json.loads(self.path.read_text(encoding="utf-8"))
            points = tuple(_point(entry) for entry in kept["points"])
            return Measured(points, MatmulTable.from_json(kept["products"]))
        except (OSError, ArithmeticError, RuntimeError, ValueError, KeyError, TypeError):
            return None

    def write(self, measured: Measured) -> bool:
        """Save the measurements; False if that fails, which only means measuring again at the next start."""
        short = {key: value for key, value in self.facts.items() if isinstance(value, (str, int))}
        kept = {"facts": short, "points": measured.points, "products": measured.matmuls.to_json()}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with complete(self.path) as part:  # two starts at a time may not mix their lines
                part.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        except OSError:
            return False
        return True


def _point(entry: Any) -> Point:
    kind, width, context, ms = entry
    if kind not in get_args(Pass) or not (0 < float(ms) < 1e6):
        raise ValueError(f"no measurement: {entry}")
    return Point(kind, int(width), int(context), float(ms))


def known_costs(
    config: EngineConfig,
    passes: TargetPasses,
    drafter: Drafter | None,
    tensors: object,
    seconds: float | None = None,
) -> tuple[tuple[Point, ...], Path | None]:
    """Pass costs, and the file that caches them (None if they are not cached).

    On a GPU that our kernels were not tuned on, the choice of kernels is measured and applied too. Only what a decision
    needs is measured.

    Args:
        tensors: Types and shapes of both models, as plain data.
        seconds: To measure in.
    """
    device = passes.device
    decides = config.mode == "auto" or worth_measuring(device)
    if not decides or config.calibrate == "never" or config.reproducible:
        return (), None
    cache = CostCache.of(_facts(config, passes, tensors))
    measured = cache.read() if config.calibrate == "cached" else None
    if measured is not None:
        log.debug("pass costs read from %s", cache.path)
        if measured.matmuls.timings:
            apply(device, measured.matmuls)
        if config.mode == "auto":
            warm_up(passes, drafter, time.perf_counter() + WARM_SECONDS)
        return measured.points, cache.path
    began = time.perf_counter()
    measured = _measure(config, passes, drafter, seconds or SECONDS[device.is_gpu])
    # measurements disturbed by other processes are used but not cached
    good = device.threads_now == device.n_threads and (measured.points or config.mode != "auto")
    kept = good and cache.write(measured)
    where = f"kept in {cache.path}" if kept else "not kept"
    log.debug("pass costs measured in %.2f s, %s", time.perf_counter() - began, where)
    return measured.points, cache.path if kept else None


def _measure(config: EngineConfig, passes: TargetPasses, drafter: Drafter | None, seconds: float) -> Measured:
    device, matmuls = passes.device, MatmulTable(())
    deadline = time.perf_counter() + seconds
    if worth_measuring(device):
        there = passes.weights.read_there  # through PCIe, and never multiplied
        own = [t for name, t in passes.weights.items() if device.owner(t) is device and name not in there]
        matmuls = measure_matmuls(device, own, seconds / 3)
        apply(device, matmuls)
    points = calibrate(passes, drafter, deadline) if config.mode == "auto" else []
    return Measured(tuple(points), matmuls)


def _facts(config: EngineConfig, passes: TargetPasses, tensors: object) -> dict[str, Any]:
    """Everything that pass times on this machine depend on, and what is measured."""
    device = passes.device
    folder = Path(str(bindings.__file__)).parent
    return {
        "device": device.info.description,
        "driver": cuda_driver() if device.is_gpu else None,
        "n_threads": device.n_threads,
        "kept": passes.weights.host_bytes,
        "version": version("dflash-ggml"),
        # a build with other flags has other kernels
        "build": sorted((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in folder.glob("*.so")),
        "kv_types": [str(passes.state.kv.type), config.draft_type_k, config.draft_type_v],
        "auto": config.mode == "auto",
        "reference": config.reference,
        "budget": config.budget,
        "fa_window": config.fa_window,
        "candidates": config.n_candidates,
        "rows": min(passes.n_rows, LONG),
        "tensors": tensors,
        **({"sides": passes.placement.facts(device)} if len(device.sides) > 1 else {}),
    }
