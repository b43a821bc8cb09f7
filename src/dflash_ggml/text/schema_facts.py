"""Combined properties of all schemas that apply to one value: a schema, its `allOf`, its `$ref`, and its unions' branches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError
from .schema_reading import NUMBER, SchemaReader, is_number, without_point
from .schema_size import SchemaSize

MOST_PATTERNS = 3  # for one string: the compiler multiplies their automata, which can take minutes


@dataclass(slots=True)
class Facts:
    """Combined requirements of all schemas that apply to one value."""

    names: dict[str, list[Any]] = field(
        default_factory=dict
    )  # declared names with their schemas, without branches
    elsewhere: set[str] = field(default_factory=set)  # names declared by branches
    patterns: list[str] = field(default_factory=list)
    declares: bool = False  # whether there are `properties`
    opened: bool = False  # whether `additionalProperties` allows others
    literal: bool = False  # const or enum
    whole: bool = False  # integers only
    items: bool = False
    bounds: set[str] = field(default_factory=set)
    met: int = 0  # patterns and formats
    multiple: int = 1  # common multiple of all `multipleOf`, without decimal points

    @property
    def shared(self) -> frozenset[str]:
        """Names with more than one schema."""
        return frozenset(name for name, subs in self.names.items() if len(subs) > 1)


def facts_of(schema: Any, reader: SchemaReader, size: SchemaSize) -> Facts:
    """Facts of a schema and all others that apply to the same value.

    Raises:
        ConfigError: A limit is exceeded.
    """
    facts = Facts()
    for i, (keywords, branch) in enumerate(reader.in_place(schema)):
        size.count(int(i > 0), 0)  # the schema itself is counted elsewhere
        bound = reader.bound(keywords)
        if isinstance(bound, dict):
            _add(facts, bound, branch)
    return facts


def _add(facts: Facts, keywords: dict[str, Any], branch: bool) -> None:
    if isinstance(keywords.get("properties"), Mapping):
        facts.declares = True
        for name, sub in keywords["properties"].items():
            facts.names.setdefault(name, []).extend([] if branch else [sub])
            facts.elsewhere |= {name} if branch else set()
    for name in keywords.get("required", ()) if isinstance(keywords.get("required"), list) else ():
        facts.names.setdefault(str(name), [])
    if isinstance(keywords.get("patternProperties"), Mapping):
        facts.patterns += keywords["patternProperties"]
    others = keywords.get("unevaluatedProperties")
    facts.opened |= keywords.get("additionalProperties", False) is not False or others is True
    facts.declares |= others is False
    facts.literal |= ("const" in keywords or "enum" in keywords) and not branch
    facts.whole |= keywords.get("type") == "integer" and not branch
    facts.items |= "items" in keywords
    facts.bounds |= keywords.keys() & set(NUMBER)
    facts.met += 0 if branch else ("pattern" in keywords) + ("format" in keywords)
    if facts.met > MOST_PATTERNS:
        raise ConfigError(f"json schema: more than {MOST_PATTERNS} patterns and formats for one string")
    step = keywords.get("multipleOf")
    if is_number(step) and step:
        scaled = abs(step) if isinstance(step, int) else without_point(step)
        facts.multiple = math.lcm(facts.multiple, scaled)
        SchemaSize.check_steps(facts.multiple)
