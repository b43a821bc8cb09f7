"""Numeric handles of objects, in place of llama-cpp-python's pointers: `llm.model`, `llm.ctx` and derived ones."""

from __future__ import annotations

import itertools
import weakref
from typing import Any, TypeVar

from ..errors import ConfigError

T = TypeVar("T")

_objects: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count(0x10000, 16)


def handle_for(thing: Any) -> int:
    """A handle for this object, valid while it is referenced elsewhere."""
    number = next(_numbers)
    _objects[number] = thing
    return number


def behind(handle: Any, kind: type[T]) -> T:
    """The object of a handle.

    Raises:
        ConfigError: The handle is invalid, or its object is gone or of another kind.
    """
    value = getattr(handle, "value", handle)  # ctypes' integers
    found = _objects.get(value) if isinstance(value, int) else None
    if not isinstance(found, kind):
        raise ConfigError(
            f"{handle!r} is no {kind.__name__} of dflash-ggml; take it from a Llama that is still open"
        )
    return found
