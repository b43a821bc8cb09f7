"""Turns an assistant's text, as it streams in, into reasoning, visible text and tool calls."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any, Literal

from .deltas import Delta, ReasoningDelta, TextDelta
from .stopping import StopStrings
from .tool_reader import ToolCallReader, partial_suffix

THINK, END_THINK, CALL, END_CALL = "<think>", "</think>", "<tool_call>", "</tool_call>"
TAGS = (THINK, END_THINK, CALL, END_CALL)

ReasoningMode = Literal["off", "closed", "open"]


def new_call_id(index: int, name: str) -> str:
    """A tool-call id that no other call has."""
    return f"call_{uuid.uuid4().hex[:24]}"


def reasoning_at_start(prompt: str) -> ReasoningMode:
    """Whether the rendered prompt ends inside an open `<think>` block."""
    return "open" if prompt.rstrip().endswith(THINK) else "closed"


class ChatParser:
    """feed() text, read events; flush() at the end.

    reasoning: "open" starts inside reasoning, "closed" outside, "off" leaves the tags in the text.
    schemas: tool name -> argument schema, None: tool-call tags stay in the text.
    stops: matcher for the visible text; `stopped` turns True when it matches and later text is ignored.
    text_in and text_out count the characters of visible text that came in and that were settled (said or dropped).
    """

    def __init__(
        self,
        *,
        reasoning: ReasoningMode,
        schemas: Mapping[str, Mapping[str, Any]] | None,
        stops: StopStrings | None = None,
        new_id: Callable[[int, str], str] = new_call_id,
    ) -> None:
        self._schemas = schemas
        self._split = reasoning != "off"
        self._stops = stops
        self._new_id = new_id
        self._reader: ToolCallReader | None = None
        self._buf = ""
        self._space = ""
        self._said_any = False
        self._trim = False
        self.in_reasoning = reasoning == "open"
        self.n_calls = 0
        self.stopped = False
        self.text_in = self.text_out = 0

    @property
    def in_call(self) -> bool:
        """Inside a tool-call block."""
        return self._reader is not None

    @property
    def _tags(self) -> tuple[str, ...]:
        if self._reader is not None:
            return (END_CALL,)
        calls = (CALL,) if self._schemas is not None else ()
        if self.in_reasoning:
            return (END_THINK, *calls)
        return ((THINK, END_THINK) if self._split else ()) + calls

    def feed(self, text: str) -> list[Delta]:
        """Events that this text completes; possible beginnings of tags and stop strings are held back."""
        events: list[Delta] = []
        self._buf += text
        if not self.in_reasoning and not self.in_call:
            self.text_in += len(text)
        while not self.stopped:
            tags = self._tags
            found = min(((at, t) for t in tags if (at := self._buf.find(t)) >= 0), default=None)
            if found is None:
                keep = partial_suffix(self._buf, tags)
                head, self._buf = self._buf[: len(self._buf) - keep], self._buf[len(self._buf) - keep :]
                self._plain(head, events)
                return events
            at, tag = found
            head, self._buf = self._buf[:at], self._buf[at + len(tag) :]
            self._plain(head, events)
            if self._reader is not None and self._reader.in_string:
                self._plain(tag, events)
            elif not self.stopped:
                self._switch(tag, events)
        return events

    def flush(self) -> list[Delta]:
        """The output is over: everything held back that is not part of a stop string."""
        events: list[Delta] = []
        if self.stopped:
            return events
        self._plain(self._buf, events)
        self._buf = ""
        if self._reader is not None:
            events += self._reader.truncate()
            self.n_calls = self._reader.next_index
            self._reader = None
        elif not self.in_reasoning:
            if self._stops is not None:
                self._say(self._stops.flush(), events)
            if self._space and not self.n_calls:
                events.append(TextDelta(self._space))
            self.text_out = self.text_in
        return events

    def _plain(self, text: str, events: list[Delta]) -> None:
        if not text:
            return
        if self._reader is not None:
            events += self._reader.feed(text)
        elif self.in_reasoning:
            self._reason(text, events)
        elif self._stops is not None:
            said, self.stopped = self._stops.feed(text)
            self._say(said, events)
            if self.stopped and self._space:
                events.append(TextDelta(self._space))
                self._space = ""
        else:
            self._say(text, events)

    def _reason(self, text: str, events: list[Delta]) -> None:
        text = self._space + text
        if not self._said_any:
            text = text.lstrip()
        body = text.rstrip()
        self._space = text[len(body) :]
        if body:
            self._said_any = True
            events.append(ReasoningDelta(body))

    def _say(self, text: str, events: list[Delta]) -> None:
        """Visible text, without blank lines before it (after reasoning) and before a tool call."""
        self.text_out += len(text)
        if self._trim:
            text = text.lstrip("\r\n")
            self._trim = not text
        text = self._space + text
        body = text.rstrip() if self._schemas is not None else text
        self._space = text[len(body) :]
        if body:
            events.append(TextDelta(body))

    def _switch(self, tag: str, events: list[Delta]) -> None:
        before = self.in_reasoning or self.in_call
        if tag == CALL:
            if self._stops is not None and not self.in_reasoning:
                self._say(self._stops.flush(), events)
            self.in_reasoning, self._space = False, ""
            assert self._schemas is not None
            self._reader = ToolCallReader(self._schemas, self.n_calls, self._new_id)
        elif tag == END_CALL:
            assert self._reader is not None
            events += self._reader.close()
            self.n_calls = self._reader.next_index
            self._reader, self._trim = None, True
        elif tag == THINK:
            if self._stops is not None:
                self._say(self._stops.flush(), events)
            self.in_reasoning, self._said_any, self._space = True, False, ""
        elif tag == END_THINK:
            self.in_reasoning, self._trim, self._space = False, True, ""
        now = self.in_reasoning or self.in_call
        if now and not before:
            self.text_in = self.text_out  # what is left in the buffer is no visible text
        elif before and not now:
            self.text_in = self.text_out + len(self._buf)
        elif not now:
            self.text_in -= len(tag)
