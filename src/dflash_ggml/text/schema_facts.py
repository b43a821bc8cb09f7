"""Combined facts of schemas that hold together: a schema, its `allOf`, its `$ref`, and the branches of its unions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError
from .schema_reading import NUMBER, SchemaReader, is_number, without_point
from .schema_size import SchemaSize

MOST_PATTERNS = 3  # for one string: the compiler multiplies their automata, which took it minutes


@dataclass(slots=True)
class Facts:
    """What schemas that hold together say in all."""

    names: dict[str, list[Any]] = field(default_factory=dict)  # with their schemas, branches' left out
    elsewhere: set[str] = field(default_factory=set)  # names that branches declare
    patterns: list[str] = field(default_factory=list)
    declares: bool = False  # some `properties` are given
    opened: bool = False  # `additionalProperties` allows others
    literal: bool = False  # const or enum
    whole: bool = False  # integers only
    items: bool = False
    bounds: set[str] = field(default_factory=set)
    met: int = 0  # patterns and formats
    multiple: int = 1  # common one of all `multipleOf`, their decimal points left out

    @property
    def shared(self) -> frozenset[str]:
        """Names with more than one schema."""
        return frozenset(name for name, subs in self.names.items() if len(subs) > 1)


def facts_of(schema: Any, reader: SchemaReader, size: SchemaSize) -> Facts:
    """What a schema and all that hold together with it say. Raises ConfigError for what is too much."""
    facts = Facts()
    for i, (said, branch) in enumerate(reader.together(schema)):
        size.count(int(i > 0), 0)  # the schema itself is counted elsewhere
        bound = reader.bound(said)
        if isinstance(bound, dict):
            _add(facts, bound, branch)
    return facts


def _add(facts: Facts, said: dict[str, Any], branch: bool) -> None:
    if isinstance(said.get("properties"), Mapping):
        facts.declares = True
        for name, sub in said["properties"].items():
            facts.names.setdefault(name, []).extend([] if branch else [sub])
            facts.elsewhere |= {name} if branch else set()
    for name in said.get("required", ()) if isinstance(said.get("required"), list) else ():
        facts.names.setdefault(str(name), [])
    if isinstance(said.get("patternProperties"), Mapping):
        facts.patterns += said["patternProperties"]
    others = said.get("unevaluatedProperties")
    facts.opened |= said.get("additionalProperties", False) is not False or others is True
    facts.declares |= others is False
    facts.literal |= ("const" in said or "enum" in said) and not branch
    facts.whole |= said.get("type") == "integer" and not branch
    facts.items |= "items" in said
    facts.bounds |= said.keys() & set(NUMBER)
    facts.met += 0 if branch else ("pattern" in said) + ("format" in said)
    if facts.met > MOST_PATTERNS:
        raise ConfigError(f"json schema: more than {MOST_PATTERNS} patterns and formats for one string")
    step = said.get("multipleOf")
    if is_number(step) and step:
        scaled = abs(step) if isinstance(step, int) else without_point(step)
        facts.multiple = math.lcm(facts.multiple, scaled)
        SchemaSize.check_steps(facts.multiple)
