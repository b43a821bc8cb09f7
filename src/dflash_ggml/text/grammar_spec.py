"""`GrammarSpec`: a constraint on an answer's visible text, as plain data; `grammar.py` compiles it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ConfigError
from .json_text import loads

GrammarKind = Literal["json_schema", "json_object", "regex", "gbnf", "lark"]


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A constraint on the visible text of an answer.

    Attributes:
        kind: The language of `text`.
        text: The schema (as JSON), pattern or grammar; unused for json_object.
    """

    kind: GrammarKind
    text: str = ""


def spec_of(kind: GrammarKind, text: str | None) -> GrammarSpec | None:
    """The constraint of a grammar or pattern; None for a missing or empty text."""
    if text is None or not (text if kind == "regex" else text.strip()):
        return None
    return GrammarSpec(kind, text)


def json_schema_spec(schema: str | Mapping[str, Any]) -> GrammarSpec:
    """The constraint of a JSON schema.

    Raises:
        ConfigError: The text is not JSON, or the schema is not an object.
    """
    if isinstance(schema, str):
        schema = load_schema(schema)
    if not isinstance(schema, (Mapping, bool)):
        raise ConfigError("json schema: expected an object")
    return GrammarSpec("json_schema", dump_schema(schema))


def load_schema(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ConfigError: It is not JSON, nested too deep, or has a number of too many digits.
    """
    try:
        return loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"json schema: not valid JSON: {error}") from None
    except RecursionError:
        raise ConfigError("json schema: it is nested too deep") from None
    except ValueError:
        raise ConfigError("json schema: a number in it has too many digits") from None


def dump_schema(schema: Any) -> str:
    """A schema as JSON text.

    Raises:
        ConfigError: JSON cannot express it.
    """
    try:
        return json.dumps(schema)
    except RecursionError:
        raise ConfigError("json schema: it is nested too deep") from None
    except ValueError:
        raise ConfigError("json schema: a number in it has too many digits") from None
    except TypeError as error:
        raise ConfigError(f"json schema: not valid JSON: {error}") from None


def response_format_spec(response_format: Mapping[str, Any] | None) -> GrammarSpec | None:
    """The constraint of an OpenAI `response_format` (None for text).

    Understands {"type": "json_object"}, optionally with "schema", and {"type": "json_schema", "json_schema":
    {"schema": ...}}.

    Raises:
        ConfigError: It is unknown, or lacks its schema; the message names the field.
    """
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        schema = response_format.get("schema")
        return GrammarSpec("json_object") if schema is None else json_schema_spec(schema)
    if kind == "json_schema":
        body = response_format.get("json_schema")
        schema = body.get("schema") if isinstance(body, Mapping) else response_format.get("schema")
        if schema is None:
            raise ConfigError("response_format.json_schema.schema: missing")
        return json_schema_spec(schema)
    raise ConfigError(f"response_format.type: {kind!r} is none of text, json_object, json_schema")
