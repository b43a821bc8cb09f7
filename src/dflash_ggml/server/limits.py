"""Limits of a request before it reaches the engine: bytes, seconds, nesting, numbers of values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isinf
from typing import Any

from pydantic_core import from_json

from ..text.json_text import well_formed_json
from .errors import bad_request

COUNTED = 1 << 20  # bytes per read, which blocks the event loop
ID_LISTS = ("prompt", "input", "tokens", "content", "context")  # fields that may be lists of token ids


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one server; exceeding one is a clear error, nothing is truncated silently.

    Attributes:
        held_bytes: Total bytes of unanswered requests' bodies.
        values: JSON values in a body.
        entries: Entries of a list (of token ids: `values`); fields: of an object.
        tokens: Most tokens that /tokenize returns, if the context is smaller.
    """

    body_bytes: int = 8 << 20
    body_seconds: float = 30.0
    held_bytes: int = 256 << 20
    nesting: int = 64
    values: int = 300_000
    entries: int = 8192
    fields: int = 65_536
    tokens: int = 65_536
    messages: int = 4096
    tools: int = 256
    stops: int = 64
    stop_chars: int = 256
    send_seconds: float = 60.0


def parse_json(body: bytes, limits: Limits) -> dict[str, Any]:
    """Parse a body into a JSON object; lone surrogates become U+FFFD.

    Raises:
        ApiError: 400 for anything else, NaN, infinite numbers, and exceeded limits.
    """
    if not body:
        raise bad_request("the body is empty; a JSON object is expected")
    if exceeds_values(body, limits.values):
        raise bad_request(f"the body holds more than {limits.values} JSON values", code="too_many_entries")
    try:
        value = _parsed(body)
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object", code="invalid_json")
    check_sizes(value, limits)
    return value


def _parsed(body: bytes) -> Any:
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError:
        text = well_formed_json(body.decode("utf-8-sig", "replace"))
    return from_json(text, allow_inf_nan=False)


def exceeds_values(body: bytes, limit: int) -> bool:
    """Whether JSON text has more than `limit` values, counted without parsing, since a parser holds the interpreter lock.

    Counts opening brackets and commas outside of strings.
    """
    if len(body) <= limit or _marks(body, 0, len(body)) <= limit:
        return False  # fast path for most bodies
    found = begin = 0
    while True:
        quote = body.find(b'"', begin)
        found += _marks(body, begin, len(body) if quote < 0 else quote)
        if found > limit:
            return True
        begin = _string_end(body, quote + 1) if quote >= 0 else 0
        if begin == 0:
            return False


def _marks(body: bytes, begin: int, end: int) -> int:
    parts = range(begin, end, COUNTED)
    return sum(body.count(mark, at, min(at + COUNTED, end)) for at in parts for mark in (b",", b"[", b"{"))


def _string_end(body: bytes, at: int) -> int:
    """Index after the string whose text begins at `at`; 0 if it does not end."""
    while (quote := body.find(b'"', at)) >= 0:
        text = quote
        while text > at and body[text - 1] == 0x5C:
            text -= 1
        if (quote - text) % 2 == 0:
            return quote + 1
        at = quote + 1
    return 0


def check_sizes(value: dict[str, Any], limits: Limits) -> None:
    """Raise ApiError 400 for a list or an object with too many entries, too deep nesting, or a number that overflows a float.

    Lists of token ids may be longer.
    """
    level: list[tuple[str, Any]] = [("", value)]
    depth = 0
    while level:
        depth += 1
        if depth > limits.nesting:
            raise bad_request(
                f"the body is nested deeper than {limits.nesting} levels", code="nesting_too_deep"
            )
        below: list[tuple[str, Any]] = []
        for path, item in level:
            if isinstance(item, dict):
                if len(item) > limits.fields:
                    raise bad_request(
                        f"{len(item)} fields, at most {limits.fields} are allowed", path, "too_many_entries"
                    )
                children = [(f"{path}.{key}" if path else key, child) for key, child in item.items()]
            elif path.partition("[")[0] in ID_LISTS and all(map(_is_whole, item)):
                continue
            else:
                check_count(item, limits.entries, path)
                children = [(f"{path}[{i}]", child) for i, child in enumerate(item)]
            for name, child in children:
                if isinstance(child, (dict, list)):
                    below.append((name, child))
                elif isinstance(child, float) and isinf(child):
                    raise bad_request(f"{name}: the number is too large", name, "invalid_value")
        level = below


def _is_whole(value: Any) -> bool:
    return type(value) is int or (type(value) is float and value.is_integer())


def check_count(items: Sequence[Any], most: int, param: str) -> None:
    """Raise ApiError 400 if a list of the request is longer than allowed."""
    if len(items) > most:
        raise bad_request(f"{len(items)} entries, at most {most} are allowed", param, "too_many_entries")


def check_stops(given: str | Sequence[str] | None, limits: Limits, param: str = "stop") -> tuple[str, ...]:
    """Validate the number and length of stop strings; empty ones are dropped."""
    stops = [given] if isinstance(given, str) else given or ()
    check_count(stops, limits.stops, param)
    for i, stop in enumerate(stops):
        if len(stop) > limits.stop_chars:
            raise bad_request(
                f"a stop string may have at most {limits.stop_chars} characters", f"{param}[{i}]"
            )
    return tuple(stop for stop in stops if stop)
