"""Requests and events as JSON objects and back: the form in which they may leave the process.

An object names its class under "type" and has one member per field. Tuples and sequences become lists, bytes base64
text, numbers that JSON lacks (an infinite bias) their Python names. What comes back is equal to what went out, but for
sequences that are not declared as tuples: those come back as lists.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..errors import ConfigError
from . import events, prompts, requests

EVENTS: tuple[type, ...] = get_args(events.Event)
REQUESTS: tuple[type, ...] = (requests.ChatRequest, requests.CompletionRequest, prompts.Prepared)
_HINTS: dict[type, dict[str, Any]] = {}
_BY_NAME = {kind.__name__: kind for kind in (*EVENTS, *REQUESTS)}


def to_dict(value: Any) -> dict[str, Any]:
    """A request or event as a JSON object. Raises ConfigError for a value that JSON cannot hold."""
    hints = _hints(type(value))
    return {"type": type(value).__name__} | {
        f.name: _out(getattr(value, f.name), hints[f.name], f.name) for f in fields(value)
    }


def from_dict(data: Mapping[str, Any]) -> Any:
    """What to_dict was given. Raises ConfigError for an unknown type, and for fields that it lacks or does not have."""
    name = data.get("type")
    kind = _BY_NAME.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ConfigError(f"type: {name!r} is no request or event")
    return _built(kind, data)


def _hints(kind: type) -> dict[str, Any]:
    if kind not in _HINTS:
        _HINTS[kind] = get_type_hints(kind)
    return _HINTS[kind]


def _built(kind: type, data: Mapping[str, Any]) -> Any:
    given = {name: value for name, value in data.items() if name != "type"}
    unknown = sorted(set(given) - set(_hints(kind)))
    if unknown:
        raise ConfigError(f"{kind.__name__}: {unknown[0]!r} is not one of its fields")
    for field in fields(kind):
        if field.name not in given and field.default is field.default_factory is MISSING:
            raise ConfigError(f"{kind.__name__}: {field.name!r} is missing")
    return kind(**{name: _in(value, _hints(kind)[name], name) for name, value in given.items()})


def _out(value: Any, hint: Any, where: str) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float) and (math.isfinite(value) or hint is not Any):
        return value if math.isfinite(value) else str(value)
    if is_dataclass(value) and hint is not Any:
        return to_dict(value)
    if isinstance(value, bytes) and hint is not Any:
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping) and (_item(hint) is not Any or all(isinstance(k, str) for k in value)):
        return {str(k): _out(v, _item(hint), f"{where}[{k!r}]") for k, v in value.items()}
    if isinstance(value, (list, tuple)) and set(map(type, value)) <= {int, str}:
        return list(value)  # a prompt's tokens
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_out(v, _item(hint), f"{where}[{i}]") for i, v in enumerate(value)]
    raise ConfigError(f"{where}: {value!r:.60} is no plain data; use JSON's values only")


def _item(hint: Any) -> Any:
    """The hint of what a container holds; Any where JSON values are free."""
    for option in _options(hint):
        if (args := get_args(option)) and get_origin(option) is not Literal:
            return args[1] if len(args) == 2 and args[1] is not Ellipsis else args[0]
    return Any


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _in(data: Any, hint: Any, where: str) -> Any:
    options = _options(hint)
    hint = next((option for option in options if option is not Any and _fits(data, option)), Any)
    if hint is Any and Any not in options and isinstance(data, Mapping):
        wanted = " or ".join(getattr(option, "__name__", str(option)) for option in options)
        raise ConfigError(f"{where}: {data!r:.60} is no {wanted}")
    origin = get_origin(hint) or hint
    if is_dataclass(origin):
        return _built(hint, data)
    if origin is bytes:
        return base64.b64decode(data)
    if origin is float:
        return float(data)
    if origin is tuple and _item(hint) is int and set(map(type, data)) <= {int}:
        return tuple(data)  # a prompt's tokens
    if origin is tuple:
        return tuple(_in(v, _item(hint), where) for v in data)
    if origin is Sequence:
        return [_in(v, _item(hint), where) for v in data]
    if origin is Mapping:
        key = get_args(hint)[0]
        return {key(k): _in(v, _item(hint), where) for k, v in data.items()}
    return data


def _fits(data: Any, option: Any) -> bool:
    """Whether JSON data can be of this plain type: how the members of a union are told apart."""
    origin = get_origin(option) or option
    if is_dataclass(origin):
        return isinstance(data, Mapping) and data.get("type") == option.__name__
    if origin is Literal:
        return data in get_args(option)
    if origin is NoneType:
        return data is None
    if origin in (tuple, Sequence):
        return isinstance(data, list)
    if origin is Mapping:
        return isinstance(data, Mapping)
    if origin is float:
        return isinstance(data, (int, float, str)) and not isinstance(data, bool)
    return isinstance(data, str if origin is bytes else origin) if isinstance(origin, type) else True
