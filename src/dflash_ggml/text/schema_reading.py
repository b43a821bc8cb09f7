"""Reader of JSON Schema: normalised keywords, references, and the values that a schema allows."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from ..errors import ConfigError

# Keywords that constrain a value, by the type they apply to. Others are annotations and dropped.
_OBJECT = (
    *(
        "properties",
        "patternProperties",
        "additionalProperties",
        "required",
        "minProperties",
        "maxProperties",
    ),
    *("propertyNames", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"),
)
_ARRAY = (
    *("items", "prefixItems", "additionalItems", "unevaluatedItems", "minItems", "maxItems", "uniqueItems"),
    *("contains", "minContains", "maxContains"),
)
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
BOUNDS = (*LOWER, *UPPER)
NUMBER = (*BOUNDS, "multipleOf")
STRING = ("minLength", "maxLength", "pattern", "format")
UNIONS = ("anyOf", "oneOf")
_LOGIC = (*UNIONS, "allOf", "not", "if", "then", "else", "const", "enum", "type", "$ref")
_DYNAMIC = ("$dynamicRef", "$recursiveRef")  # within one document equivalent to a `$ref`
_NULLABLE = "nullable"  # OpenAPI's word
_KEPT = frozenset((*_OBJECT, *_ARRAY, *NUMBER, *STRING, *_LOGIC, *_DYNAMIC, _NULLABLE))
_ABOUT = ((_OBJECT, "object"), (_ARRAY, "array"), (NUMBER, "number"), (STRING, "string"))

FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
)
# Keywords that the grammar compiler does not support: left out when a schema constrains an answer.
_UNBOUND = {
    "propertyNames",
    "uniqueItems",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
}
_UNBOUND |= {"dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", _NULLABLE}

# Names of types in use, including JSON Schema's own.
_ALIASES = {
    "string": "str text",
    "number": "float double decimal",
    "integer": "int long",
    "object": "dict map",
}
_ALIASES |= {"array": "list tuple", "boolean": "bool", "null": "", "any": ""}
_TYPES = {name: kind for kind, names in _ALIASES.items() for name in (kind, *names.split())}

_BY_NAME = ("properties", "patternProperties", "dependentSchemas", "dependencies")  # schemas by name
_LISTS = ("prefixItems", "items", "additionalItems")
_CONDITIONAL = ("then", "else")
_SINGLE = (
    *("additionalProperties", "propertyNames", "unevaluatedProperties", "unevaluatedItems"),
    *("contains", "not", "if", *_CONDITIONAL),
)
_COUNTS = {f"{end}{what}" for end in ("min", "max") for what in ("Length", "Items", "Properties", "Contains")}
_MAY_BE_VOID = frozenset(("allOf", "required", "uniqueItems", _NULLABLE, "dependentRequired", *_BY_NAME[1:]))
# replaced by equivalent keywords, or dropped, where possible
_REWRITTEN = frozenset((*_DYNAMIC, *_CONDITIONAL, "if", "not", "minContains", "maxContains", "propertyNames"))
_REWRITTEN |= {"unevaluatedProperties", "unevaluatedItems", "exclusiveMinimum", "exclusiveMaximum"}
_DEEP = 64  # depth of nested schemas, references included, for type inference


@dataclass(frozen=True, slots=True)
class Typed:
    """The values that a schema allows.

    Attributes:
        types: Names of JSON types, empty for any.
        values: All allowed values, if enumerated.
        limited: Strings have further constraints.
    """

    types: frozenset[str] = frozenset()
    values: tuple[Any, ...] | None = None
    limited: bool = False


ANY = Typed()


class SchemaReader:
    """Reader of one document, with `#/...` references into `root`; thread-safe."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._ids: dict[str, Any] | None = None
        self._typed: dict[int, Typed] = {}  # targets of references, by identity
        self._lock = threading.RLock()

    # --- the keywords of a schema

    def keywords(self, schema: Any) -> dict[str, Any] | bool:
        """The keywords of a schema that constrain a value, normalised; a bool for a schema that allows all or nothing.

        Raises:
            ConfigError: It is not a schema.
        """
        keywords = _kept(schema)
        while isinstance(keywords, dict) and keywords.keys() == {"allOf"} and _holds_one(keywords["allOf"]):
            keywords = _kept(keywords["allOf"][0])
        if isinstance(keywords, bool):
            return keywords
        if "type" in keywords and (kind := _standard(keywords.pop("type"))) is not None:
            keywords["type"] = kind
        for key in keywords.keys() & _COUNTS:
            if isinstance(keywords[key], float) and keywords[key].is_integer():
                keywords[key] = int(keywords[key])
        if keywords.get("properties") == []:
            keywords["properties"] = {}  # PHP's empty object
        if keywords.keys().isdisjoint(_REWRITTEN):
            return keywords or True
        for key in _DYNAMIC:
            if key in keywords:
                keywords.setdefault("$ref", keywords.pop(key))
        if "not" in keywords:
            denied = _kept(keywords["not"])
            if denied is True:
                return False
            if denied is False:
                del keywords["not"]
        if "if" not in keywords or not keywords.keys() & set(_CONDITIONAL):
            _drop(keywords, "if", *_CONDITIONAL)
        if "contains" not in keywords:
            _drop(keywords, "minContains", "maxContains")
        if not keywords.keys() & {"$ref", "allOf", *UNIONS, "if", "dependentSchemas"}:
            # no other keyword evaluates members
            if "unevaluatedProperties" in keywords:
                keywords.setdefault("additionalProperties", keywords.pop("unevaluatedProperties"))
            if "unevaluatedItems" in keywords:
                rest = "additionalItems" if isinstance(keywords.get("items"), list) else "items"
                keywords.setdefault(rest, keywords.pop("unevaluatedItems"))
        for exclusive, plain in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if isinstance(keywords.get(exclusive), bool) and keywords.pop(exclusive) and plain in keywords:
                keywords[exclusive] = keywords.pop(plain)  # draft 4 has a switch
        if "propertyNames" in keywords:
            self._name_properties(keywords)
        return keywords or True

    def _name_properties(self, keywords: dict[str, Any]) -> None:
        """Express `propertyNames` by the keywords for properties, if possible."""
        names = self.typed(keywords["propertyNames"])
        if not names.limited and names.values is None and (not names.types or "string" in names.types):
            del keywords["propertyNames"]
            return
        own, rest = keywords.get("properties", {}), keywords.get("additionalProperties", True)
        if "patternProperties" in keywords or not isinstance(own, Mapping):
            return
        if names.values is not None and not names.limited:
            allowed = [name for name in names.values if isinstance(name, str)]
            keywords["properties"] = {
                name: own.get(name, rest) for name in allowed if name in own or rest is not False
            }
        else:
            inner = _kept(keywords["propertyNames"])
            of_names = inner if isinstance(inner, dict) else {}
            pattern = of_names.get("pattern")
            if own or rest is False or of_names.keys() - {"pattern", "type"} or not is_regex(pattern):
                return
            keywords["patternProperties"] = {pattern: rest}
        keywords["additionalProperties"] = False
        del keywords["propertyNames"]

    def bound(self, schema: Any) -> dict[str, Any] | bool:
        """The normalised keywords, without those that a grammar cannot express."""
        keywords = self.keywords(schema)
        if isinstance(keywords, bool):
            return keywords
        bound = {key: value for key, value in keywords.items() if key not in _UNBOUND}
        if isinstance(bound.get("pattern"), str) and not is_regex(bound["pattern"]):
            del bound["pattern"]
        if not isinstance(bound.get("unevaluatedProperties", False), bool):
            del bound["unevaluatedProperties"]
        named = bound.get("patternProperties")
        if isinstance(named, Mapping) and not all(map(is_regex, named)):
            bound["patternProperties"] = {name: sub for name, sub in named.items() if is_regex(name)}
        return bound or True

    def left_out(self, schema: Any) -> list[str]:
        """The parts of a schema that a grammar cannot express: keywords, after their path."""
        found = []
        for path, keywords, inside in self.walk(schema):
            bound = self.bound(keywords)
            kept = bound if isinstance(bound, dict) else {}
            lost = [key for key, value in keywords.items() if key != _NULLABLE and kept.get(key) != value]
            if inside and "unevaluatedProperties" in kept:
                lost.append("unevaluatedProperties")
            if lost:
                found.append(f"{path}: {', '.join(lost)}" if path else ", ".join(lost))
        return found

    # --- subschemas

    def in_place(self, schema: Any, conditional: bool = False) -> Iterator[tuple[dict[str, Any], bool]]:
        """Keywords of a schema and of those applied to the same value by `$ref` and `allOf`; True for a union's branch.

        Invalid schemas are left out.

        Args:
            schema: The schema to begin with.
            conditional: Whether to include branches of conditions.
        """
        seen: set[int] = set()
        branches = (*UNIONS, *_CONDITIONAL) if conditional else UNIONS
        todo: list[tuple[Any, bool]] = [(schema, False)]
        while todo:
            node, branch = todo.pop()
            try:
                keywords = self.keywords(node)
                if isinstance(keywords, bool):
                    continue
                target = self.target(keywords["$ref"]) if "$ref" in keywords else None
            except ConfigError:
                continue
            yield keywords, branch
            if target is not None and id(target) not in seen:
                seen.add(id(target))
                todo.append((target, branch))
            for key in ("allOf", *branches):
                value = keywords.get(key, [])
                subs = value if isinstance(value, list) else [value] if key in _CONDITIONAL else []
                todo += [(sub, branch or key != "allOf") for sub in reversed(subs)]
            if conditional and isinstance(keywords.get("dependentSchemas"), Mapping):
                todo += [(sub, True) for sub in keywords["dependentSchemas"].values()]

    def walk(self, schema: Any) -> Iterator[tuple[str, dict[str, Any], bool]]:
        """Every schema in `schema` and its references, once, without invalid ones.

        Yields:
            Its path, its keywords, and whether another schema applies to the same value.

        Raises:
            ConfigError: A reference is unresolved.
        """
        seen: set[tuple[int, bool]] = set()
        todo: list[tuple[str, Any, bool]] = [("", schema, False)]
        while todo:
            path, node, inside = todo.pop()
            if not isinstance(node, Mapping) or (id(node), inside) in seen:
                continue
            seen.add((id(node), inside))
            try:
                keywords = self.keywords(node)
            except ConfigError:
                continue
            if isinstance(keywords, bool):
                continue
            try:
                inner = list(self.parts(keywords))
            except ConfigError as error:
                what = str(error).removeprefix("json schema: ")
                raise ConfigError(f"json schema: {path}: {what}" if path else str(error)) from None
            yield path, keywords, inside
            todo += [((path + label).lstrip("."), sub, held) for label, sub, held in reversed(inner)]

    def parts(self, keywords: dict[str, Any]) -> Iterator[tuple[str, Any, bool]]:
        """Subschemas: their labels in a path, the schema, whether they apply to the same value as `keywords`.

        Raises:
            ConfigError: A reference is unresolved.
        """
        for key, value in keywords.items():
            if key == "$ref":
                yield "", self.target(value), len(keywords) > 1
            elif key in _BY_NAME and isinstance(value, Mapping):
                for name, sub in value.items():
                    yield f".{name}" if key.endswith("roperties") else f".{key}.{name}", sub, False
            elif key in ("allOf", *UNIONS) and isinstance(value, list):
                yield from ((f".{key}[{i}]", sub, True) for i, sub in enumerate(value))
            elif key in _LISTS:
                subs = enumerate(value) if isinstance(value, list) else [("", value)]
                yield from ((f"[{i}]", sub, False) for i, sub in subs)
            elif key in _SINGLE:
                yield f".{key}", value, key in _CONDITIONAL

    # --- allowed values

    def typed(self, schema: Any, depth: int = 0) -> Typed:
        """The values that a schema allows; any value if it is unconstrained or invalid."""
        try:
            keywords = self.keywords(schema)
            if isinstance(keywords, bool) or depth > _DEEP:
                return ANY
            target = self.target(keywords["$ref"]) if "$ref" in keywords else None
        except (ConfigError, RecursionError):
            return ANY
        found = Typed(limited=_is_limited(keywords))
        if "type" in keywords:
            kinds = keywords["type"] if isinstance(keywords["type"], list) else [keywords["type"]]
            found = _meet(found, Typed(frozenset(kind for kind in kinds if isinstance(kind, str))))
        for values in ([keywords["const"]] if "const" in keywords else None, keywords.get("enum")):
            if isinstance(values, (list, tuple)):
                found = _meet(found, Typed(frozenset(map(type_name, values)), tuple(values)))
        if target is not None:
            with self._lock:
                if id(target) not in self._typed:
                    self._typed[id(target)] = ANY  # placeholder for recursive schemas
                    self._typed[id(target)] = self.typed(target, depth + 1)
                found = _meet(found, self._typed[id(target)])
        for key in ("allOf", *UNIONS):
            subs = keywords.get(key)
            if isinstance(subs, list):
                inner = [self.typed(sub, depth + 1) for sub in subs]
                for one in inner if key == "allOf" else [_join(inner)]:
                    found = _meet(found, one)
        if not found.types:
            about = (kind for names, kind in _ABOUT if not keywords.keys().isdisjoint(names))
            found = replace(found, types=frozenset(about))
        if found.types and _NULLABLE in keywords:
            found = replace(found, types=found.types | {"null"})
        return found

    # --- references

    def check(self, schema: Any) -> None:
        """Raise ConfigError if a reference in `schema` is unresolved."""
        for _ in self.walk(schema):
            pass

    def target(self, ref: Any) -> Any:
        """The target of a reference, through chains of references."""
        seen: set[str] = set()
        while True:
            if not isinstance(ref, str) or ref in seen:
                raise ConfigError(f"json schema: $ref {ref!r:.200} names no schema")
            seen.add(ref)
            target = self._lookup(ref)
            keywords = _kept(target)
            if isinstance(keywords, bool) or set(keywords) != {"$ref"}:
                return target
            ref = keywords["$ref"]

    def _lookup(self, ref: str) -> Any:
        base = self.root.get("$id", "") if isinstance(self.root, Mapping) else ""
        local = ref[len(base) :] if isinstance(base, str) and base and ref.startswith(base + "#") else ref
        if local in ("#", ""):
            return self.root
        node: Any = None
        if local.startswith("#/"):
            node = self.root
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
                self._ids = dict(_identified(self.root))
            node = self._ids.get(local)
        if not isinstance(node, (Mapping, bool)):
            raise ConfigError(
                f"json schema: $ref {ref!r:.200} names no schema; it is looked for within the schema"
            )
        return node


def _kept(schema: Any) -> dict[str, Any] | bool:
    """The constraining keywords, unchanged; True for none."""
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping):
        raise ConfigError(f"json schema: expected an object or a boolean as a schema, not {schema!r:.40}")
    return {k: v for k, v in schema.items() if k in _KEPT and not _is_void(k, v)} or True


def _is_void(key: str, value: Any) -> bool:
    """Whether a keyword has no effect: null, draft 3's `required: true`, ..."""
    if value is None:
        return key != "const"
    if key not in _MAY_BE_VOID:
        return False
    if key in ("uniqueItems", _NULLABLE):
        return value is not True
    return isinstance(value, bool) if key == "required" else value in ({}, [])


def _holds_one(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 1


def _drop(keywords: dict[str, Any], *keys: str) -> None:
    for key in keys:
        keywords.pop(key, None)


def _standard(kind: Any) -> Any:
    """JSON Schema's name of a type, or several; None for any."""
    kinds = [_TYPES.get(k.lower(), k) if isinstance(k, str) else k for k in _listed(kind)]
    if "any" in kinds:
        return None
    return kinds if isinstance(kind, (list, tuple)) else kinds[0]


def _listed(kind: Any) -> list[Any]:
    return list(kind) if isinstance(kind, (list, tuple)) else [kind]


def _meet(a: Typed, b: Typed) -> Typed:
    """Values allowed by both; for disjoint types the first without values."""
    both = a.types & b.types
    both |= {k for one, other in ((a, b), (b, a)) if "number" in other.types for k in one.types & {"integer"}}
    if a.types and b.types and not both:
        return replace(a, values=())
    types = both or a.types or b.types
    values = a.values if b.values is None else b.values
    if a.values is not None and b.values is not None:
        values = tuple(v for v in a.values if any(is_same(v, w) for w in b.values))
    if values is not None and types:
        values = tuple(v for v in values if {type_name(v), _wider(v)} & types)
        types = frozenset(map(type_name, values)) or types
    return Typed(types, values, a.limited or b.limited)


def _join(several: list[Typed]) -> Typed:
    """Values allowed by any of them."""
    several = [one for one in several if one.values != ()] or several  # the others allow no value
    if not several or not all(one.types for one in several):
        return Typed(limited=any(one.limited for one in several))
    types = frozenset[str]().union(*(one.types for one in several))
    known = [_values(one) for one in several]
    if all(values is not None for values in known):
        listed = tuple(v for values in known for v in values or ())
        return Typed(types, listed, any(one.limited for one in several))
    lists_words = any(isinstance(v, str) for one in several for v in one.values or ())
    return Typed(types, None, lists_words or any(one.limited for one in several))


def _values(one: Typed) -> tuple[Any, ...] | None:
    if one.values is None and one.types <= {"null", "boolean"}:
        return (None,) * ("null" in one.types) + (False, True) * ("boolean" in one.types)
    return one.values


def _is_limited(keywords: Mapping[str, Any]) -> bool:
    """Whether a string has constraints besides its type."""
    return any(
        key in keywords
        and (key != "format" or (isinstance(keywords[key], str) and keywords[key] in FORMATS))
        and (key != "pattern" or is_regex(keywords[key]))
        for key in STRING
    )


def is_same(value: Any, other: Any) -> bool:
    """Whether two JSON values are equal; true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def type_name(value: Any) -> str:
    """The JSON type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    for types, name in ((int, "integer"), (float, "number"), (str, "string"), (Mapping, "object")):
        if isinstance(value, types):
            return name
    return "array"


def _wider(value: Any) -> str:
    return "number" if type_name(value) == "integer" else ""


def _identified(root: Any) -> Iterator[tuple[str, Any]]:
    """Schemas with an `$id` or an anchor."""
    todo = [root]
    while todo:
        node = todo.pop()
        if isinstance(node, Mapping):
            for key in ("$anchor", "$dynamicAnchor"):
                if isinstance(node.get(key), str):
                    yield f"#{node[key]}", node
            for key in ("$id", "id"):
                if isinstance(node.get(key), str):
                    yield node[key], node
        if isinstance(node, (Mapping, list)):
            todo += node.values() if isinstance(node, Mapping) else node


def is_number(value: Any) -> bool:
    """Whether a keyword's value is a finite number, and not a boolean."""
    return (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, float) and math.isfinite(value)
    )


def without_point(number: float) -> int:
    """The digits of a number, without point and leading zeros."""
    shown = Decimal(str(number)).as_tuple()
    return int("".join(map(str, shown.digits))) * 10 ** max(int(shown.exponent), 0)


def first_number(schema: Mapping[str, Any], keys: tuple[str, ...]) -> float | None:
    """The first numeric value among these keywords."""
    return next((schema[key] for key in keys if is_number(schema.get(key))), None)


# escapes, classes, look-around, counts and what else has such brackets; within a class escapes and brackets
_REGEX_PARTS = re.compile(
    r"\\(?:[pPxuU]\{[^}]{0,40}\}|.)|\[\^?(?:\\.|[^]\\])*(?:\]|\Z)?|\(\?<?[=!]|\{\d+(?:,\d*)?\}|\{", re.DOTALL
)
_CLASS_PARTS = re.compile(r"\\.|\[(?!:)", re.DOTALL)
_ESCAPES = "dDwWsSpPxuUaftnrv"


def is_regex(pattern: Any) -> bool:
    """Whether the grammar compiler supports a pattern: not look-around, back references, ...

    Some invalid patterns give False too; the compiler refuses the others.
    """
    return isinstance(pattern, str) and all(map(_has_words, _REGEX_PARTS.findall(pattern)))


def _has_words(part: str) -> bool:
    """Whether the compiler supports one of _REGEX_PARTS."""
    if part[0] == "\\":
        return part[1] in _ESCAPES or not (part[1].isalnum() or part[1] in "<>")
    if part[0] == "[":  # ECMA's empty classes, and brackets in classes, have another meaning there
        inner = part[1:-1].removeprefix("^")
        return part[-1] == "]" and bool(inner) and all(map(_has_words, _CLASS_PARTS.findall(inner)))
    return part[0] == "{" and len(part) > 1
