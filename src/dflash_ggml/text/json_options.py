"""llguidance's options for JSON."""

from __future__ import annotations

import re
from importlib import metadata
from typing import Any


def json_options() -> dict[str, Any]:
    """Limit white space between JSON tokens to a space, or a line break with its indent, so that a model cannot emit it forever.

    Versions before 1.8 ignore such a pattern: with them no white space is allowed.
    """
    try:
        version = [int(part) for part in re.findall(r"\d+", metadata.version("llguidance"))]
    except metadata.PackageNotFoundError:
        version = [1, 8]
    if version[:2] < [1, 8]:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": r" |\n( {0,12}|\t{0,6})"}
