"""Streaming parser of an assistant's text: reasoning, visible text and tool calls."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Literal

from .call_forms import FUNCTION, TAGS, Tags, after_blanks, partial_suffix
from .call_opening import Opening
from .deltas import Delta, ReasoningDelta, TextDelta
from .stopping import StopStrings
from .tool_reader import ToolCallReader
from .tool_schema import ToolSchema

_TELLING = len("<tool")  # characters that identify the beginning of a tag

ReasoningMode = Literal["off", "closed", "open", "begun"]


def new_call_id(index: int, name: str) -> str:
    """A unique tool-call id."""
    return f"call_{uuid.uuid4().hex[:24]}"


def reasoning_at_start(prompt: str, form: Tags = TAGS) -> ReasoningMode:
    """Whether the rendered prompt ends inside an open think block."""
    return "open" if prompt.rstrip().endswith(form.think) else "closed"


class ChatParser:
    """feed() text, read events; flush() at the end.

    Attributes:
        reasoning: Start state: "open" inside reasoning, "begun" after its first words, "closed" outside; "off" leaves
            the tags in the text.
        schemas: Tool name -> its arguments, None: tool-call tags stay in the text.
        stops: Matcher for the visible text; after a match `stopped` is True and later text is ignored.
        bare: Whether calls may lack their tags; False if the answer itself may look like one.
        form: The tags. Only the closing tag ends reasoning; calls inside unclosed reasoning count if the output ends
            with them.
        tags: Tags that may be control tokens, passed to `mark`.
    """

    tags: tuple[str, ...] = TAGS.tokens

    def __init__(
        self,
        *,
        reasoning: ReasoningMode,
        schemas: Mapping[str, ToolSchema] | None,
        stops: StopStrings | None = None,
        new_id: Callable[[int, str], str] = new_call_id,
        bare: bool = True,
        form: Tags = TAGS,
    ) -> None:
        self._form = form
        if form is not TAGS:
            self.tags = form.tokens
        self._schemas = schemas
        self._bare = bare and schemas is not None
        self._split = reasoning != "off"
        self._stops = stops
        self._new_id = new_id
        self._reader: ToolCallReader | None = None
        self._opening: Opening | None = None  # classifies the text at the start of _buf
        self._marker = ""  # that text
        self._buf = ""
        self._space = ""
        self._looked = 0
        self._has_text = False
        self._emitted_any = reasoning == "begun"
        self._trim = False
        self._passed = 0
        self.in_reasoning = reasoning in ("open", "begun")
        self.n_calls = 0
        self.stopped = False
        self.text_out = 0  # settled characters of visible text: emitted or dropped

    @property
    def in_call(self) -> bool:
        """Inside a tool call."""
        return self._reader is not None

    @property
    def in_text(self) -> bool:
        """In visible text, or in undecided text."""
        return not (self.in_reasoning or self.in_call)

    @property
    def text_in(self) -> int:
        """Characters of visible text received, undecided text included."""
        return self._passed + (0 if self.in_call or self.in_reasoning else len(self._buf))

    def feed(self, text: str) -> list[Delta]:
        """Events completed by this text; possible beginnings of tags and stop strings are held back."""
        events: list[Delta] = []
        self._buf += text
        self._advance(events)
        return events

    def mark(self, tag: str) -> list[Delta]:
        """As feed(), for one of `tags` that was a control token."""
        return self.feed(tag)

    def flush(self, cut: bool = False) -> list[Delta]:
        """End of the output: everything held back that is not part of a stop string.

        Args:
            cut: Whether a limit ended it.
        """
        events: list[Delta] = []
        self._advance(events, final=True, cut=cut)
        if not self.stopped and not self.in_reasoning:
            if self._stops is not None:
                self._say(self._stops.flush(), events)
            if self._space and not self.n_calls:
                events.append(TextDelta(self._space))
            self.text_out = self.text_in
        return events

    def _advance(self, events: list[Delta], final: bool = False, cut: bool = False) -> None:
        more = True
        while more and not self.stopped:
            if self._reader is not None:
                more = self._read_call(self._reader, events, final, cut)
            elif self.in_reasoning:
                more = self._read_reasoning(events, final)
            else:
                more = self._read_text(events, final, cut)

    # --- states: each consumes from the buffer and returns whether to continue

    def _read_call(self, reader: ToolCallReader, events: list[Delta], final: bool, cut: bool) -> bool:
        events += reader.feed(self._buf)
        if final and not reader.done:
            events += reader.finish(cut)
        self.n_calls = reader.next_index
        self._buf = reader.rest if reader.done else ""
        if reader.done:
            self._reader, self._trim = None, True
        return reader.done

    def _read_reasoning(self, events: list[Delta], final: bool) -> bool:
        end = self._buf.find(self._form.end_think, self._looked)
        if end >= 0:
            self._reason(self._buf[:end], events)
            self._buf = self._buf[end + len(self._form.end_think) :]
            self.in_reasoning, self._trim, self._space = False, True, ""
            self._looked, self._opening = 0, None
            return True
        at = self._buf.find(self._form.call) if self._schemas is not None else -1
        if at < 0:
            tags = (
                (self._form.end_think, self._form.call)
                if self._schemas is not None
                else (self._form.end_think,)
            )
            self._release(0 if final else partial_suffix(self._buf, tags), events)
            return False
        self._reason(self._buf[:at], events)
        self._buf = self._buf[at:]
        self._opening = self._opening or Opening(self._schemas or {}, self._form)
        if self._opening.judge(self._buf, final) == "text":
            self._reason(self._form.call, events)
            self._buf, self._looked, self._opening = self._buf[len(self._form.call) :], 0, None
            return True
        self._looked = max(len(self._buf) - len(self._form.end_think) + 1, 0)
        if final:
            self._opening = None
            if not self._all_calls(self._buf):
                self._release(0, events)
                return False
            self.in_reasoning, self._space = False, ""
        return final

    def _read_text(self, events: list[Delta], final: bool, cut: bool) -> bool:
        found = (0, self._marker) if self._opening is not None else self._find_marker()
        if found is None:
            if cut:
                self._drop_cut_tag()
            keep = 0 if final else partial_suffix(self._buf, self._markers)
            head, self._buf = self._buf[: len(self._buf) - keep], self._buf[len(self._buf) - keep :]
            self._pass(head, events)
            return False
        at, marker = found
        head, self._buf = self._buf[:at], self._buf[at:]
        self._pass(head, events)
        if self.stopped:
            return False
        if marker == self._form.think:
            self._end_stops(events)
            self._buf = self._buf[len(self._form.think) :]
            self.in_reasoning, self._emitted_any, self._space = True, False, ""
            return True
        assert self._schemas is not None
        self._opening = self._opening or Opening(self._schemas, self._form)
        verdict = self._opening.judge(self._buf, final)
        if cut and verdict == "text" and marker != "{" and self._opening.judge(self._buf) == "wait":
            self._buf = self._space = ""  # a limit cut the opening of a call: drop it
            return False
        if verdict == "wait":
            self._marker = marker
            return False
        self._opening = None
        if verdict == "text":
            self._buf = self._buf[len(marker) :]
            self._pass(marker, events)
        else:
            self._end_stops(events)
            self._space = ""
            self._reader = ToolCallReader(self._schemas, self.n_calls, self._new_id, self._form)
        return True

    def _drop_cut_tag(self) -> None:
        """Drop an incomplete call tag at the end; a short one only directly after another call."""
        tags = tuple(tag for tag in self._markers if tag in (self._form.call, FUNCTION))
        n = partial_suffix(self._buf, tags)
        behind_call = self._trim and self.n_calls > 0 and not self._buf[: len(self._buf) - n].strip()
        if n >= _TELLING or (n and behind_call):
            self._buf = self._buf[: len(self._buf) - n]
            if behind_call or not self._buf:
                self._space = ""

    @property
    def _markers(self) -> tuple[str, ...]:
        think = (self._form.think,) if self._split and not self._has_text else ()
        call = (self._form.call,) if self._schemas is not None else ()
        return think + call + ((FUNCTION,) if self._bare else ())

    def _find_marker(self) -> tuple[int, str] | None:
        """The first possible markup in the buffer: a tag, or an object at the start of the answer."""
        found = [(at, marker) for marker in self._markers if (at := self._buf.find(marker)) >= 0]
        blank = after_blanks(self._buf, 0)
        if self._bare and not self._has_text and self._buf.startswith("{", blank):
            found.append((blank, "{"))
        first = min(found, default=None)
        if first is not None and first[1] == self._form.think and self._buf[: first[0]].strip():
            self._has_text = True  # counts only at the start of the answer
            return self._find_marker()
        return first

    # --- output

    def _all_calls(self, text: str) -> bool:
        """Whether a text consists of complete calls only."""
        assert self._schemas is not None
        while text:
            if Opening(self._schemas, self._form).judge(text, True) != "call":
                return False
            reader = ToolCallReader(self._schemas, 0, lambda index, name: "", self._form)
            reader.feed(text)
            if not reader.done:
                reader.finish(cut=True)
            text = reader.rest.strip()
            if not reader.whole or not (not text or text.startswith(self._form.call)):
                return False
        return True

    def _release(self, keep: int, events: list[Delta]) -> None:
        end = len(self._buf) - keep
        self._reason(self._buf[:end], events)
        self._buf, self._looked = self._buf[end:], 0

    def _reason(self, text: str, events: list[Delta]) -> None:
        text = self._space + text
        if not self._emitted_any:
            text = text.lstrip()
        body = text.rstrip()
        self._space = text[len(body) :]
        if body:
            self._emitted_any = True
            events.append(ReasoningDelta(body))

    def _pass(self, text: str, events: list[Delta]) -> None:
        """Pass visible text through the stop strings."""
        if not text:
            return
        self._passed += len(text)
        self._has_text = self._has_text or bool(text.strip())
        if self._stops is None:
            self._say(text, events)
            return
        visible, self.stopped = self._stops.feed(text)
        self._say(visible, events)
        if self.stopped and self._space:
            events.append(TextDelta(self._space))
            self._space = ""

    def _end_stops(self, events: list[Delta]) -> None:
        if self._stops is not None:
            self._say(self._stops.flush(), events)

    def _say(self, text: str, events: list[Delta]) -> None:
        """Emit visible text, without blank lines after reasoning and before a tool call."""
        self.text_out += len(text)
        if self._trim:
            text = text.lstrip("\r\n")
            self._trim = not text
        text = self._space + text
        body = text.rstrip() if self._schemas is not None else text
        self._space = text[len(body) :]
        if body:
            events.append(TextDelta(body))
