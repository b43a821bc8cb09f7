"""Streaming output of an answer: text on standard output, with dimmed reasoning before it (on standard error in a pipe)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TextIO

from ..session.answer import Answer
from ..session.events import Event, Finish, Progress, ReasoningDelta, TextDelta
from .streams import named

DIM, PLAIN = "\x1b[2m", "\x1b[22m"


class Writer:
    """text() and thinking() write unbuffered UTF-8; end() closes the answer with a line end.

    On a terminal both go to `out`, reasoning dimmed and followed by an empty line. In a pipe or file `out` receives only the
    answer, and reasoning goes to `notes`.
    """

    def __init__(self, out: TextIO, notes: TextIO) -> None:
        self._out = out
        self._aside = not out.isatty()
        self._thoughts = notes if self._aside else out
        self._dim, self._plain = (DIM, PLAIN) if self._thoughts.isatty() else ("", "")
        self._is_thinking = False

    def thinking(self, text: str) -> None:
        """Write more reasoning."""
        _write(self._thoughts, text if self._is_thinking else self._dim + text)
        self._is_thinking = True

    def text(self, text: str) -> None:
        """Write more of the answer."""
        self.end_thinking("" if self._aside else "\n")
        _write(self._out, text)

    def end(self) -> None:
        """End the answer."""
        self.end_thinking()
        _write(self._out, "\n")

    def end_thinking(self, gap: str = "") -> None:
        """Reset the terminal's style, if reasoning was open."""
        if self._is_thinking:
            _write(self._thoughts, f"{self._plain}\n{gap}")
            self._is_thinking = False


def write_answer(
    events: Iterable[Event], writer: Writer | None, progress: Callable[[str, int, int], object]
) -> Answer:
    """Stream text and reasoning, if there is a writer.

    Args:
        events: Events of one answer.
        writer: Destination; None: none.
        progress: Called with the prompt tokens scored or prefilled so far, and in total, by stage.

    Returns:
        The whole answer.
    """
    answer = Answer()
    try:
        for event in events:
            answer.feed(event)
            if isinstance(event, Progress):
                progress(event.stage, event.done, event.total)
            elif writer is not None and isinstance(event, TextDelta):
                writer.text(event.text)
            elif writer is not None and isinstance(event, ReasoningDelta):
                writer.thinking(event.text)
            elif writer is not None and isinstance(event, Finish):
                writer.end()
    finally:
        if writer is not None:
            writer.end_thinking()
    return answer


def _write(stream: TextIO, text: str) -> None:
    buffer = getattr(stream, "buffer", None)
    with named("standard error" if stream is sys.stderr else "standard output"):
        if buffer is None:  # a text-only stream
            stream.write(text)
            return
        stream.flush()
        buffer.write(text.encode())
        buffer.flush()
