"""Options with which llguidance writes JSON."""

from __future__ import annotations

import re
from importlib import metadata
from typing import Any


def json_options() -> dict[str, Any]:
    """Between JSON tokens a space, or a new line with its indent, so that a model cannot idle there until the context is full.

    Versions before 1.8 ignore such a pattern and would let it idle: with them JSON has no blanks at all.
    """
    try:
        version = [int(part) for part in re.findall(r"\d+", metadata.version("llguidance"))]
    except metadata.PackageNotFoundError:
        version = [1, 8]
    if version[:2] < [1, 8]:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": r" |\n( {0,12}|\t{0,6})"}
