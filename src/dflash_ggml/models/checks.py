"""Checks shared by the readers of targets and drafts: ranges of numbers, presence and shapes of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeVar

from ..errors import ModelFileError
from ..files.tensor_info import TensorInfo

N = TypeVar("N", int, float)
Fail = Callable[[str], ModelFileError]

MAX_LAYERS, MAX_WIDTH, MAX_HEADS = 1024, 1 << 20, 1 << 12  # far above any real model

# Types that are not weights: the two block types for activations, integers, float64.
_NO_WEIGHT_TYPES = {9, 15, 24, 25, 26, 27, 28}


def in_range(fail: Fail, field: str, value: N, low: N, high: N) -> N:
    """`value` if low <= value <= high (so not NaN); raises the error for `field` otherwise."""
    if not low <= value <= high:
        raise fail(f"{field}: {value} is out of range (expected {low} to {high})")
    return value


def positive(fail: Fail, field: str, value: float) -> float:
    """`value` if it is positive and finite; raises the error for `field` otherwise."""
    if not (value > 0 and math.isfinite(value)):
        raise fail(f"{field}: {value} should be a positive number")
    return value


def check_tensors(
    fail: Fail,
    tensors: Mapping[str, TensorInfo],
    shapes: Mapping[str, tuple[int, ...]],
    ignored: Callable[[str], bool] = lambda name: False,
) -> None:
    """Check that exactly the tensors of `shapes` exist, with these shapes and weight types.

    A model with more weights than the graph uses would give wrong results; `ignored` recognises unused ones. A vector may be
    stored as a matrix of one row.
    """
    for name, shape in shapes.items():
        info = tensors.get(name)
        if info is None:
            raise fail(f"tensor {name!r} is missing (expected shape {list(shape)})")
        if _without_ones(info.shape) != _without_ones(shape):
            raise fail(f"tensor {name!r} has shape {list(info.shape)}, expected {list(shape)}")
        if info.type in _NO_WEIGHT_TYPES:
            raise fail(f"tensor {name!r} is stored as {info.type_name}, which no weight may be")
    for name in tensors:
        if name not in shapes and not ignored(name):
            raise fail(f"tensor {name!r} is unknown: this variant of the model is not supported")


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape without trailing dimensions of 1 (after the first), which ggml does not distinguish."""
    n = len(shape)
    while n > 1 and shape[n - 1] == 1:
        n -= 1
    return shape[:n]
