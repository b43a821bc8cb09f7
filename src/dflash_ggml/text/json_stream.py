"""JSON as models write it, made strict while it streams in: Python's quotes and words, line ends inside strings."""

from __future__ import annotations

import json
import math
from typing import Any

from .json_text import loads

_WORDS = {"True": "true", "False": "false", "None": "null", "NaN": "null", "Infinity": "null"}
_WORD_CHARS = frozenset("+-._")


class JsonStream:
    """feed() text, read strict JSON; `done` is set behind the bracket that closes the first one.

    depth: brackets that are open already.
    """

    def __init__(self, depth: int = 0) -> None:
        self.done = False
        self._depth = depth
        self._quote = ""
        self._escaped = False
        self._word = ""

    def feed(self, text: str) -> tuple[str, int]:
        """(JSON text, characters taken): all of them, unless it is done or meets a `<` outside a string."""
        out: list[str] = []
        for i, char in enumerate(text):
            if self.done:
                return "".join(out), i
            if self._quote:
                out.append(self._in_string(char))
            elif char.isalnum() or char in _WORD_CHARS:
                self._word += char  # its end tells what it is
            elif char == "<":
                return "".join(out), i
            else:
                out += (self.rest(), self._between(char))
        return "".join(out), len(text)

    def rest(self) -> str:
        """The word or number whose end has not come."""
        word, self._word = _WORDS.get(self._word, self._word), ""
        return word

    def _in_string(self, char: str) -> str:
        if self._escaped:
            self._escaped = False
            if self._quote == "'" and char in "'x":
                return "'" if char == "'" else "\\u00"
            return "\\" + char
        if char == "\\":
            self._escaped = True
            return ""
        if char == self._quote:
            self._quote = ""
            return '"'
        return '\\"' if char == '"' else char if char >= " " else json.dumps(char)[1:-1]

    def _between(self, char: str) -> str:
        if char in "\"'":
            self._quote = char
            return '"'
        if char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.done = self._depth <= 0
        return char


def read_json(text: str) -> Any:
    """The value of a JSON text, or of a Python object written in its place. Raises ValueError for anything else."""
    text = text.strip()
    try:
        return _loads(text)
    except ValueError:
        if not text.startswith(("{", "[")):
            raise
    stream = JsonStream()
    strict, taken = stream.feed(text)
    if not stream.done or taken < len(text):
        raise ValueError("not one JSON value")
    return _loads(strict)


def _loads(text: str) -> Any:
    try:
        return loads(text, parse_float=_finite, parse_constant=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no JSON number")
    return value
