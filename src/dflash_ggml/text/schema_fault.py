"""Locates the fault in a schema that the grammar compiler refuses."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ConfigError
from .schema_reading import SchemaReader

SECONDS = 1.0  # search limit
Refusal = Callable[[Any, Any], str]  # (schema, document) -> why it does not compile, empty if it does


def find_fault(schemas: Mapping[str, Any], refusal: Refusal) -> str | None:
    """The path to the innermost schema that does not compile by itself, and the reason; None if all do.

    Args:
        schemas: Schemas by their names in messages.
    """
    end = time.monotonic() + SECONDS
    refused = {label: refusal(schema, schema) for label, schema in schemas.items() if time.monotonic() < end}
    # a schema that compiles may contain an argument that does not
    for label in [label for label, why in refused.items() if why] or refused:
        schema = schemas[label]
        path, why = _innermost(schema, refusal, end)
        why = why or refused[label]
        if why:
            return f"{label}: {path}: {why}" if path else f"{label}: {why}"
    return None


def _innermost(schema: Any, refusal: Refusal, end: float) -> tuple[str, str]:
    reader, path, why, seen = SchemaReader(schema), "", "", set()
    node: Any = schema
    while node is not None and id(node) not in seen:
        seen.add(id(node))
        inside, node = node, None
        try:
            bound = reader.bound(inside)
            parts = list(reader.parts(bound)) if isinstance(bound, dict) else []
        except ConfigError:
            break
        for label, sub, _ in parts:
            found = refusal(sub, schema) if isinstance(sub, Mapping) and time.monotonic() < end else ""
            if found:
                path, why, node = (path + label).lstrip("."), found, sub
                break
    return path, why
