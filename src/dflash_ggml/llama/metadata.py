"""A model file's metadata as llama-cpp-python shows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def text_metadata(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Metadata as texts: arrays left out, booleans true/false, floats with six decimals."""
    out = {}
    for key, value in metadata.items():
        if isinstance(value, (bool, np.bool_)):
            out[key] = "true" if value else "false"
        elif isinstance(value, (float, np.floating)):
            out[key] = f"{value:f}"
        elif isinstance(value, (str, int, np.integer)):
            out[key] = str(value)
    return out
