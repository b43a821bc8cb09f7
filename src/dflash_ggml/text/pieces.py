"""Cuts of a long text that do not change its tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

PIECE = 1 << 14  # characters; some milliseconds of tokenising, and some megabytes of it

# Latin, Greek, Cyrillic, Hebrew, Arabic, Devanagari, Thai, kana, Chinese, Korean: letters in every version of Unicode.
_LETTERS = (
    "A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u03b1-\u03c9\u0410-\u044f\u05d0-\u05ea\u0621-\u063a"
    "\u0905-\u0939\u0e01-\u0e30\u3041-\u3093\u30a1-\u30f6\u4e00-\u9fa5\uac00-\ud7a3"
)
# A run of letters ends at such a mark under every pre-tokenizer here, and none looks behind itself: what follows is
# split as if it began there. An apostrophe or a digit would not do everywhere.
_CUT = re.compile(f"[{_LETTERS}](?=[ \n,.;:()\uff0c\u3002])")


def uncuttable(texts: Iterable[str]) -> bool:
    """Whether one of these texts, which are tokens as a whole, could be cut."""
    return any(_CUT.search(text) for text in texts)


def pieces(text: str, size: int = PIECE) -> Iterator[str]:
    """The text in parts of `size` characters or a little more, whose tokens joined are the text's.

    A part is longer where there is no place to cut.
    """
    begin = 0
    while len(text) - begin > size and (found := _CUT.search(text, begin + size)):
        yield text[begin : found.end()]
        begin = found.end()
    yield text[begin:]
