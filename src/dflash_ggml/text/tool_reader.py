"""Reads the inside of one `<tool_call>` block as it streams in: Qwen's parameter form, or a JSON object.

    <function=name>                          {"name": "name", "arguments": {...}}
    <parameter=key>
    value
    </parameter>
    </function>

Parameter values are text and become JSON by the tool's schema; string values stream, others wait for their end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from .deltas import Delta, TextDelta, ToolCallArgs, ToolCallBegin, ToolCallEnd
from .tools import coerce, parameter_types

_FUNCTION = re.compile(r"<function=([^>\n]+)>")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>")
_JSON_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
# a value ends at its own closing tag; the others are for models that forget it
_VALUE_ENDS = ("\n</parameter>", "</parameter>", "\n<parameter=", "\n</function>")


def partial_suffix(text: str, markers: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that could be the beginning of a marker (0 if none)."""
    for n in range(min(len(text), max(map(len, markers), default=0)), 0, -1):
        if any(len(m) > n and m.startswith(text[-n:]) for m in markers):
            return n
    return 0


class ToolCallReader:
    """feed() the text between the tool-call tags, then close() it or truncate() it.

    schemas: tool name -> JSON schema of its arguments; first_index: index of the first call in this block;
    new_id: makes the id of a call from its index and name.
    """

    def __init__(
        self, schemas: Mapping[str, Mapping[str, Any]], first_index: int, new_id: Callable[[int, str], str]
    ) -> None:
        self._schemas = schemas
        self._new_id = new_id
        self.next_index = first_index
        self._buf = ""
        self._raw = ""
        self._state: Callable[[], bool] = self._head
        self._events: list[Delta] = []
        self._open = False
        self._parameters: Mapping[str, Any] = {}
        self._n_params = 0
        self._key = ""
        self._streaming = False
        self._depth = 0
        self._in_string = self._escaped = False

    @property
    def in_string(self) -> bool:
        """Inside a string of the JSON form, where even a closing tag is text."""
        return self._state == self._json_args and self._in_string

    def feed(self, text: str) -> list[Delta]:
        """Events that this text completes."""
        self._raw += text if not self._open and self._state == self._head else ""
        self._buf += text
        while self._state():
            pass
        events, self._events = self._events, []
        return events

    def close(self) -> list[Delta]:
        """The closing tag was read: finish what is open; text that is no call at all comes back as a TextDelta."""
        events = self.feed("")
        if self._open:
            if self._state == self._value:
                self._end_value(self._buf)
            if self._state == self._json_args:
                self._emit_args(self._buf)  # an object the model left open: passed on as it is
            elif self._state == self._params:
                self._emit_args("}" if self._n_params else "{}")
            self._end_call()
        elif self._state == self._head and self._buf.strip():
            self._whole_json(self._buf)
        events += self._events
        self._events = []
        return events

    def truncate(self) -> list[Delta]:
        """The output ended inside the block: the call is closed with arguments cut where they are."""
        if self._open:
            self._end_call()
        elif self._state == self._head and self._raw:
            self._events.append(TextDelta("<tool_call>" + self._raw))
        events, self._events = self._events, []
        return events

    # --- states: each consumes from the buffer and says whether another look is worthwhile

    def _head(self) -> bool:
        if match := _FUNCTION.search(self._buf):
            self._begin(match.group(1).strip())
            self._buf = self._buf[match.end() :]
            self._state = self._params
            return True
        if match := _JSON_HEAD.match(self._buf.lstrip()):
            self._begin(json.loads(match.group(1)))
            self._buf = self._buf.lstrip()[match.end() :]
            self._depth, self._in_string, self._escaped = 0, False, False
            self._state = self._json_args
            return True
        return False

    def _params(self) -> bool:
        end, match = self._buf.find("</function>"), _PARAMETER.search(self._buf)
        if match and (end < 0 or match.start() < end):
            self._key = match.group(1).strip()
            self._emit_args(
                ("{" if self._n_params == 0 else ", ") + json.dumps(self._key, ensure_ascii=False) + ": "
            )
            self._n_params += 1
            self._streaming = False
            self._buf = self._buf[match.end() :]
            self._state = self._value
            return True
        if end >= 0:
            self._emit_args("}" if self._n_params else "{}")
            self._end_call()
            self._buf = self._buf[end + len("</function>") :]
            self._raw = ""
            self._state = self._head
            return True
        return False

    def _value(self) -> bool:
        text_only = parameter_types(self._parameters, self._key) == {"string"}
        if not self._streaming and self._buf and text_only:
            self._buf = self._buf.removeprefix("\n")
            self._emit_args('"')
            self._streaming = True
        found = [(at, m) for m in _VALUE_ENDS if (at := self._buf.find(m)) >= 0]
        if found:
            at, marker = min(found)
            # the parameter's own closing tag is consumed, anything else belongs to what follows
            rest = self._buf[at + (len(marker) if marker.endswith("</parameter>") else 0) :]
            self._end_value(self._buf[:at])
            self._buf = rest
            return True
        if text_only and self._buf:
            keep = partial_suffix(self._buf, _VALUE_ENDS)
            self._emit_args(_escape(self._buf[: len(self._buf) - keep]))
            self._buf = self._buf[len(self._buf) - keep :]
        return False

    def _end_value(self, text: str) -> None:
        if self._streaming:
            self._emit_args(_escape(text) + '"')
        else:
            value = coerce(
                text.removeprefix("\n").removesuffix("\n"), parameter_types(self._parameters, self._key)
            )
            self._emit_args(json.dumps(value, ensure_ascii=False))
        self._streaming = False
        self._buf = ""
        self._state = self._params

    def _json_args(self) -> bool:
        for i, char in enumerate(self._buf):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._emit_args(self._buf[: i + 1])
                    self._end_call()
                    self._state = self._rest
                    return False
        self._emit_args(self._buf)
        self._buf = ""
        return False

    def _rest(self) -> bool:
        self._buf = ""  # the closing brace of the outer object
        return False

    # --- events

    def _whole_json(self, text: str) -> None:
        try:
            call = json.loads(text)
            name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            if not isinstance(name, str) or not isinstance(arguments, dict):
                raise TypeError("not a call")
        except (json.JSONDecodeError, TypeError, KeyError, AttributeError):
            self._events.append(TextDelta(f"<tool_call>{self._raw}</tool_call>"))
            return
        self._begin(name)
        self._emit_args(json.dumps(arguments, ensure_ascii=False))
        self._end_call()

    def _begin(self, name: str) -> None:
        self._parameters = self._schemas.get(name, {})
        self._n_params = 0
        self._open = True
        self._events.append(ToolCallBegin(self.next_index, self._new_id(self.next_index, name), name))

    def _emit_args(self, text: str) -> None:
        if text:
            self._events.append(ToolCallArgs(self.next_index, text))

    def _end_call(self) -> None:
        self._events.append(ToolCallEnd(self.next_index))
        self.next_index += 1
        self._open = False


def _escape(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
