"""Streaming conversion of models' JSON to strict JSON: Python's quotes and literals, line ends inside strings."""

from __future__ import annotations

import json
import math
from typing import Any

from .call_forms import partial_suffix
from .json_text import loads

_WORDS = {"True": "true", "False": "false", "None": "null", "NaN": "null", "Infinity": "null"}
_WORD_CHARS = frozenset("+-._")


class JsonStream:
    """feed() text, read strict JSON; `done` is set after the bracket that closes the first one.

    Args:
        depth: Brackets that are open already.
    """

    def __init__(self, depth: int = 0) -> None:
        self.done = False
        self._depth = depth
        self._quote = ""
        self._escaped = False
        self._word = ""

    def feed(self, text: str) -> tuple[str, int]:
        """(JSON text, characters consumed): all of them, unless it is done or finds a `<` outside a string."""
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
        """The incomplete literal or number at the end."""
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


class TaggedStream(JsonStream):
    """JsonStream for a notation with raw strings between tags and unquoted keys; JSON's own syntax is accepted too.

    {key:<|"|>text<|"|>,other:[1,true,null]}
    """

    def __init__(self, tag: str) -> None:
        super().__init__()
        self._tag = tag
        self._brackets: list[str] = []
        self._in_key = False

    def feed(self, text: str) -> tuple[str, int]:
        """As JsonStream's; an incomplete tag is not consumed, inside a string neither."""
        out: list[str] = []
        at = 0
        while at < len(text) and not self.done:
            if self._quote == self._tag:
                end = text.find(self._tag, at)
                stop = end if end >= 0 else len(text) - partial_suffix(text[at:], (self._tag,))
                out.append(json.dumps(text[at:stop], ensure_ascii=False)[1:-1])
                if end < 0:
                    return "".join(out), stop
                out.append('"')
                self._quote, at = "", end + len(self._tag)
            elif self._quote:
                out.append(self._in_string(text[at]))
                at += 1
            elif text.startswith(self._tag, at):
                out += (self.rest(), '"')
                self._quote, at = self._tag, at + len(self._tag)
            elif text[at] == "<":
                break
            else:
                out.append(self._outside(text[at]))
                at += 1
        return "".join(out), at

    def rest(self) -> str:
        """As JsonStream's; a word that is a key, or not a JSON literal, becomes a string."""
        word, self._word = self._word.strip(), ""
        if self._in_key and word:
            return json.dumps(word, ensure_ascii=False)
        word = _WORDS.get(word, word)
        try:
            _loads(word or "0")
        except ValueError:
            return json.dumps(word, ensure_ascii=False)
        return word

    def _outside(self, char: str) -> str:
        begins = not self._word.strip()
        if (char == '"' or (char in "{[" and not self._in_key)) and begins:
            self._word = ""
        elif char not in (":}" if self._in_key else ",]}"):
            self._word += char
            return ""
        text = self.rest() + self._between(char)
        if char in "{[":
            self._brackets.append(char)
        elif char in "}]":
            self._brackets = self._brackets[:-1]
        if char != '"':
            self._in_key = char in "{," and self._brackets[-1:] == ["{"]
        return text


def read_json(text: str) -> Any:
    """The value of a JSON text, or of a Python literal instead.

    Raises:
        ValueError: For anything else.
    """
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
        raise ValueError(f"{text} is not a JSON number")
    return value
