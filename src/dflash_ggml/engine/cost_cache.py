"""Calibrated costs on disk, so that a pair is measured once per machine: a small JSON file per device, files and build."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from ..policy.costs import Pass, Point
from .kernel_tuning import MatmulTable

FORMAT = 2  # of the file, and of how its figures are measured


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
            handle, name = tempfile.mkstemp(dir=self.path.parent)
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(json.dumps(kept, indent=1) + "\n")
                os.replace(name, self.path)  # two starts at a time may not mix their lines
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name)
                raise
        except OSError:
            return False
        return True


def _point(entry: Any) -> Point:
    kind, width, context, ms = entry
    if kind not in get_args(Pass) or not (0 < float(ms) < 1e6):
        raise ValueError(f"no measurement: {entry}")
    return Point(kind, int(width), int(context), float(ms))
