"""Lone surrogates in JSON, from clients that truncate strings, are replaced by U+FFFD.

JSON's grammar allows them, but they cannot be encoded, tokenised or sent on.
"""

from __future__ import annotations

import json
import re
from typing import Any

_HALF = r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
_ANY_HALF = re.compile(_HALF)
# group 1 is kept: a complete pair, any other escape, and an incomplete pair at the end of a text
_ESCAPE = re.compile(
    r"(\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\?\Z|\\u[0-9a-fA-F]{0,3}\Z)"
    rf"|\\(?!u[dD][89a-fA-F]).)|{_HALF}",
    re.DOTALL,
)


def well_formed(text: str) -> str:
    """The text with U+FFFD for every lone surrogate; pairs are joined."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def well_formed_json(text: str) -> str:
    """JSON text, perhaps truncated, with U+FFFD for every escaped lone surrogate."""
    if _ANY_HALF.search(text) is None:
        return text
    return _ESCAPE.sub(lambda found: found[1] or "\\ufffd", text)


def loads(text: str, **options: Any) -> Any:
    """As json.loads, without lone surrogates in strings."""
    return json.loads(well_formed_json(text), **options)
