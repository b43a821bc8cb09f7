"""A tool's arguments by its JSON schema, and conversion of values written as text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from .json_stream import read_json
from .schema_reading import UNIONS, SchemaReader, Typed, is_same, type_name

_WORDS = {"true": True, "false": False, "null": None, "none": None}
_NUMBER = re.compile(r"[+-]?([0-9]{1,4000}(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
_COUNTS = re.compile(r"[*+?{]")
# keywords that constrain an object beyond its single arguments
_OVERALL = (*UNIONS, "patternProperties", "minProperties", "maxProperties")


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a tool; `schema` constrains its value."""

    schema: Any
    typed: Typed
    required: bool


@dataclass(frozen=True, slots=True)
class Arguments:
    """All arguments of a tool, if each can be constrained separately.

    Attributes:
        others: Schema of further names; None if they are forbidden.
    """

    named: Mapping[str, Argument]
    others: Argument | None


class ToolSchema:
    """The arguments of one tool, wherever the schema declares them: behind references, in unions, ..."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self.parameters = parameters
        self.reader = SchemaReader(parameters)
        self.declared: dict[str, dict[bool, list[Any]]] = {}  # by name: schemas, and those of branches
        self.required: set[str] = set()  # names required in every branch of a union
        self._others: list[tuple[str, Any]] = []  # patterns of names with schemas
        self._typed: dict[str, Typed] = {}
        for keywords, branch in self.reader.in_place(parameters, conditional=True):
            for name, sub in _items(keywords, "properties"):
                self.declared.setdefault(name, {False: [], True: []})[branch].append(sub)
            self._others += _items(keywords, "patternProperties")
            if "additionalProperties" in keywords:
                self._others.append(("", keywords["additionalProperties"]))
            if not branch and isinstance(keywords.get("required"), list):
                self.required.update(name for name in keywords["required"] if isinstance(name, str))

    def typed(self, name: str) -> Typed:
        """Values that an argument may have; any value if unconstrained."""
        own = self.declared.get(name)
        if own is None:
            # several patterns may match
            fit = [s for pattern, s in self._others if isinstance(s, Mapping) and _may_match(pattern, name)]
            return self.reader.typed({"anyOf": fit})
        if name not in self._typed:
            found = self.reader.typed({"allOf": own[False]})
            self._typed[name] = found if found.types else self.reader.typed({"anyOf": own[True]})
        return self._typed[name]

    def is_text(self, name: str) -> bool:
        """Whether an argument is always a string."""
        return self.typed(name).types <= {"string"}

    def value(self, name: str, text: str) -> Any:
        """An argument written as text -> the JSON value by its schema; the text itself if it does not match."""
        typed = self.typed(name)
        types, values = typed.types or frozenset(("string",)), typed.values or ()
        if any(isinstance(value, str) and value == text for value in values):
            return text
        value = coerce(text, types)
        if values and value is text and types != {"string"}:
            # among enumerated values `1` is the number if the string is not listed
            other = coerce(text, types - {"string"})
            value = other if any(is_same(other, one) for one in values) else text
        return value

    def arguments(self) -> Arguments | None:
        """All arguments, if each can be constrained separately, else None."""
        named: dict[str, list[Any]] = {}
        others: list[Any] = []
        n_speaking = 0
        for keywords, branch in self.reader.in_place(self.parameters):
            bound = self.reader.bound(keywords)
            if branch or not isinstance(bound, dict) or any(key in bound for key in _OVERALL):
                return None
            required = bound.get("required", [])
            if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
                return None
            if not isinstance(bound.get("properties", {}), Mapping):
                return None
            n_speaking += not bound.keys().isdisjoint(("properties", "additionalProperties"))
            for name, sub in bound.get("properties", {}).items():
                named.setdefault(name, []).append(sub)
            others += [bound["additionalProperties"]] if "additionalProperties" in bound else []
        if others and n_speaking > 1:
            return None  # undeclared names differ between the schemas
        rest = others[0] if others else not n_speaking
        for name in self.required:
            named.setdefault(name, others or [True])
        if not all(isinstance(name, str) and name and not any(c in name for c in "<>\n") for name in named):
            return None
        try:
            made = {
                name: self._argument(subs[0] if len(subs) == 1 else {"allOf": subs}, name in self.required)
                for name, subs in named.items()
            }
            extra = None if rest is False else self._argument(rest, False)
        except ConfigError:
            return None
        return Arguments(made, extra)

    def _argument(self, schema: Any, required: bool) -> Argument:
        """Raises ConfigError if the text between tags would be ambiguous or cannot be constrained."""
        keywords = self.reader.keywords(schema)
        if keywords is False or (
            isinstance(keywords, dict) and not isinstance(keywords.get("enum", []), list)
        ):
            raise ConfigError("not an argument")
        typed = self.reader.typed(schema)
        words = [value for value in typed.values or () if isinstance(value, str)]
        if "string" in typed.types and (
            typed.limited
            or typed.values == ()
            or typed.types & {"object", "array"}
            or any(c in word for word in words for c in "<\n")
        ):
            raise ConfigError("not an argument as text")
        return Argument(schema, typed, required)


def coerce(text: str, types: frozenset[str]) -> Any:
    """A value written as text -> the JSON value of one of these types; the text itself if it does not match."""
    if types == {"string"}:
        return text
    trimmed = text.strip()
    value: Any
    try:
        value = _WORDS[trimmed.lower()] if trimmed.lower() in _WORDS else read_json(trimmed)
        for _ in range(2):
            if not isinstance(value, str) or "string" in types:
                break
            value = read_json(value)  # JSON inside a JSON string
    except ValueError:
        value = _number(trimmed)
    kind = type_name(value)
    if kind in types or (kind == "integer" and "number" in types):
        # if strings are allowed too, only null and containers are unambiguous
        return value if "string" not in types or kind in ("null", "object", "array") else text
    if kind == "number" and "integer" in types and float(value).is_integer():
        return int(value)
    return text


def _number(text: str) -> Any:
    """A number in informal notation, `+3` or `.5`; the text itself if it is none."""
    if not _NUMBER.fullmatch(text):
        return text
    value = float(text) if any(c in ".eE" for c in text) else int(text)
    return value if math.isfinite(value) else text


def _items(keywords: Mapping[str, Any], key: str) -> Iterator[tuple[str, Any]]:
    found = keywords.get(key)
    return ((str(name), sub) for name, sub in found.items()) if isinstance(found, Mapping) else iter(())


def _may_match(pattern: str, name: str) -> bool:
    """Whether a pattern matches a name; True for patterns that could be slow to match."""
    if "(" in pattern or len(_COUNTS.findall(pattern)) > 2:
        return True
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return True
