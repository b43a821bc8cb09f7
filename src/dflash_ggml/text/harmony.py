"""Parser and templates' helpers for harmony, the output format of gpt-oss: messages with channels, separated by control tokens.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

Analysis is reasoning, a message with a recipient is a call, and all others are visible text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from .chat_parser import ChatParser, ReasoningMode, new_call_id
from .deltas import Delta, ToolCallArgs, ToolCallBegin, ToolCallEnd
from .json_stream import JsonStream, read_json
from .stopping import StopStrings
from .tool_schema import ToolSchema

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
NAMESPACE = "functions."  # recipient prefix of a request's tools
FINAL = (f"{CHANNEL}final", MESSAGE)  # texts that precede an answer
# untrained levels of effort -> the nearest trained ones
EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}

_ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_HEAD = re.compile(r"\s*(assistant)?\s*(to=\S*)?\s*")  # start of a message, before its channel
_LONGEST_HEAD = 200


def is_harmony(template: str) -> bool:
    """Whether a chat template's source is for harmony."""
    return CHANNEL in template and MESSAGE in template


def end_of_thought(with_tools: bool) -> str:
    """Text that ends reasoning, so that an answer follows, or, with tools, a call or a message to the user."""
    return f"{END}{START}assistant{CHANNEL}" + ("commentary" if with_tools else f"final{MESSAGE}")


def opened(prompt: str) -> tuple[str, str | None]:
    """The header and the text so far of the message that a rendered prompt leaves open; None without one."""
    _, start, rest = prompt.rpartition(START)
    head, message, text = rest.partition(MESSAGE)
    is_open = start and message and not any(mark in text for mark in (END, CALL, RETURN))
    return (head, text) if is_open else ("", None)


def reasoning_at_start(prompt: str) -> ReasoningMode:
    """Whether reasoning may follow a rendered prompt, continues after it, or is over."""
    head, text = opened(prompt)
    if text is None:
        return "open"
    return "begun" if _channel(head) == "analysis" else "closed"


def prepared(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages in the form that the templates expect: `thinking`, which includes text before a call, and one call per message,
    followed by its result."""
    rows: list[dict[str, Any]] = []
    at = 0
    while at < len(messages):
        row, at = dict(messages[at]), at + 1
        calls, thought = row.get("tool_calls") or (), row.pop("reasoning_content", None)
        if calls:
            thought = "\n\n".join(text for text in (thought, row.get("content")) if text)
            row["content"] = ""
        if thought:
            row["thinking"] = thought
        if len(calls) < 2:
            rows.append(row)
            continue
        results = [dict(m) for m in takewhile(lambda m: m["role"] == "tool", messages[at:])]
        at += len(results)
        for i, call in enumerate(calls):
            rows.append({**(row if i == 0 else {"role": "assistant", "content": ""}), "tool_calls": [call]})
            if results:
                named = (n for n, m in enumerate(results) if m.get("tool_call_id", "") == call.get("id"))
                rows.append(results.pop(next(named, 0)))
        rows += results
    return rows


def described(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools with descriptions, which the templates require."""
    return [{**tool, "function": {"description": "", **tool["function"]}} for tool in tools]


class HarmonyParser(ChatParser):
    """ChatParser for harmony. Control tokens come through `mark`, so that their names in a text stay text.

    Args:
        prompt: The rendered prompt, whose end determines the initial state.
        split: Whether reasoning is separated; otherwise it is text between tags. Consecutive messages of one kind are
            separate paragraphs.
    """

    tags = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)

    def __init__(
        self,
        prompt: str,
        *,
        split: bool,
        schemas: Mapping[str, ToolSchema] | None,
        stops: StopStrings | None = None,
        new_id: Callable[[int, str], str] = new_call_id,
    ) -> None:
        super().__init__(reasoning="closed", schemas=schemas, stops=stops, new_id=new_id, bare=False)
        self._split = split
        self._arguments: _Arguments | None = None
        head, text = opened(prompt)
        is_analysis = _channel(head) == "analysis"
        self._head = "" if text is None else None  # header of the next message; None inside of one
        self._is_shown = is_analysis and not split  # reasoning, emitted as text
        self.in_reasoning = is_analysis and split
        self._emitted_any = self.in_reasoning and bool((text or "").strip())

    @property
    def in_call(self) -> bool:
        """Whether the arguments of a call are being written."""
        return self._arguments is not None

    @property
    def in_text(self) -> bool:
        """Whether the visible text is being written."""
        return self._head is None and super().in_text

    def mark(self, tag: str) -> list[Delta]:
        """Process a control token."""
        events: list[Delta] = []
        if self.stopped:
            return events
        if self._head is None and tag not in (MESSAGE, CONSTRAIN):
            self._close(events)
            self._head = CHANNEL if tag == CHANNEL else ""
        elif self._head is not None and tag == MESSAGE:
            head, self._head = self._head, None
            self._open(head, events)
        elif self._head is not None:
            self._head = self._head + tag if tag in (CHANNEL, CONSTRAIN) else ""
        return events

    def _advance(self, events: list[Delta], final: bool = False, cut: bool = False) -> None:
        text, self._buf = self._buf, ""
        if self.stopped:
            return
        if self._head is not None:
            self._head += text
            if CHANNEL not in self._head and not self._is_head(self._head, final):
                # malformed output
                text, self._head = self._head.removeprefix("assistant"), None
                self._pass(text, events)
        elif self._arguments is not None:
            events += self._arguments.feed(text)
        elif self.in_reasoning:
            self._reason(text, events)
        else:
            self._pass(text, events)
        if final and self._arguments is not None:
            self._end_call(events, cut)

    @staticmethod
    def _is_head(text: str, final: bool) -> bool:
        return bool(_HEAD.fullmatch(text)) or (not final and len(text) < _LONGEST_HEAD and "\n" not in text)

    def _open(self, head: str, events: list[Delta]) -> None:
        recipient, is_analysis = _RECIPIENT.search(head), _channel(head) == "analysis"
        if recipient and self._schemas is not None:
            self._end_stops(events)
            self._space = ""
            name = recipient[1].removeprefix(NAMESPACE)
            events.append(ToolCallBegin(self.n_calls, self._new_id(self.n_calls, name), name))
            self._arguments = _Arguments(self.n_calls)
        elif is_analysis and self._split:
            self.in_reasoning = True
            self._space = "\n\n" if self._emitted_any else ""
        else:
            self._is_shown = is_analysis
            between = "\n\n" if self._has_text else ""
            self._pass(between + (_ANALYSIS if is_analysis else ""), events)

    def _close(self, events: list[Delta]) -> None:
        if self._arguments is not None:
            self._end_call(events)
        elif self._is_shown:
            self._pass(END, events)
        elif not self.in_reasoning:
            self._end_stops(events)
        if self.in_reasoning:
            self._space = ""
        self.in_reasoning = self._is_shown = False

    def _end_call(self, events: list[Delta], cut: bool = False) -> None:
        assert self._arguments is not None
        events += [*self._arguments.finish(cut), ToolCallEnd(self.n_calls)]
        self.n_calls += 1
        self._arguments = None


class _Arguments:
    """Streams a call's arguments as one strict JSON object."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._text = ""  # before it is known to be an object
        self._stream: JsonStream | None = None

    def feed(self, text: str) -> list[Delta]:
        if self._stream is None:
            self._text += text
            if not self._text.lstrip().startswith("{"):
                return []
            self._stream, text = JsonStream(), self._text.lstrip()
        return self._args(self._stream.feed(text)[0])

    def finish(self, cut: bool) -> list[Delta]:
        if self._stream is not None:
            return [] if self._stream.done else self._args(self._stream.rest())
        value: Any = {}
        try:
            for _ in range(3):  # an object written as text
                value = read_json(value if isinstance(value, str) else self._text)
                if not isinstance(value, str):
                    break
        except ValueError:
            value = None
        if cut and not self._text.strip():
            return []
        if not isinstance(value, dict):
            value = {"input": self._text} if self._text.strip() else {}
        return self._args(json.dumps(value, ensure_ascii=False))

    def _args(self, text: str) -> list[Delta]:
        return [ToolCallArgs(self._index, text)] if text else []


def _channel(head: str) -> str:
    match = _CHANNEL.search(head)
    return match[1] if match else ""
