"""Streaming parser of a tool call in any of the formats of `call_forms`, with or without tags around it.

Values between tags are text and converted to JSON by the tool's schema; strings are streamed, other values at their end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping

from .call_forms import END_FUNCTION, FORMS, FUNCTION, HEAD, TAGS, Tags, partial_suffix
from .call_opening import OPEN_TAG, calls_in, json_head, quoted_names
from .deltas import Delta, ToolCallArgs, ToolCallBegin, ToolCallEnd
from .json_stream import JsonStream, TaggedStream
from .tool_schema import ToolSchema
from .value_scan import ValueScan

_UNKNOWN = ToolSchema({})  # an unknown tool


class ToolCallReader:
    """feed() the text from a call's tag, `<function=` or `{` on, until `done`; then `rest` is the text after the call.

    An `Opening` must have classified it as a call.

    Attributes:
        schemas: Tool name -> its arguments.
        first_index: Index of the first call in this block.
        new_id: Creates the id of a call from its index and name.
        whole: Whether no call was cut off.
    """

    def __init__(
        self,
        schemas: Mapping[str, ToolSchema],
        first_index: int,
        new_id: Callable[[int, str], str],
        tags: Tags = TAGS,
    ) -> None:
        self._schemas = schemas
        self._tags = tags
        self._new_id = new_id
        self.next_index = first_index
        self.done, self.whole = False, True
        self._final = self._cut = False
        self._buf = ""
        self._state: Callable[[], bool] = self._head
        self._events: list[Delta] = []
        self._tagged = self._open = self._fresh = False
        self._tool = _UNKNOWN
        self._keys: list[str] = []
        self._n_keys_sent = 0
        self._key = ""
        self._form = FORMS["xml"]
        self._quotes = True
        self._scan = ValueScan(self._form, self._quotes)
        self._sent = 0
        self._streaming = self._repeated = False
        self._late: list[tuple[str, str, int]] = []  # key, text, characters sent (-1: not even the quote)
        self._json = JsonStream()

    @property
    def rest(self) -> str:
        """Text that belongs to no call."""
        return self._buf

    def feed(self, text: str) -> list[Delta]:
        """Events completed by this text."""
        self._buf += text
        while not self.done and self._state():
            pass
        events, self._events = self._events, []
        return events

    def finish(self, cut: bool = False) -> list[Delta]:
        """End of the output: an incomplete call ends with truncated arguments.

        Args:
            cut: Whether a limit ended the output, so that missing closing tags are not assumed.
        """
        self._final, self._cut = True, cut
        events = self.feed("")
        if not self.done:
            if self._open and self._state == self._between and not cut:
                self._close_object()
            elif self._open:
                self._settle(set())  # emit held-back text unchanged
                self.whole = False
                self._end_call()
            self._buf, self.done = "", True
        events += self._events
        self._events = []
        return events

    # --- states: each consumes from the buffer and returns whether to continue

    def _head(self) -> bool:
        text = self._buf.lstrip()
        if text.startswith(self._tags.call):
            self._tagged, text = True, text[len(self._tags.call) :].lstrip()
        self._buf = text
        if self._tags.text and self._tagged and (match := HEAD.match(text)):
            self._begin(match[1])
            self._buf = text[match.end() :]
            self._json, self._state = TaggedStream(self._tags.text), self._object
            return True
        for form in FORMS.values():
            if (match := form.name.match(text)) and (self._tagged or form.bare):
                self._begin(match[1].strip())
                self._buf, self._fresh = text[match.end() :], True
                self._form, self._state = form, self._between
                return True
        if not text.startswith(("{", "[")):
            return False
        verdict, name, at = json_head(text, quoted_names(self._schemas))
        if verdict == "call":
            self._begin(name)
            self._buf = text[at:]
            self._json, self._state = JsonStream(), self._object
            return True
        stream = JsonStream()
        strict, taken = stream.feed(text)
        for name, arguments in calls_in(strict):
            self._begin(name)
            self._emit_args(json.dumps(arguments, ensure_ascii=False))
            self._end_call()
        self._buf = text[taken:]
        self._state = self._after
        return True

    def _between(self) -> bool:
        """State after the name of a call, or after an argument."""
        text = self._buf.lstrip()
        if self._fresh and text:
            self._fresh = False
            if text.startswith("{"):
                self._buf = text
                self._json, self._state = JsonStream(), self._object
                return True
        match = self._form.key.search(text)
        if match is None:
            match = self._form.open_key.search(text)
            self._buf = text[match.start() :] if match else ""
            return False
        if match[1] is not None:
            self._buf = text[match.end() :]
            self._begin_param(match[1].strip())
            return True
        self._buf = text[match.start() :]
        self._close_object()
        self._state = self._after
        return True

    def _value(self) -> bool:
        start = int(self._form.lines and self._buf.startswith("\n"))
        if (
            self._buf
            and not self._streaming
            and not self._repeated
            and not self._late
            and self._tool.is_text(self._key)
        ):
            self._emit_args('"')
            self._streaming, self._sent = True, start
        at = self._scan.look(self._buf, self._final)
        if at is None and self._final:
            return self._unclosed(start)
        if at is None:
            safe = self._scan.safe(self._buf)
            if self._streaming and safe > self._sent:
                self._emit_args(_escape(self._buf[self._sent : safe]))
                self._sent = safe
            return False
        end = at - (self._form.lines and at > start and self._buf[at - 1] == "\n")
        self._end_value(self._buf[start:end], start)
        self._buf = self._buf[at + len(self._form.end) :]
        self._state = self._between
        return True

    def _unclosed(self, start: int) -> bool:
        """An unclosed value at the end of the output: the end of a call may still close it, else it was cut off."""
        ending = self._form.forgotten.search(self._buf)
        if not self._cut and self._buf.rstrip().endswith(self._form.follow[1:]):
            plain = ValueScan(self._form, quotes=False)
            if self._quotes and plain.look(self._buf, True) is not None:
                # it was not a quoted call
                self._quotes, self._scan = False, ValueScan(self._form, quotes=False)
                return True
            if ending is not None:
                self._end_value(self._buf[start : ending.start()], start, late=True)
                self._buf = self._buf[ending.start(1) :]
                self._settle(self._lacking(self._tool.declared))
                self._close_object()
                self._state = self._after
                return True
        end = len(self._buf) - partial_suffix(self._buf, self._form.closing)
        if self._late:
            self._settle(set())
            if not self._repeated:
                self._emit_key(self._key)
                self._emit_args('"' + _escape(self._buf[start:end]) if self._tool.is_text(self._key) else "")
        elif self._streaming:
            self._emit_args(_escape(self._buf[self._sent : end]))
        self._buf = ""
        return False

    def _object(self) -> bool:
        """State in JSON arguments; the rest of the surrounding object is ignored."""
        strict, taken = self._json.feed(self._buf)
        self._buf = self._buf[taken:]
        self._emit_args(strict if self._open else "")
        if self._json.done:
            inner = self._open and not isinstance(self._json, TaggedStream)
            self._json, self._state = JsonStream(depth=1), self._object if inner else self._after
            if self._open:
                self._end_call()
            return True
        end_call, mark = self._tags.end_call, self._tags.text
        tags = (end_call,) if self._open else (end_call, END_FUNCTION)
        if not self._buf or not self._at_tag(*tags, mark):
            return False
        if mark.startswith(self._buf):  # drop a truncated tag
            self._buf = ""
            return False
        at_end = self._buf.startswith(tags)
        if self._open:
            self._emit_args(self._json.rest() + ("" if at_end else "<"))
        if at_end:  # an unclosed object is passed on unchanged
            if self._open:
                self._end_call()
            self._state = self._after
        else:
            self._buf = self._buf[1:]
        return True

    def _after(self) -> bool:
        """State after a call: closing tags, another call in the same block, or other text."""
        text = self._buf.lstrip()
        if text.startswith(END_FUNCTION):
            self._buf = text[len(END_FUNCTION) :]
            return True
        if text.startswith(self._tags.end_call):
            self._buf, self.done = text[len(self._tags.end_call) :], True
            return False
        if match := FORMS["xml"].name.match(text):
            if self._tagged or match[1].strip() in self._schemas:
                self._buf, self._state = text, self._head
                return True
        elif (not self._final or self._cut) and (
            any(tag.startswith(text) for tag in (END_FUNCTION, self._tags.end_call, FUNCTION))
            or OPEN_TAG.fullmatch(text)
        ):
            return False  # drop a truncated closing tag
        self.done = True
        return False

    def _at_tag(self, *tags: str) -> bool:
        """Whether the buffer cannot be a tag."""
        return self._final or not any(tag != self._buf and tag.startswith(self._buf) for tag in tags)

    # --- parameters

    def _begin_param(self, key: str) -> None:
        self._repeated = key in self._keys  # the first one counts
        if not self._repeated:
            self._keys.append(key)
            if not self._late:
                self._emit_key(key)
        self._key = key
        self._streaming, self._sent = False, 0
        self._scan = ValueScan(self._form, self._quotes)
        self._state = self._value

    def _end_value(self, text: str, start: int, late: bool = False) -> None:
        """late: emit it at the call's end, like a text that may contain a required parameter after a missing end tag."""
        if self._repeated:
            return
        sent = self._sent - start if self._streaming else -1
        late = late or bool(self._late)
        if not late and self._scan.odd is not None:
            late = not self._lacking(self._tool.required).isdisjoint(self._form.key_line.findall(text))
        if late:
            self._late.append((self._key, text, sent))
        else:
            self._send_value(self._key, text, sent)
        self._streaming = False

    def _lacking(self, names: Iterable[str]) -> set[str]:
        """The tool's missing arguments."""
        return set(names) - set(self._keys)

    def _settle(self, keys: set[str]) -> None:
        """Emit late values; lines `<parameter=key>` inside them begin parameters of these `keys`."""
        late, self._late = self._late, []
        for i, (key, text, sent) in enumerate(late):
            start = 0
            for match in (*self._form.key_line.finditer(text), None):
                if match is not None and match[1] not in keys:
                    continue
                if i or start:
                    self._emit_key(key)
                    sent = -1
                self._send_value(key, text[start : match.start() if match else len(text)], sent)
                if match is not None:
                    keys.discard(match[1])
                    key, start = match[1], match.end()

    def _send_value(self, key: str, text: str, sent: int) -> None:
        if self._tool.is_text(key):
            self._emit_args(('"' if sent < 0 else "") + _escape(text[max(sent, 0) :]) + '"')
        else:
            self._emit_args(json.dumps(self._tool.value(key, text), ensure_ascii=False))

    def _emit_key(self, key: str) -> None:
        self._emit_args(
            ("{" if self._n_keys_sent == 0 else ", ") + json.dumps(key, ensure_ascii=False) + ": "
        )
        self._n_keys_sent += 1

    def _close_object(self) -> None:
        self._settle(self._lacking(self._tool.required))
        self._emit_args("}" if self._n_keys_sent else "{}")
        self._end_call()

    # --- events

    def _begin(self, name: str) -> None:
        self._tool = self._schemas.get(name, _UNKNOWN)
        self._n_keys_sent, self._keys, self._late = 0, [], []
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
