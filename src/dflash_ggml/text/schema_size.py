"""How much a JSON schema may hold: the compiler's time and memory grow faster than the schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from .grammar_size import check_size, regex_size

MOST_STEPS = 10_000  # of all `multipleOf`: the compiler makes a state of each remainder
MOST_PARTS = 500_000  # of all patterns, counted ones as often as they are repeated


@dataclass(frozen=True, slots=True)
class SchemaLimits:
    """How much a schema may be before it is compiled.

    nodes: schemas, names and enumerated values, with what references repeat; nesting: of schemas in each other;
    depth: the same with references followed.
    """

    nodes: int = 10_000
    nesting: int = 60
    depth: int = 200


LIMITS = SchemaLimits()


class SchemaSize:
    """Counts what one schema holds. Every method raises ConfigError for more than is allowed."""

    def __init__(self, limits: SchemaLimits) -> None:
        self._limits = limits
        self._nodes = 0
        self._steps = 0
        self._repeated = 0

    def count(self, n: int, depth: int) -> None:
        """`n` more schemas, names or values, `depth` schemas deep."""
        self._nodes += n
        if self._nodes > self._limits.nodes:
            raise ConfigError(f"json schema: more than {self._limits.nodes} schemas, names and values in all")
        if depth > self._limits.nesting:
            raise ConfigError(f"json schema: nested deeper than {self._limits.nesting} schemas")

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

    def add_pattern(self, pattern: str) -> None:
        """A pattern, counted repetitions written out."""
        size = regex_size(pattern)
        check_size(size, len(pattern), "json schema: pattern")
        self._repeated += size
        if self._repeated > MOST_PARTS:
            raise ConfigError(f"json schema: patterns of more than {MOST_PARTS} parts in all")

    def check_depth(self, made: dict[str, Any], defs: Mapping[str, Any]) -> None:
        """The compiler goes into every reference where it meets it first, one call in the other."""
        seen: set[str] = set()
        todo: list[Iterator[Any]] = [iter([made])]
        while todo:
            value = next(todo[-1], None)
            if value is None:
                todo.pop()
                continue
            if len(todo) > 3 * self._limits.depth:  # such as: an object, its properties, one of them
                raise ConfigError(f"json schema: references lead more than {self._limits.depth} schemas deep")
            if isinstance(value, Mapping):
                ref = value.get("$ref")
                inner = [item for key, item in value.items() if key not in ("$defs", "const", "enum")]
                if isinstance(ref, str) and ref not in seen:
                    seen.add(ref)
                    inner.append(
                        defs.get(ref.rpartition("/")[2])
                    )  # None: a keyword's value that is no schema
                todo.append(iter([item for item in inner if isinstance(item, (Mapping, list))]))
            elif isinstance(value, list):
                todo.append(iter([item for item in value if isinstance(item, (Mapping, list))]))
