"""Where the value between `<arg_value>` tags ends, looked for as it streams in.

A value ends at an `</arg_value>` that is followed by the next argument or by the end of the call, or where the end of the call
stands at the end of the whole output. Nothing else ends a value.
"""

from __future__ import annotations

from .call_opening import ARG_KEY, END_ARG_VALUE, END_CALL, after_blanks, partial_suffix

_FOLLOW = (ARG_KEY, END_CALL)


class KeyedScan:
    """look() at the text behind `<arg_value>` as it grows."""

    def __init__(self) -> None:
        self._at = 0

    def look(self, text: str, final: bool, cut: bool) -> tuple[int | None, int]:
        """Where the value ends and the length of the tag that ends it; None while that has not come. final: nothing comes
        after this text; cut: a limit ended it."""
        while (at := text.find(END_ARG_VALUE, self._at)) >= 0:
            self._at = at
            behind = after_blanks(text, at + len(END_ARG_VALUE))
            rest = text[behind : behind + len(END_CALL)]
            begun = any(tag.startswith(rest) for tag in _FOLLOW)
            if rest.startswith(_FOLLOW) or (final and begun):
                return at, len(END_ARG_VALUE)
            if begun:
                return None, 0
            self._at = at + 1
        if final and not cut and text.rstrip().endswith(END_CALL):
            return text.rstrip().rindex(END_CALL), 0
        self._at = max(self._at, len(text) - partial_suffix(text, (END_ARG_VALUE,)))
        return None, 0

    def safe(self, text: str) -> int:
        """How much of the text is part of the value whatever follows."""
        end = text.find(END_ARG_VALUE, self._at)
        held = len(text) - partial_suffix(text, (END_ARG_VALUE, END_CALL))
        closing = text.rfind(END_CALL, 0, held)
        if closing >= 0 and not text[closing + len(END_CALL) :].strip():
            held = closing  # it may be the last thing there is
        return min(held, end) if end >= 0 else held
