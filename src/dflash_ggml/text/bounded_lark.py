"""Lark grammars whose embedded JSON schemas are narrowed, so that every answer ends (see `bounded_schema`)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from .bounded_schema import bounded_schema
from .grammar_spec import dump_schema

_JSON = re.compile(r"%json\s*(?=[{\[tfn\"\d-])")
_OPTIONS = "x-guidance"  # the compiler's own key in a schema


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
