"""Narrowing of a JSON schema so that every allowed answer is finite; the result allows a subset of the original.

Numbers have at most 16 digits before the point, 8 after it and no exponent; objects with `properties` have no other keys
unless `additionalProperties` allows them; unconstrained values are any JSON within the same bounds (unless several
schemas apply to one value). Strings without `maxLength` and lists without `maxItems` stay unbounded.

Schemas that apply to the same value (a schema, the members of its `allOf`, the target of its `$ref`, and the branches of its
`anyOf`) are closed once, over the names that all of them declare: each by itself would forbid the others' keys.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError
from .grammar_spec import dump_schema
from .schema_reading import (
    BOUNDS,
    FORMATS,
    LOWER,
    NUMBER,
    UNIONS,
    UPPER,
    SchemaReader,
    first_number,
    is_number,
    without_point,
)
from .schema_size import SchemaSize

WHOLE = 9_999_999_999_999_998  # the largest double of 16 digits: the default bound
FAR = 9223372036854774784  # the largest double below 2**63: the grammar compiler stores bounds in 64 bits
FRACTION = 1e-8  # default step of numbers; the compiler supports none finer than 1e-10
# Members of one object, list or union: the compiler's time is quadratic in them.
MOST_OPTIONAL, MOST_REQUIRED, MOST_PREFIX_ITEMS, MOST_BRANCHES = 1200, 5000, 1000, 1000
MOST_CHARS = 1 << 20
MOST_ITEMS = 4096  # cap of `maxItems`: the compiler expands every item

# formats without effect, which the compiler refuses
_DIALECT = re.compile(r"https?://json-schema\.org/(draft-0[467]|draft/(2019-09|2020-12))/schema#?")
_SINGLE = ("items", "additionalItems")
_LISTS = ("prefixItems", "items", "additionalItems")
_JSON = re.compile(r"%json\s*(?=[{\[tfn\"\d-])")  # a schema in a Lark grammar
_OPTIONS = "x-guidance"  # the compiler's own key in a schema
MOST_PATTERNS = 3  # for one string: the compiler multiplies their automata, which can take minutes


@dataclass(slots=True)
class Facts:
    """Combined requirements of all schemas that apply to one value."""

    # declared names with their schemas, without branches
    names: dict[str, list[Any]] = field(default_factory=dict)
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


def bounded_schema(schema: Any, root: Mapping[str, Any] | None = None) -> dict[str, Any] | bool:
    """The narrowed schema, with all that it refers to under `$defs`.

    Args:
        schema: The schema.
        root: What `#/...` points into, if not `schema`.

    Raises:
        ConfigError: A reference leads nowhere, or the schema exceeds the limits.
    """
    return _Bounder(schema if root is None else root).run(schema)


class _Bounder:
    """One transformation. `mode` in its methods: None for a schema that applies alone, else the names shared with the other
    schemas of the same value, which bound everything it leaves open."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._size = SchemaSize()
        self._reader = SchemaReader(root)
        self._names: dict[tuple[int, frozenset[str] | None], str] = {}
        self._todo: list[tuple[str, Any, frozenset[str] | None]] = []
        self._defs: dict[str, Any] = {}
        self._inlined: set[int] = set()
        self._combines = False  # whether several schemas apply to one value anywhere

    def run(self, schema: Any) -> dict[str, Any] | bool:
        self._reader.check(schema)
        made = self._node(schema, None, 0)
        while self._todo:
            name, target, mode = self._todo.pop()
            self._defs[name] = self._node(target, mode, 0)
        if isinstance(made, bool):
            return made
        made = dict(made)
        dialect = self._root.get("$schema") if isinstance(self._root, Mapping) else None
        if isinstance(dialect, str) and _DIALECT.fullmatch(dialect):
            made["$schema"] = dialect
        if self._combines and "any" in self._defs:
            # the compiler would recurse infinitely if two of it apply to one value
            self._defs["any"] = True
        if self._defs:
            made["$defs"] = self._defs
        self._size.check_depth(made, self._defs)
        return made

    def _node(self, schema: Any, mode: frozenset[str] | None, depth: int) -> dict[str, Any] | bool:
        self._size.count(1, depth)
        keywords = self._reader.bound(schema)
        if isinstance(keywords, bool):
            return self._any() if keywords and mode is None else keywords
        if set(keywords) == {"$ref"}:
            return self._ref(keywords["$ref"], mode)
        unions = [key for key in UNIONS if key in keywords]
        apart = len(unions) == 1 and keywords.keys() <= {"type", unions[0]}
        facts = Facts() if apart else facts_of(keywords, self._reader, self._size)
        alone = not unions and "allOf" not in keywords and "$ref" not in keywords
        inner = facts.shared if mode is None and not apart else mode
        made: dict[str, Any] = {}
        for key, value in keywords.items():
            if key in ("properties", "patternProperties") and not isinstance(value, Mapping):
                raise ConfigError(f"json schema: {key} must be an object")
            if key == "properties":
                made[key] = {
                    name: True if name in (inner or ()) else self._node(sub, None, depth + 1)
                    for name, sub in value.items()
                }
                needed = keywords.get("required", ()) if isinstance(keywords.get("required"), list) else ()
                optional = len(value) - sum(name in value for name in needed if isinstance(name, str))
                self._size.check_number(optional, MOST_OPTIONAL, "properties that may be left out")
            elif key == "patternProperties":
                for name in value:
                    self._size.check_pattern(name)
                made[key] = {name: self._node(sub, None, depth + 1) for name, sub in value.items()}
            elif key in _LISTS and isinstance(value, list):
                self._size.check_number(len(value), MOST_PREFIX_ITEMS, f"schemas in {key}")
                made[key] = [self._node(sub, None, depth + 1) for sub in value]
            elif key == "additionalProperties":
                anything = self._reader.bound(value) is True and not (alone and mode is None)
                made[key] = True if anything else self._node(value, None, depth + 1)
            elif key in _SINGLE:
                made[key] = self._node(value, None, depth + 1)
            elif key == "allOf" and isinstance(value, list):
                made[key] = [self._node(sub, inner, depth + 1) for sub in value]
            elif key in UNIONS and isinstance(value, list):
                self._size.check_number(len(value), MOST_BRANCHES, f"schemas in {key}")
                made[key] = self._union(key, value, inner, depth + 1)
            elif key == "$ref":
                made.update(self._ref(value, inner))
            elif key == "unevaluatedProperties":
                pass  # closing the combined object already does this
            elif key == "format" and (not isinstance(value, str) or value not in FORMATS):
                pass
            else:
                made[key] = self._plain(key, value, depth)
        if mode is None and not apart:
            self._close(keywords, made, facts, depth)
            self._fill(keywords, made, facts)
        self._combines |= not alone and not apart
        return made

    def _union(self, key: str, branches: list[Any], mode: frozenset[str] | None, depth: int) -> list[Any]:
        made = []
        for branch in branches:
            keywords = self._reader.bound(branch)
            if key == "oneOf" and isinstance(keywords, dict) and set(keywords) == {"$ref"}:
                # the compiler distinguishes alternatives only if they are inline
                target = self._reader.target(keywords["$ref"])
                if id(target) not in self._inlined:
                    self._inlined.add(id(target))
                    made.append(self._node(target, mode, depth))
                    self._inlined.discard(id(target))
                    continue
            made.append(self._node(branch, mode, depth))
        return made

    def _close(self, keywords: dict[str, Any], made: dict[str, Any], facts: Facts, depth: int) -> None:
        """Forbid undeclared keys, if any keys are declared."""
        closed = keywords.get("additionalProperties") is False
        for name in sorted(facts.shared):
            if not closed or name in made.get("properties", ()):
                subs: list[Any] = []
                subs += (sub for sub in facts.names[name] if sub not in subs)
                made.setdefault("properties", {})[name] = self._node({"allOf": subs}, None, depth + 1)
        if not facts.declares or facts.opened or closed:
            return
        properties = made.setdefault("properties", {})
        for name, subs in facts.names.items():
            # names declared by other schemas are constrained there; a name that is only required may be anything
            if name not in properties:
                properties[name] = True if subs or name in facts.elsewhere else self._any()
        for key in UNIONS:
            if isinstance(made.get(key), list):
                made[key] = self._without_others(keywords[key], made[key], properties, keywords)
        for pattern in facts.patterns:
            made.setdefault("patternProperties", {}).setdefault(pattern, True)
        made["additionalProperties"] = False

    def _without_others(
        self, branches: list[Any], made: list[Any], names: dict[str, Any], keywords: dict[str, Any]
    ) -> list[Any]:
        """Each branch without the names that only other branches declare."""
        common = facts_of(
            {key: value for key, value in keywords.items() if key not in UNIONS}, self._reader, self._size
        ).names
        out = []
        for branch, done in zip(branches, made, strict=True):
            known = facts_of(branch, self._reader, self._size).names
            others = {name: False for name in names if name not in known and name not in common}
            out.append({"allOf": [done, {"properties": others}]} if others else done)
        return out

    def _fill(self, keywords: dict[str, Any], made: dict[str, Any], facts: Facts) -> None:
        """Add bounds where the schema has none."""
        kinds: Any = keywords.get("type")
        if isinstance(kinds, list):
            kinds = {kind for kind in kinds if isinstance(kind, str)}
        else:
            kinds = {kinds} if isinstance(kinds, str) else None
        if facts.literal or "const" in keywords or "enum" in keywords:
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

    def _fill_number(self, made: dict[str, Any], facts: Facts, *, whole: bool) -> None:
        low, high = first_number(made, LOWER), first_number(made, UPPER)
        if not facts.bounds & set(LOWER):
            made["minimum"] = -WHOLE if high is None or high > -WHOLE else -FAR
        if not facts.bounds & set(UPPER):
            made["maximum"] = WHOLE if low is None or low < WHOLE else FAR
        if "multipleOf" in facts.bounds:
            self._size.add_steps(facts.multiple)
        elif not whole:
            made["multipleOf"] = FRACTION

    def _plain(self, key: str, value: Any, depth: int) -> Any:
        """Narrow a keyword without subschemas."""
        if key in ("enum", "required") and isinstance(value, list):
            self._size.count(len(value), depth)
            self._size.count_values(value, depth)
            if key == "required":
                self._size.check_number(len(value), MOST_REQUIRED, "required names")
        elif key == "const":
            self._size.count_values([value], depth)
        elif key == "pattern" and isinstance(value, str):
            self._size.check_pattern(value)
        elif key == "maxItems" and is_number(value):
            return min(value, MOST_ITEMS)
        elif key == "maxLength" and is_number(value):
            return min(value, MOST_CHARS)
        elif key == "minItems" and is_number(value) and value > MOST_ITEMS:
            raise ConfigError(f"json schema: minItems {value} is above {MOST_ITEMS}")
        elif key in BOUNDS and is_number(value) and abs(value) > FAR:
            return FAR if value > 0 else -FAR
        return value

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
        target = self._reader.target(ref)
        key = id(target), mode
        if key not in self._names:
            self._names[key] = f"{len(self._names)}"
            self._todo.append((self._names[key], target, mode))
        return {"$ref": f"#/$defs/{self._names[key]}"}


def bounded_lark(text: str, options: Mapping[str, Any]) -> str:
    """A Lark grammar with each `%json {...}` in it replaced by its narrowed schema.

    Args:
        text: The grammar. From a schema that is not JSON on it stays unchanged; the compiler reports the location.
        options: The grammar compiler's options (`x-guidance`) for every schema without its own.

    Raises:
        ConfigError: As `bounded_schema` does.
    """
    pieces, at = [], 0
    while (found := _JSON.search(text, at)) is not None:
        try:
            schema, end = json.JSONDecoder().raw_decode(text, found.end())
        except (ValueError, RecursionError):
            break  # the compiler reports the location
        own = schema.get(_OPTIONS, options) if isinstance(schema, dict) else options
        made = bounded_schema(schema)
        if isinstance(made, bool):
            made = {} if made else {"anyOf": []}
        pieces += [text[at : found.end()], dump_schema({**made, _OPTIONS: own})]
        at = end
    return "".join([*pieces, text[at:]])
