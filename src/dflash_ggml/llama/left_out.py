"""Defaults of sampling arguments that give way to what the model file recommends.

llama-cpp-python's defaults are plain numbers, and callers look at them. These are the same numbers, equal and printed alike, but
their class tells an argument that was left out from one that was given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class LeftOutFloat(float):
    """A float that nobody passed."""


class LeftOutInt(int):
    """An int that nobody passed."""


def settled(options: Mapping[str, Any], recommended: Mapping[str, Any]) -> dict[str, Any]:
    """`options` with those that were left out, or None, as the model file recommends them, else as plain numbers."""

    def one(name: str, value: Any) -> Any:
        if value is None:
            return recommended.get(name)
        is_left_out = isinstance(value, (LeftOutFloat, LeftOutInt))
        return recommended.get(name, value.real) if is_left_out else value

    return {name: one(name, value) for name, value in options.items()}


NAMES = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repeat_penalty",
)  # of the arguments that can be told apart so
TEMPERATURE, CHAT_TEMPERATURE, TOP_P, MIN_P = map(LeftOutFloat, (0.8, 0.2, 0.95, 0.05))
REPEAT_PENALTY, TOP_K = LeftOutFloat(1.0), LeftOutInt(40)
