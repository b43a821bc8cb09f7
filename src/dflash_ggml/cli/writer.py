"""An answer as it comes: text on standard output, thinking dimmed before it, or on standard error where that is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TextIO

from ..session.answer import Answer
from ..session.events import Event, Finish, Progress, ReasoningDelta, TextDelta
from .streams import named

DIM, PLAIN = "\x1b[2m", "\x1b[22m"


class Writer:
    """text() and thinking() write at once, as UTF-8; end() closes the answer with a line's end.

    Where `out` is a terminal both go there, thinking dimmed and an empty line behind it. In a pipe or a file `out` holds
    the answer alone, and thinking goes to `notes`.
    """

    def __init__(self, out: TextIO, notes: TextIO) -> None:
        self._out = out
        self._aside = not out.isatty()
        self._thoughts = notes if self._aside else out
        self._dim, self._plain = (DIM, PLAIN) if self._thoughts.isatty() else ("", "")
        self._is_thinking = False

    def thinking(self, text: str) -> None:
        """More of the reasoning."""
        _write(self._thoughts, text if self._is_thinking else self._dim + text)
        self._is_thinking = True

    def text(self, text: str) -> None:
        """More of the answer."""
        self.end_thinking("" if self._aside else "\n")
        _write(self._out, text)

    def end(self) -> None:
        """The answer is over."""
        self.end_thinking()
        _write(self._out, "\n")

    def end_thinking(self, gap: str = "") -> None:
        """The terminal writes as before; nothing where no thinking is open."""
        if self._is_thinking:
            _write(self._thoughts, f"{self._plain}\n{gap}")
            self._is_thinking = False


def write_answer(
    events: Iterable[Event], writer: Writer | None, progress: Callable[[str, int, int], object]
) -> Answer:
    """Write text and thinking as they come, if there is a writer.

    Args:
        events: of one answer.
        writer: where it goes; None: nowhere.
        progress: called with how many tokens of the prompt have been scored or prefilled, and how many will be, by stage.

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
        if buffer is None:  # a stream of text alone
            stream.write(text)
            return
        stream.flush()
        buffer.write(text.encode())
        buffer.flush()
