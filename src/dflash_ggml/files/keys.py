"""Typed access to the keys of a model file; errors name the file, the key and what was expected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..errors import ModelFileError

T = TypeVar("T", int, float, bool, str)

_KIND_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


class KeyedFile:
    """Base of the model files.

    Attributes:
        metadata: Key -> int, float, bool, str, a sequence of these or an array.
    """

    path: Path
    metadata: Mapping[str, Any]

    def error(self, what: str) -> ModelFileError:
        """The exception for a defect of this file: `what` names the field and the expectation."""
        return ModelFileError(f"{self.path}: {what}")

    def require(self, key: str, kind: type[T]) -> T:
        """The scalar under `key`; `ModelFileError` if it is missing or not a `kind` (integers pass as floats)."""
        value = self._lookup(key, _KIND_NAMES[kind])
        if type(value) is kind:
            return value
        if kind is float and type(value) is int:
            return kind(value)
        raise self.error(f"key {key!r} should be {_KIND_NAMES[kind]} but is {describe(value)}")

    def get(self, key: str, kind: type[T], default: T | None = None) -> T | None:
        """Like `require`, but `default` when the key is missing."""
        return self.require(key, kind) if key in self.metadata else default

    def require_array(self, key: str, kind: type[T]) -> Sequence[T]:
        """The array under `key`, each element a `kind`; integers also pass as floats, 0 and 1 as booleans."""
        expected = f"an array, each element {_KIND_NAMES[kind]}"
        value = self._lookup(key, expected)
        items = value.tolist() if isinstance(value, np.ndarray) else value
        if isinstance(items, Sequence) and not isinstance(items, str):
            if all(type(item) is kind for item in items):
                return items
            if kind is float and all(type(item) in (int, float) for item in items):
                return [kind(item) for item in items]
            if kind is bool and all(type(item) in (int, bool) and item in (0, 1) for item in items):
                return [kind(item) for item in items]
        raise self.error(f"key {key!r} should be {expected}, but is {describe(value)}")

    def get_array(self, key: str, kind: type[T]) -> Sequence[T] | None:
        """Like `require_array`, but None when the key is missing."""
        return self.require_array(key, kind) if key in self.metadata else None

    def first_of(self, *keys: str) -> str:
        """The first of `keys` that the file has; the first one when it has none of them."""
        return next((key for key in keys if key in self.metadata), keys[0])

    def _lookup(self, key: str, expected: str) -> Any:
        if key not in self.metadata:
            raise self.error(f"key {key!r} is missing (expected {expected})")
        return self.metadata[key]


def describe(value: object) -> str:
    """Description of a file's value for messages: its type, and its beginning."""
    if isinstance(value, np.ndarray):
        return f"an array of {len(value)} {value.dtype.name} values"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"an array of {len(value)}"
    return f"{_KIND_NAMES.get(type(value), type(value).__name__)} ({short(str(value))})"


def short(text: str) -> str:
    """`text` quoted on one line, cut to a readable length."""
    return repr(text if len(text) <= 80 else text[:77] + "...")
