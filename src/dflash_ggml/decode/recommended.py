"""Sampling defaults that a model file recommends: `general.sampling.*`, under the names of our own options."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import ConfigError
from .sampling_params import SamplingParams

PREFIX = "general.sampling."
_NAMES = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_last_n": "penalty_last_n",
    "penalty_repeat": "repeat_penalty",
    "mirostat": "mirostat_mode",
    "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
}
log = logging.getLogger("dflash_ggml")


def recommended(metadata: Mapping[str, Any]) -> dict[str, int | float]:
    """Option -> value that the file recommends. Values out of range and unknown options are left out with a warning."""
    found: dict[str, int | float] = {}
    for key, value in metadata.items():
        if not key.startswith(PREFIX):
            continue
        name = _NAMES.get(key.removeprefix(PREFIX))
        settled = None if name is None else _in_range(name, value)
        if name is None or settled is None:
            log.warning(
                "%s = %s in the model file: %s",
                key,
                value,
                "no such option here" if name is None else "out of range",
            )
        else:
            found[name] = settled
    return found


def _in_range(name: str, value: Any) -> int | float | None:
    """`value` as the option's type, None if it is invalid."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    if isinstance(getattr(SamplingParams(), name), int):
        if value != int(value):
            return None
        settled: Any = int(value)
    else:
        settled = float(str(np.float32(value)))  # files hold float32: 0.95, not 0.949999988
    try:
        replace(SamplingParams(), **{name: settled}).validate()
    except ConfigError:
        return None
    return settled


def described(options: Mapping[str, Any]) -> str:
    """`options` as text: "temperature 1, top_k 20"."""
    return ", ".join(f"{name} {value:g}" for name, value in options.items())
