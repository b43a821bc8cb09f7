"""A Lark grammar with the JSON schemas in it made narrower, as schemas by themselves are."""

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
    """The grammar with narrower schemas, each with `options` unless it has its own. Raises ConfigError as for schemas."""
    pieces, at = [], 0
    while (found := _JSON.search(text, at)) is not None:
        try:
            schema, end = json.JSONDecoder().raw_decode(text, found.end())
        except (ValueError, RecursionError):
            break  # the compiler refuses it, with the place
        own = schema.get(_OPTIONS, options) if isinstance(schema, dict) else options
        made = bounded_schema(schema)
        if isinstance(made, bool):
            made = {} if made else {"anyOf": []}
        pieces += [text[at : found.end()], dump_schema({**made, _OPTIONS: own})]
        at = end
    return "".join([*pieces, text[at:]])
