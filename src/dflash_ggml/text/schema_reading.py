"""What a JSON schema says, and the schemas that its references name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from ..errors import ConfigError

# What says something about a value. Other keywords are dropped: they only describe, as do formats that nobody checks.
_OBJECT = (
    "properties",
    "patternProperties",
    "additionalProperties",
    "required",
    "minProperties",
    "maxProperties",
    "propertyNames",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedProperties",
)
_ARRAY = (
    "items",
    "prefixItems",
    "additionalItems",
    "unevaluatedItems",
    "minItems",
    "maxItems",
    "uniqueItems",
    "contains",
    "minContains",
    "maxContains",
)
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
BOUNDS = (*LOWER, *UPPER)
NUMBER = (*BOUNDS, "multipleOf")
_STRING = ("minLength", "maxLength", "pattern", "format")
_LOGIC = ("anyOf", "oneOf", "allOf", "not", "if", "then", "else", "const", "enum", "type", "$ref")
_FOREIGN = ("$dynamicRef", "$recursiveRef")  # the compiler refuses them by name
_KEPT = frozenset((*_OBJECT, *_ARRAY, *NUMBER, *_STRING, *_LOGIC, *_FOREIGN))
UNIONS = ("anyOf", "oneOf")


class References:
    """What references within `root` name; `#/...` points into it."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._ids: dict[str, Any] | None = None

    def target(self, ref: Any) -> Any:
        """What a reference names, through a chain of references that are nothing else."""
        seen: set[str] = set()
        while True:
            if not isinstance(ref, str) or ref in seen:
                raise ConfigError(f"json schema: $ref {ref!r} names no schema")
            seen.add(ref)
            target = self._lookup(ref)
            said = said_of(target)
            if isinstance(said, bool) or set(said) != {"$ref"}:
                return target
            ref = said["$ref"]

    def _lookup(self, ref: str) -> Any:
        base = self._root.get("$id", "") if isinstance(self._root, Mapping) else ""
        local = ref[len(base) :] if isinstance(base, str) and base and ref.startswith(base + "#") else ref
        if local in ("#", ""):
            return self._root
        node: Any = None
        if local.startswith("#/"):
            node = self._root
            for part in unquote(local[2:]).split("/"):
                part = part.replace("~1", "/").replace("~0", "~")
                if isinstance(node, Mapping):
                    node = node.get(part)
                elif isinstance(node, list) and part.isascii() and part.isdigit() and int(part) < len(node):
                    node = node[int(part)]
                else:
                    node = None
        else:
            if self._ids is None:
                self._ids = dict(_identified(self._root))
            node = self._ids.get(local)
        if not isinstance(node, (Mapping, bool)):
            raise ConfigError(
                f"json schema: $ref {ref!r} names no schema; it is looked for within the schema"
            )
        return node


def said_of(schema: Any) -> dict[str, Any] | bool:
    """What a schema says, without what only describes; True if that is nothing. Raises ConfigError for no schema."""
    while True:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise ConfigError(f"json schema: expected an object or a boolean as a schema, not {schema!r:.40}")
        said = {key: value for key, value in schema.items() if key in _KEPT}
        only = said.get("allOf")
        if len(said) != 1 or not isinstance(only, list) or len(only) != 1:
            return said or True
        schema = only[0]


def _identified(root: Any) -> Iterator[tuple[str, Any]]:
    """Schemas that have a name of their own, an `$id` or an `$anchor`."""
    todo = [root]
    while todo:
        node = todo.pop()
        if isinstance(node, Mapping):
            if isinstance(node.get("$anchor"), str):
                yield f"#{node['$anchor']}", node
            for key in ("$id", "id"):
                if isinstance(node.get(key), str):
                    yield node[key], node
        if isinstance(node, (Mapping, list)):
            todo += node.values() if isinstance(node, Mapping) else node


def is_number(value: Any) -> bool:
    """Whether a keyword's value is a finite number; booleans are none."""
    return (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, float) and math.isfinite(value)
    )


def without_point(number: float) -> int:
    """The digits of a number, from the first that is not 0."""
    shown = Decimal(str(number)).as_tuple()
    return int("".join(map(str, shown.digits))) * 10 ** max(int(shown.exponent), 0)


def first_number(schema: Mapping[str, Any], keys: tuple[str, ...]) -> float | None:
    """The number of the first of these keywords that has one."""
    return next((schema[key] for key in keys if is_number(schema.get(key))), None)
