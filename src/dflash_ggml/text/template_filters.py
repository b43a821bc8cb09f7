"""Filters, tests and methods of chat templates: each says what it costs, and is refused what would make it long."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from functools import wraps
from typing import Any

import jinja2
import jinja2.filters
import jinja2.sandbox

from .template_meter import (
    ITEM,
    PIECE,
    VALUE,
    as_list,
    fits,
    looked_through,
    made_value,
    refuse,
    spend,
    weight_of,
)

WIDTH = 1000  # of what is padded, wrapped or indented
SLOW = 20_000  # characters that the filters with slow searches take

_NUMBER = re.compile(r"\d+")
_WORD = re.compile(r"\S+")

# Filters and tests that look at a value from outside, and filters whose result holds what they are given.
FREE = frozenset(("length", "count", "default", "d", "first", "last", "safe", "attr"))
_SAME = frozenset(("list", "reverse", "items", "select", "reject", "selectattr", "rejectattr"))
_WIDE = frozenset(("center", "indent", "batch", "slice", "wordwrap", "round", "tojson"))
_SLOWLY = frozenset(
    ("urlize", "striptags", "pprint", "wordwrap", "wordcount", "xmlattr", "title", "int", "float")
)
_SHORTENS = frozenset(
    ("trim", "string", "lower", "upper")
)  # of a string, to no more than three times its length
COMPARES = frozenset(
    ("eq", "==", "equalto", "ne", "!=", "lt", "<", "lessthan", "gt", ">", "greaterthan", "le", "<=", "ge", ">=",
     "in", "lower", "upper", "divisibleby")
)  # fmt: skip
# Methods that can be called, of types other than strings.
METHODS: dict[type, frozenset[str]] = {
    bytes: frozenset(("decode", "hex", "startswith", "endswith")),
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
    range: frozenset(("count", "index")),
    int: frozenset(("bit_length", "bit_count", "is_integer")),
    float: frozenset(("is_integer", "hex")),
}


def check_format(text: str, values: Any) -> None:
    """For `%`: each number in the format may be a width, `*` takes them from the values."""
    most = weight_of(values)
    numbers = sum(int(number) if len(number) < 10 else VALUE + 1 for number in _NUMBER.findall(text))
    if "*" in text and isinstance(values, tuple):
        numbers += sum(abs(value) for value in values if isinstance(value, int))
    fits(len(text) + numbers + text.count("%") * most)


class _Formatter(jinja2.sandbox.SandboxedFormatter):
    """`format` of a string, with all that it makes counted."""

    n = 0

    def format_field(self, value: Any, format_spec: str) -> Any:
        widths = (int(number) if len(number) < 10 else VALUE + 1 for number in _NUMBER.findall(format_spec))
        fits(sum(widths))
        made = super().format_field(value, format_spec)
        self.n = fits(self.n + len(made))
        spend(1)
        return made


class StringFormat:
    """A string's `format` or `format_map`."""

    def __init__(self, environment: jinja2.Environment, text: str, by_map: bool) -> None:
        self._environment, self._text, self._by_map = environment, text, by_map

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        if self._by_map:
            (mapping,) = args
            args, kwargs = (), mapping
        for value in (*args, *kwargs.values()):
            looked_through(value)
        return _Formatter(self._environment).vformat(self._text, args, kwargs)


def _width(value: Any) -> int:
    return fits(abs(value)) if isinstance(value, int) else 0


def check_method(text: str, name: str, args: tuple[Any, ...]) -> None:
    """Methods of strings that make long values out of short ones."""
    first = args[0] if args else None
    if name in ("center", "ljust", "rjust", "zfill"):
        _width(first)
    elif name == "expandtabs":
        fits(len(text) + text.count("\t") * _width(first))
    elif name == "replace" and len(args) > 1 and isinstance(first, str) and isinstance(args[1], str):
        fits(len(text) + text.count(first) * len(args[1]))
    elif name == "join":
        fits(weight_of(first) + len(text) * (len(first) if isinstance(first, Sized) else 0))
    elif name == "translate":
        fits(
            len(text) * (max(map(weight_of, first.values()), default=1) if isinstance(first, Mapping) else 1)
        )
    elif name in ("split", "rsplit", "splitlines") and len(text) * ITEM > VALUE:
        n = text.count(first) if isinstance(first, str) and first else sum(1 for _ in _WORD.finditer(text))
        fits((n + text.count("\n")) * ITEM)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it: no escapes for HTML, other letters as they are. Refused where it becomes too long."""
    written = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if indent is None and separators is None:
        return written.encode(value)
    pieces, n = [], 0
    for piece in written.iterencode(value):
        n = fits(n + len(piece))
        pieces.append(piece)
    return "".join(pieces)


def add_up(environment: Any, iterable: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
    """Of numbers: lists would be copied once for each."""
    get = (lambda item: item) if attribute is None else jinja2.filters.make_attrgetter(environment, attribute)
    for item in iterable:
        value = get(item)
        if not isinstance(start, (int, float)) or not isinstance(value, (int, float)):
            raise TypeError("sum: only numbers can be added")
        start += value
    return start


def guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or test that says what it costs."""
    passes = hasattr(function, "jinja_pass_arg")
    plain = name in _SHORTENS

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = args[1:] if passes else args
        if plain and len(given) == 1 and type(given[0]) is str and not kwargs:
            spend(1 + len(given[0]) // PIECE)
            return function(*args)
        given = (*given, *kwargs.values())
        if name in _SAME:
            if given and not isinstance(given[0], Sized):
                raise TypeError(f"{name}: expected a list")
            n = len(given[0]) if given else 0
            fits(ITEM * n)
            spend(1 + n)
            result = function(*args, **kwargs)
            return list(result) if isinstance(result, Iterator) else result
        weights = [weight_of(value) for value in given]
        spend(1 + sum(weights) // PIECE)
        if name in _WIDE and any(isinstance(v, int) and abs(v) > WIDTH for v in given[1:]):
            refuse(f"{name}: a number above {WIDTH}")
        if name in _SLOWLY and sum(weights) > SLOW:
            refuse(f"{name}: more than {SLOW} characters")
        value = given[0] if given else None
        if name == "replace" and len(given) > 2:
            old, new = map(str, given[1:3])
            for pair in ((old, new), (new, old)) if kwargs else ((old, new),):  # named in any order
                check_method(str(value), name, pair)
        elif name == "join":
            fits(weights[0] + sum(weights[1:2]) * (len(value) if isinstance(value, Sized) else 0))
        elif name == "format":
            check_format(str(value), given[1:])
        elif name == "indent":
            widths = (
                len(v) if isinstance(v, str) else abs(v) for v in given[1:] if isinstance(v, (str, int))
            )
            fits(weights[0] + (1 + str(value).count("\n")) * max(widths, default=4))
        elif name == "round" and any(isinstance(v, int) and abs(v) > 300 for v in given[1:]):
            refuse("round: more than 300 digits")
        result = function(*args, **kwargs)
        return made_value(as_list(result) if isinstance(result, Iterator) else result)

    return checked
