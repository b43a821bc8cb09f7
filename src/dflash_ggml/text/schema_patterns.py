"""Check of JSON schemas' patterns (ECMA's dialect) for features that the grammar compiler lacks, without compiling them."""

from __future__ import annotations

import re
from typing import Any

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
