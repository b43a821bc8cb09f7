"""Size limits of JSON schemas: the compiler's time and memory grow faster than the schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from .grammar_limits import check_size, regex_size

MOST_STEPS = 10_000  # total of all `multipleOf`: the compiler makes a state for each remainder
NODES = 10_000  # schemas, names and enumerated values, with repetitions by references
NESTING = 60  # depth of nested schemas
DEPTH = 200  # the same, following references


class SchemaSize:
    """Counters of one schema's size. Every method raises ConfigError above a limit."""

    def __init__(self) -> None:
        self._nodes = self._steps = 0

    def count(self, n: int, depth: int) -> None:
        """Count `n` more schemas, names or values at a depth of `depth` schemas."""
        self._nodes += n
        if self._nodes > NODES:
            raise ConfigError(f"json schema: more than {NODES} schemas, names and values in all")
        if depth > NESTING:
            raise ConfigError(f"json schema: nested deeper than {NESTING} schemas")

    def count_values(self, values: list[Any], depth: int) -> None:
        """Count nested lists and objects of values."""
        todo = [value for value in values if isinstance(value, (Mapping, list))]
        while todo:
            value = todo.pop()
            self.count(len(value), depth)
            held = value.values() if isinstance(value, Mapping) else value
            todo += [item for item in held if isinstance(item, (Mapping, list))]

    @staticmethod
    def check_number(n: int, most: int, what: str) -> None:
        """Check the number of items of one kind in one place."""
        if n > most:
            raise ConfigError(f"json schema: {n} {what}, at most {most} are allowed")

    def add_steps(self, n: int) -> None:
        """Add the common multiple of one number's `multipleOf`."""
        self._steps += n
        self.check_steps(self._steps)

    @staticmethod
    def check_steps(n: int) -> None:
        """Check the steps of all numbers, or of one."""
        if n > MOST_STEPS:
            raise ConfigError(f"json schema: multipleOf: common multiples of more than {MOST_STEPS} in all")

    @staticmethod
    def check_pattern(pattern: str) -> None:
        """Check a pattern's size, with counted repetitions expanded."""
        check_size(regex_size(pattern), len(pattern), "json schema: pattern")

    def check_depth(self, made: dict[str, Any], defs: Mapping[str, Any]) -> None:
        """Check the depth of references, which the compiler follows recursively at first use."""
        seen: set[str] = set()
        todo: list[tuple[Any, int]] = [(made, 1)]
        while todo:
            value, depth = todo.pop()
            if depth > 3 * DEPTH:  # levels per schema: an object, its properties, one of them
                raise ConfigError(f"json schema: references lead more than {DEPTH} schemas deep")
            held = value
            if isinstance(value, Mapping):
                held = [item for key, item in value.items() if key not in ("$defs", "const", "enum")]
                ref = value.get("$ref")
                if isinstance(ref, str) and ref not in seen:
                    seen.add(ref)
                    held.append(
                        defs.get(ref.rpartition("/")[2])
                    )  # None: a keyword's value that is not a schema
            todo += [(item, depth + 1) for item in reversed(held) if isinstance(item, (Mapping, list))]
