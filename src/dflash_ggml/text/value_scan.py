"""Where the text of a tool call's parameter ends, looked for as it streams in.

A value ends at a `</parameter>` that is followed by the next parameter, by the end of the function or of the call. A
complete call that is quoted inside a value belongs to it. Nothing else ends a value.
"""

from __future__ import annotations

import re

from .call_opening import END_CALL, END_FUNCTION, END_PARAMETER, FUNCTION, PARAMETER, after_blanks

_FOLLOW = (PARAMETER, END_FUNCTION, END_CALL)
_ODD = (
    PARAMETER,
    END_FUNCTION,
    END_CALL,
)  # without a closing tag before them: quoted, or a tag was forgotten
_MARKERS = (END_PARAMETER, FUNCTION, *_ODD)
_QUOTED_CALL = re.compile(r"<function=[^<>\n]{1,200}>[^\S\n]*\n\s*<parameter=[^<>\n]{1,200}>")
_QUOTED_PART = re.compile(r"<function=[^<>\n]{0,200}(>[^\S\n]*(\n\s*(<[^<>\n]{0,210})?)?)?\Z")


class ValueScan:
    """look() at the text behind the parameter's tag as it grows.

    odd: index of the first tag that need not be part of the value, None if there is none; what is after it may have to
    be read another way. quotes: take complete calls inside the value for quoted.
    """

    def __init__(self, quotes: bool) -> None:
        self._quotes = quotes
        self._at = 0
        self._depth = 0
        self.odd: int | None = None

    def look(self, text: str, final: bool = False) -> int | None:
        """Where the closing tag begins, None while it has not come. final: nothing comes after this text."""
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
        """How much of the text is part of the value whatever follows; asked while the closing tag has not come."""
        end = self._at if self.odd is None else min(self._at, self.odd)
        return end - 1 if end and text[end - 1] == "\n" else end

    def _step(self, text: str, at: int, final: bool) -> int:
        """Characters of the value at a `<`, 0: its closing tag, -1: more text must tell."""
        tail = text[at : at + 16]
        if tail.startswith(END_PARAMETER):
            return self._closing(text, at, final)
        if tail.startswith(FUNCTION) and self._quotes:
            if match := _QUOTED_CALL.match(text, at):
                self._depth += 1
                self._mark(at)
                return match.end() - at
            return -1 if not final and _QUOTED_PART.match(text, at) else 1
        if tail.startswith(_ODD):
            self._mark(at)
        elif not final and any(marker.startswith(tail) for marker in _MARKERS):
            return -1
        return 1

    def _closing(self, text: str, at: int, final: bool) -> int:
        next_at = after_blanks(text, at + len(END_PARAMETER))
        rest = text[next_at : next_at + 16]
        found = next((tag for tag in _FOLLOW if rest.startswith(tag)), None)
        if found is None:
            if not any(tag.startswith(rest) for tag in _FOLLOW):
                return 1
            return -1 if not final else int(self._depth > 0)
        if not self._depth:
            return 0
        self._depth -= found != PARAMETER
        return 1

    def _mark(self, at: int) -> None:
        if self.odd is None:
            self.odd = at
