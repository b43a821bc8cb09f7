"""A JSON schema made narrower, so that every answer it allows comes to an end; what it allows, the original allows.

Numbers have at most 16 digits before the point, 8 behind it and no exponent; objects that declare `properties` carry
no other keys unless `additionalProperties` says so; what a schema leaves open altogether is any JSON within the same
bounds (unless the schema makes schemas hold together). Strings without `maxLength` and lists without `maxItems` stay
as long as the model likes.

Schemas that hold together (a schema with the members of its `allOf`, with what its `$ref` names, and with the branches
of its `anyOf`) are closed once, over the names that all of them declare: each by itself would forbid the others' keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from ..errors import ConfigError
from .grammar_size import check_size, regex_size

WHOLE = 9_999_999_999_999_998  # the largest double of 16 digits: the bound where a schema sets none
FAR = 9223372036854774784  # the largest double below 2**63: the grammar compiler holds bounds in 64 bits
FRACTION = 1e-8  # the step of numbers where a schema sets none; the compiler takes none finer than 1e-10
MOST_STEPS = 10_000  # of all `multipleOf`: the compiler makes a state of each remainder
MOST_PATTERNS = 3  # for one string: the compiler multiplies their automata, which took it minutes
MOST_PARTS = 500_000  # of all patterns, counted ones as often as they are repeated
# Of one object, list or union: the compiler takes the square of their number, the parser some items for each.
MOST_OPTIONAL, MOST_REQUIRED, MOST_PLACES, MOST_BRANCHES = 1200, 5000, 1000, 1000
MOST_CHARS = 1 << 20
MOST_ITEMS = 4096  # of a list whose `maxItems` is larger; the compiler writes every one of them down

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
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_LIMITS = (*_LOWER, *_UPPER)
_NUMBER = (*_LIMITS, "multipleOf")
_STRING = ("minLength", "maxLength", "pattern", "format")
_LOGIC = ("anyOf", "oneOf", "allOf", "not", "if", "then", "else", "const", "enum", "type", "$ref")
_FOREIGN = ("$dynamicRef", "$recursiveRef")  # the compiler refuses them by name
_KEPT = frozenset((*_OBJECT, *_ARRAY, *_NUMBER, *_STRING, *_LOGIC, *_FOREIGN))
_SINGLE = ("items", "additionalItems")
_LISTS = ("prefixItems", "items", "additionalItems")
_UNIONS = ("anyOf", "oneOf")
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
)


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


def bounded_schema(
    schema: Any, root: Mapping[str, Any] | None = None, limits: SchemaLimits = LIMITS
) -> dict[str, Any] | bool:
    """The narrower schema, with all that it refers to under `$defs`. root: what `#/...` points into, if not `schema`.

    Raises ConfigError for a reference that leads nowhere and for more than the limits.
    """
    return _Bounder(schema if root is None else root, limits).run(schema)


@dataclass(slots=True)
class _Facts:
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


class _Bounder:
    """One transformation. `mode` in its methods: None for a schema that stands alone, else the shared names of those
    that it holds together with, which speak for it about all that is left open."""

    def __init__(self, root: Any, limits: SchemaLimits) -> None:
        self._root = root
        self._limits = limits
        self._nodes = 0
        self._steps = 0
        self._repeated = 0
        self._names: dict[tuple[int, frozenset[str] | None], str] = {}
        self._todo: list[tuple[str, Any, frozenset[str] | None]] = []
        self._defs: dict[str, Any] = {}
        self._inlined: set[int] = set()
        self._meet = False  # whether schemas hold together anywhere
        self._ids: dict[str, Any] | None = None

    def run(self, schema: Any) -> dict[str, Any] | bool:
        made = self._node(schema, None, 0)
        while self._todo:
            name, target, mode = self._todo.pop()
            self._defs[name] = self._node(target, mode, 0)
        if isinstance(made, bool):
            return made
        made = dict(made)
        if isinstance(self._root, Mapping) and isinstance(self._root.get("$schema"), str):
            made["$schema"] = self._root["$schema"]
        if self._meet and "any" in self._defs:
            self._defs["any"] = True  # the compiler would go round in it where two of it hold together
        if self._defs:
            made["$defs"] = self._defs
        self._check_depth(made)
        return made

    def _node(self, schema: Any, mode: frozenset[str] | None, depth: int) -> dict[str, Any] | bool:
        self._count(1, depth)
        said = _said(schema)
        if isinstance(said, bool):
            return self._any() if said and mode is None else said
        if set(said) == {"$ref"}:
            return self._ref(said["$ref"], mode)
        unions = [key for key in _UNIONS if key in said]
        apart = len(unions) == 1 and said.keys() <= {"type", unions[0]}
        facts = _Facts() if apart else self._facts(said)
        alone = not unions and "allOf" not in said and "$ref" not in said
        inner = facts.shared if mode is None and not apart else mode
        made: dict[str, Any] = {}
        for key, value in said.items():
            if key == "properties" and isinstance(value, Mapping):
                made[key] = {
                    name: True if name in (inner or ()) else self._node(sub, None, depth + 1)
                    for name, sub in value.items()
                }
                needed = said.get("required", ()) if isinstance(said.get("required"), list) else ()
                optional = len(value) - sum(name in value for name in needed if isinstance(name, str))
                self._check_number(optional, MOST_OPTIONAL, "properties that may be left out")
            elif key == "patternProperties" and isinstance(value, Mapping):
                for name in value:
                    self._check_pattern(name)
                made[key] = {name: self._node(sub, None, depth + 1) for name, sub in value.items()}
            elif key in _LISTS and isinstance(value, list):
                self._check_number(len(value), MOST_PLACES, f"places in {key}")
                made[key] = [self._node(sub, None, depth + 1) for sub in value]
            elif key == "additionalProperties":
                anything = _said(value) is True and not (alone and mode is None)
                made[key] = True if anything else self._node(value, None, depth + 1)
            elif key in _SINGLE:
                made[key] = self._node(value, None, depth + 1)
            elif key == "allOf" and isinstance(value, list):
                made[key] = [self._node(sub, inner, depth + 1) for sub in value]
            elif key in _UNIONS and isinstance(value, list):
                self._check_number(len(value), MOST_BRANCHES, f"schemas in {key}")
                made[key] = self._union(key, value, inner, depth + 1)
            elif key == "$ref":
                made.update(self._ref(value, inner))
            elif key == "unevaluatedProperties" and isinstance(value, bool) and mode is None:
                pass  # it says of all that hold together what is done to them here
            elif key == "format" and (not isinstance(value, str) or value not in FORMATS):
                pass
            else:
                made[key] = self._plain(key, value, depth)
        if mode is None and not apart:
            self._close(said, made, facts, depth)
            self._fill(said, made, facts)
        self._meet |= not alone and not apart
        return made

    def _union(self, key: str, branches: list[Any], mode: frozenset[str] | None, depth: int) -> list[Any]:
        made = []
        for branch in branches:
            said = _said(branch)
            if key == "oneOf" and isinstance(said, dict) and set(said) == {"$ref"}:
                # the compiler tells alternatives apart only where it sees them
                target = self._target(said["$ref"])
                if id(target) not in self._inlined:
                    self._inlined.add(id(target))
                    made.append(self._node(target, mode, depth))
                    self._inlined.discard(id(target))
                    continue
            made.append(self._node(branch, mode, depth))
        return made

    def _close(self, said: dict[str, Any], made: dict[str, Any], facts: _Facts, depth: int) -> None:
        """Leave no keys but those declared, if any are."""
        closed = said.get("additionalProperties") is False
        for name in sorted(facts.shared):
            if not closed or name in made.get("properties", ()):
                subs: list[Any] = []
                subs += (sub for sub in facts.names[name] if sub not in subs)
                made.setdefault("properties", {})[name] = self._node({"allOf": subs}, None, depth + 1)
        if not facts.declares or facts.opened or closed:
            return
        properties = made.setdefault("properties", {})
        for name, subs in facts.names.items():
            # what other schemas declare they hold to; a name that is only required may be anything
            if name not in properties:
                properties[name] = True if subs or name in facts.elsewhere else self._any()
        for key in _UNIONS:
            if isinstance(made.get(key), list):
                made[key] = self._without_others(said[key], made[key], properties, said)
        for pattern in facts.patterns:
            made.setdefault("patternProperties", {}).setdefault(pattern, True)
        made["additionalProperties"] = False

    def _without_others(
        self, branches: list[Any], made: list[Any], names: dict[str, Any], said: dict[str, Any]
    ) -> list[Any]:
        """Each branch without the names that only other branches declare."""
        common = self._facts({key: value for key, value in said.items() if key not in _UNIONS}).names
        out = []
        for branch, done in zip(branches, made, strict=True):
            known = self._facts(_said(branch)).names
            others = {name: False for name in names if name not in known and name not in common}
            out.append({"allOf": [done, {"properties": others}]} if others else done)
        return out

    def _fill(self, said: dict[str, Any], made: dict[str, Any], facts: _Facts) -> None:
        """Bounds for what the schema leaves open."""
        kinds: Any = said.get("type")
        if isinstance(kinds, list):
            kinds = {kind for kind in kinds if isinstance(kind, str)}
        else:
            kinds = {kinds} if isinstance(kinds, str) else None
        if facts.literal or "const" in said or "enum" in said:
            return
        numbers = {"number", "integer"} if kinds is None else kinds & {"number", "integer"}
        if numbers:
            self._fill_number(made, facts, whole=facts.whole or numbers == {"integer"})
        rest_open = not (facts.declares or facts.opened or "additionalProperties" in made)
        if rest_open and (kinds is None or "object" in kinds):
            made["additionalProperties"] = self._any()
        if kinds is None or "array" in kinds:
            if isinstance(made.get("items"), list):
                made.setdefault("additionalItems", self._any())
            elif not facts.items:
                made["items"] = self._any()

    def _fill_number(self, made: dict[str, Any], facts: _Facts, *, whole: bool) -> None:
        low, high = _first_number(made, _LOWER), _first_number(made, _UPPER)
        if not facts.bounds & set(_LOWER):
            made["minimum"] = -WHOLE if high is None or high > -WHOLE else -FAR
        if not facts.bounds & set(_UPPER):
            made["maximum"] = WHOLE if low is None or low < WHOLE else FAR
        if "multipleOf" in facts.bounds:
            self._steps += facts.multiple
            self._check_steps(self._steps)
        elif not whole:
            made["multipleOf"] = FRACTION

    def _check_steps(self, n: int) -> None:
        if n > MOST_STEPS:
            raise ConfigError(f"json schema: multipleOf: common multiples of more than {MOST_STEPS} in all")

    def _plain(self, key: str, value: Any, depth: int) -> Any:
        """A keyword without schemas in it."""
        if key in ("enum", "required") and isinstance(value, list):
            self._count(len(value), depth)
            self._count_values(value, depth)
            if key == "required":
                self._check_number(len(value), MOST_REQUIRED, "required names")
        elif key == "const":
            self._count_values([value], depth)
        elif key == "pattern" and isinstance(value, str):
            self._check_pattern(value)
        elif key == "maxItems" and _is_number(value):
            return min(value, MOST_ITEMS)
        elif key == "maxLength" and _is_number(value):
            return min(value, MOST_CHARS)
        elif key == "minItems" and _is_number(value) and value > MOST_ITEMS:
            raise ConfigError(f"json schema: minItems {value} is above {MOST_ITEMS}")
        elif key in _LIMITS and _is_number(value) and abs(value) > FAR:
            return FAR if value > 0 else -FAR
        return value

    def _count_values(self, values: list[Any], depth: int) -> None:
        """What lists and objects among values hold."""
        todo = [value for value in values if isinstance(value, (Mapping, list))]
        while todo:
            value = todo.pop()
            self._count(len(value), depth)
            held = value.values() if isinstance(value, Mapping) else value
            todo += [item for item in held if isinstance(item, (Mapping, list))]

    def _check_number(self, n: int, most: int, what: str) -> None:
        if n > most:
            raise ConfigError(f"json schema: {n} {what}, at most {most} are allowed")

    def _check_pattern(self, pattern: str) -> None:
        size = regex_size(pattern)
        check_size(size, len(pattern), "json schema: pattern")
        self._repeated += size
        if self._repeated > MOST_PARTS:
            raise ConfigError(f"json schema: patterns of more than {MOST_PARTS} parts in all")

    def _any(self) -> dict[str, Any]:
        """A reference to the schema of any JSON value."""
        here = {"$ref": "#/$defs/any"}
        if "any" not in self._defs:
            number = {"type": "number", "minimum": -WHOLE, "maximum": WHOLE}
            self._defs["any"] = {
                "anyOf": [
                    {"type": ["null", "boolean", "string"]},
                    {**number, "multipleOf": FRACTION},
                    {"type": "array", "items": here},
                    {"type": "object", "additionalProperties": here},
                ]
            }
        return here

    def _ref(self, ref: Any, mode: frozenset[str] | None) -> dict[str, Any]:
        target = self._target(ref)
        key = id(target), mode
        if key not in self._names:
            self._names[key] = f"{len(self._names)}"
            self._todo.append((self._names[key], target, mode))
        return {"$ref": f"#/$defs/{self._names[key]}"}

    def _target(self, ref: Any) -> Any:
        """What a reference names, through a chain of references that are nothing else."""
        seen: set[str] = set()
        while True:
            if not isinstance(ref, str) or ref in seen:
                raise ConfigError(f"json schema: $ref {ref!r} names no schema")
            seen.add(ref)
            target = self._lookup(ref)
            said = _said(target)
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

    def _facts(self, said: dict[str, Any] | bool) -> _Facts:
        """What `said` and all that hold together with it say."""
        facts, seen = _Facts(), set()
        todo: list[tuple[Any, bool]] = [(said, False)]
        while todo:
            schema, branch = todo.pop()
            here = _said(schema)
            if isinstance(here, bool):
                continue
            self._add(facts, here, branch)
            if "$ref" in here:
                target = self._target(here["$ref"])
                if id(target) not in seen:
                    seen.add(id(target))
                    self._count(1, 0)
                    todo.append((target, branch))
            for key in ("allOf", *_UNIONS):
                subs = here.get(key)
                if isinstance(subs, list):
                    self._count(len(subs), 0)
                    todo += [(sub, branch or key != "allOf") for sub in reversed(subs)]
        return facts

    def _add(self, facts: _Facts, said: dict[str, Any], branch: bool) -> None:
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
        facts.bounds |= said.keys() & set(_NUMBER)
        facts.met += 0 if branch else ("pattern" in said) + ("format" in said)
        if facts.met > MOST_PATTERNS:
            raise ConfigError(f"json schema: more than {MOST_PATTERNS} patterns and formats for one string")
        step = said.get("multipleOf")
        if _is_number(step) and step:
            scaled = abs(step) if isinstance(step, int) else _without_point(step)
            facts.multiple = math.lcm(facts.multiple, scaled)
            self._check_steps(facts.multiple)

    def _count(self, n: int, depth: int) -> None:
        self._nodes += n
        if self._nodes > self._limits.nodes:
            raise ConfigError(f"json schema: more than {self._limits.nodes} schemas, names and values in all")
        if depth > self._limits.nesting:
            raise ConfigError(f"json schema: nested deeper than {self._limits.nesting} schemas")

    def _check_depth(self, made: dict[str, Any]) -> None:
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
                        self._defs.get(ref.rpartition("/")[2])
                    )  # None: a keyword's value that is no schema
                todo.append(iter([item for item in inner if isinstance(item, (Mapping, list))]))
            elif isinstance(value, list):
                todo.append(iter([item for item in value if isinstance(item, (Mapping, list))]))


def _said(schema: Any) -> dict[str, Any] | bool:
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


def _is_number(value: Any) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, float) and math.isfinite(value)
    )


def _without_point(number: float) -> int:
    """The digits of a number, from the first that is not 0."""
    shown = Decimal(str(number)).as_tuple()
    return int("".join(map(str, shown.digits))) * 10 ** max(int(shown.exponent), 0)


def _first_number(schema: Mapping[str, Any], keys: tuple[str, ...]) -> float | None:
    return next((schema[key] for key in keys if _is_number(schema.get(key))), None)
