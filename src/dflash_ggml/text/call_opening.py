"""Recognition of a tool call's opening: a quoted tag is text, a call may lack its tag."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from .call_forms import (
    ARG_KEY,
    END_CALL,
    END_FUNCTION,
    FORMS,
    FUNCTION,
    HEAD,
    OPEN_HEAD,
    PARAMETER,
    TAGS,
    Tags,
    after_blanks,
)
from .json_stream import JsonStream, read_json

OPEN_TAG = re.compile(r"<function=[^<>\n]{0,200}")
_OPEN_NAME = re.compile(r"[\w.:/-]{1,200}\s*")
_BODIES = (PARAMETER, END_FUNCTION, "{")

Verdict = Literal["call", "text", "wait"]


def starts_with_any(text: str, options: tuple[str, ...]) -> Verdict:
    """ "call" if the text starts with an option, "wait" if more text could make it so."""
    if text.startswith(options):
        return "call"
    return "wait" if any(option.startswith(text) for option in options) else "text"


def json_head(text: str, quoted: Mapping[str, str]) -> tuple[Verdict, str, int]:
    """Whether a text begins with `{"name": "x", "arguments": ` of a known tool, in this order.

    Args:
        quoted: Names by their JSON spelling. For a call the result includes the tool's name and the arguments' start.
    """
    at, name, known = 0, "", tuple(quoted)
    for options in (
        *(("{",), ('"name"',), (":",), known, (",",)),
        *(('"arguments"', '"parameters"'), (":",), ("{",)),
    ):
        at = after_blanks(text, at)
        verdict = starts_with_any(text[at : at + 300], options)
        if verdict != "call":
            return verdict, "", 0
        found = max((o for o in options if text.startswith(o, at)), key=len)
        name = quoted.get(found, name)
        at += len(found)
    return "call", name, at - 1


class Opening:
    """Classifies a growing text that begins with a call's first tag, `<function=` or `{`; see `judge`.

    Args:
        schemas: Schemas by the names of known tools.
    """

    def __init__(self, schemas: Mapping[str, Any], tags: Tags = TAGS) -> None:
        self._schemas = schemas
        self._tags = tags
        self._quoted = quoted_names(schemas)
        self._stream: JsonStream | None = None
        self._strict: list[str] = []
        self._at = 0

    def judge(self, text: str, final: bool = False) -> Verdict:
        """Classify the text as far as possible.

        Args:
            text: Text from the tag on.
            final: Whether it is complete.
        """
        tagged = text.startswith(self._tags.call)
        start = after_blanks(text, len(self._tags.call)) if tagged else 0
        if text.startswith(("{", "["), start):
            verdict = self._object(text, start, tagged)
        elif tagged and self._tags.text:
            body = text[start : start + 500]
            verdict = "call" if HEAD.match(body) else "wait" if OPEN_HEAD.fullmatch(body) else "text"
        else:
            verdict = self._function(text[start : start + 500], tagged, final)
        return "text" if final and verdict == "wait" else verdict

    def _function(self, body: str, tagged: bool, final: bool) -> Verdict:
        match = FORMS["xml"].name.match(body)
        if match is None and tagged and not FUNCTION.startswith(body[: len(FUNCTION)]):
            return self._keyed(body)
        if match is None:
            return "wait" if FUNCTION.startswith(body) or OPEN_TAG.fullmatch(body) else "text"
        rest = body[match.end() :].lstrip()
        if tagged:
            # cut directly after the name: still a call
            return "call" if final and not rest else starts_with_any(rest, (*_BODIES, END_CALL))
        return starts_with_any(rest, _BODIES) if match[1].strip() in self._schemas else "text"

    def _keyed(self, body: str) -> Verdict:
        """A call that begins with the tool's bare name: with an argument, or of a known tool without arguments."""
        if match := FORMS["keys"].name.match(body):
            is_call = body.startswith(ARG_KEY, match.end()) or match[1] in self._schemas
            return "call" if is_call else "text"
        name = _OPEN_NAME.match(body)
        rest = body[name.end() :] if name else body
        return "wait" if any(tag.startswith(rest) for tag in (ARG_KEY, END_CALL)) else "text"

    def _object(self, text: str, start: int, tagged: bool) -> Verdict:
        verdict, _, _ = json_head(text[start : start + 1000], self._quoted)
        if verdict != "text" or not tagged:
            return verdict
        if self._stream is None:
            self._stream, self._at = JsonStream(), start
        strict, taken = self._stream.feed(text[self._at :])
        self._strict.append(strict)
        self._at += taken
        if self._stream.done:
            return "call" if calls_in("".join(self._strict)) else "text"
        return "wait" if self._at == len(text) else "text"


def calls_in(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Names and arguments of the calls in a JSON object or a list of them; none if it is anything else."""
    try:
        value = read_json(text)
        calls = [_call(one) for one in (value if isinstance(value, list) else [value])]
    except (ValueError, TypeError, KeyError, AttributeError):
        return []
    return calls


def _call(value: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name, arguments = value["name"], value.get("arguments", value.get("parameters")) or {}
    for _ in range(3):  # objects written as text, and text that holds such a text
        if isinstance(arguments, str):
            arguments = read_json(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise TypeError("not a call")
    return name, arguments


def quoted_names(names: Iterable[str]) -> dict[str, str]:
    """Names by their JSON spelling."""
    return {'"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"': name for name in names}
