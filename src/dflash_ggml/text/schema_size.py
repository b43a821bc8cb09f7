"""Size limits of JSON schemas: the compiler's time and memory grow faster than the schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from .grammar_limits import check_size, regex_size

MOST_STEPS = 10_000  # of all `multipleOf`: the compiler makes a state of each remainder
NODES = 10_000  # schemas, names and enumerated values, with what references repeat
NESTING = 60  # of schemas in each other
DEPTH = 200  # the same with references followed


class SchemaSize:
    """Counts what one schema holds. Every method raises ConfigError for more than is allowed."""

    def __init__(self) -> None:
        self._nodes = self._steps = 0

    def count(self, n: int, depth: int) -> None:
        """`n` more schemas, names or values, `depth` schemas deep."""
        self._nodes += n
        if self._nodes > NODES:
            raise ConfigError(f"json schema: more than {NODES} schemas, names and values in all")
        if depth > NESTING:
            raise ConfigError(f"json schema: nested deeper than {NESTING} schemas")

    def count_values(self, values: list[Any], depth: int) -> None:
        """What lists and objects among values hold."""
        todo = [value for value in values if isinstance(value, (Mapping, list))]
        while todo:
            value = todo.pop()
            self.count(len(value), depth)
            held = value.values() if isinstance(value, Mapping) else value
            todo += [item for item in held if isinstance(item, (Mapping, list))]

    @staticmethod
    def check_number(n: int, most: int, what: str) -> None:
        """`n` of one thing, in one place."""
        if n > most:
            raise ConfigError(f"json schema: {n} {what}, at most {most} are allowed")

    def add_steps(self, n: int) -> None:
        """The common multiple of one number's `multipleOf`."""
        self._steps += n
        self.check_steps(self._steps)

    @staticmethod
    def check_steps(n: int) -> None:
        """Steps of all numbers, or of one."""
        if n > MOST_STEPS:
            raise ConfigError(f"json schema: multipleOf: common multiples of more than {MOST_STEPS} in all")

    @staticmethod
    def check_pattern(pattern: str) -> None:
        """A pattern, counted repetitions written out."""
        check_size(regex_size(pattern), len(pattern), "json schema: pattern")

    def check_depth(self, made: dict[str, Any], defs: Mapping[str, Any]) -> None:
        """The compiler goes into every reference where it meets it first, one call in the other."""
        seen: set[str] = set()
        todo: list[tuple[Any, int]] = [(made, 1)]
        while todo:
            value, depth = todo.pop()
            if depth > 3 * DEPTH:  # such as: an object, its properties, one of them
                raise ConfigError(f"json schema: references lead more than {DEPTH} schemas deep")
            held = value
            if isinstance(value, Mapping):
                held = [item for key, item in value.items() if key not in ("$defs", "const", "enum")]
                ref = value.get("$ref")
                if isinstance(ref, str) and ref not in seen:
                    seen.add(ref)
                    held.append(defs.get(ref.rpartition("/")[2]))  # None: a keyword's value that is no schema
            todo += [(item, depth + 1) for item in reversed(held) if isinstance(item, (Mapping, list))]
