"""Streaming scanner for the end of a tool call's argument.

A value ends at its format's closing tag if the next argument, or the end of the function or the call, follows. A complete
call quoted inside a value belongs to it. Nothing else ends a value.
"""

from __future__ import annotations

import re

from .call_forms import END_CALL, FUNCTION, CallForm, after_blanks

_QUOTED_CALL = re.compile(r"<function=[^<>\n]{1,200}>[^\S\n]*\n\s*<parameter=[^<>\n]{1,200}>")
_QUOTED_PART = re.compile(r"<function=[^<>\n]{0,200}(>[^\S\n]*(\n\s*(<[^<>\n]{0,210})?)?)?\Z")


class ValueScan:
    """Scans the growing text after the argument's tag; see `look`.

    Attributes:
        odd: Index of the first tag that may not be part of the value, None if there is none; the text after it may be
            parsed differently later.
        quotes: Whether to treat complete calls inside the value as quoted, if the format supports that.
    """

    def __init__(self, form: CallForm, quotes: bool) -> None:
        self._form = form
        self._quotes = quotes and form.quotes
        self._markers = (form.end, FUNCTION, *form.follow) if form.quotes else (form.end, END_CALL)
        self._at = 0
        self._depth = 0
        self.odd: int | None = None

    def look(self, text: str, final: bool = False) -> int | None:
        """Start of the closing tag, None if there is none yet.

        Args:
            final: Whether the text is complete.
        """
        while (at := text.find("<", self._at)) >= 0:
            self._at = at
            width = self._step(text, at, final)
            if width == 0:
                return at
            if width < 0:
                return None
            self._at = at + width
        self._at = len(text)
        return None

    def safe(self, text: str) -> int:
        """Length of the text that belongs to the value in any case; called before the closing tag is found."""
        end = self._at if self.odd is None else min(self._at, self.odd)
        return end - (self._form.lines and text[end - 1 : end] == "\n")

    def _step(self, text: str, at: int, final: bool) -> int:
        """Characters of the value at a `<`; 0: its closing tag, -1: undecided."""
        tail = text[at : at + 16]
        if tail.startswith(self._form.end):
            return self._closing(text, at, final)
        if tail.startswith(FUNCTION) and self._quotes:
            if match := _QUOTED_CALL.match(text, at):
                self._depth += 1
                self._mark(at)
                return match.end() - at
            return -1 if not final and _QUOTED_PART.match(text, at) else 1
        if self._form.quotes and tail.startswith(self._form.follow):
            self._mark(at)  # without a closing tag before it: quoted, or a tag is missing
        elif tail.startswith(END_CALL):
            return 1 if final or after_blanks(text, at + len(END_CALL)) < len(text) else -1
        elif not final and any(marker.startswith(tail) for marker in self._markers):
            return -1
        return 1

    def _closing(self, text: str, at: int, final: bool) -> int:
        next_at = after_blanks(text, at + len(self._form.end))
        rest = text[next_at : next_at + 16]
        found = next((tag for tag in self._form.follow if rest.startswith(tag)), None)
        if found is None:
            if not any(tag.startswith(rest) for tag in self._form.follow):
                return 1
            return -1 if not final else int(self._depth > 0)
        if not self._depth:
            return 0
        self._depth -= found != self._form.follow[0]
        return 1

    def _mark(self, at: int) -> None:
        if self.odd is None:
            self.odd = at
