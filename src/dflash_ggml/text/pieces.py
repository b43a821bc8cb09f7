"""Splitting of a long text without changing its tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

PIECE = 1 << 14  # characters; tokenising takes some milliseconds and megabytes

# Latin, Greek, Cyrillic, Hebrew, Arabic, Devanagari, Thai, kana, Chinese, Korean: letters in every version of Unicode.
_LETTERS = (
    "A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u03b1-\u03c9\u0410-\u044f\u05d0-\u05ea\u0621-\u063a"
    "\u0905-\u0939\u0e01-\u0e30\u3041-\u3093\u30a1-\u30f6\u4e00-\u9fa5\uac00-\ud7a3"
)
# A run of letters ends at such a mark in every supported pre-tokenizer, and none has look-behind: the rest is split as
# if it began there. Apostrophes and digits are not safe everywhere.
_CUT = re.compile(f"[{_LETTERS}](?=[ \n,.;:()\uff0c\u3002])")


def uncuttable(texts: Iterable[str]) -> bool:
    """Whether one of these texts, which are single tokens, could be split."""
    return any(_CUT.search(text) for text in texts)


def pieces(text: str, size: int = PIECE) -> Iterator[str]:
    """The text in parts of about `size` characters, whose concatenated tokens are the text's.

    A part is longer if there is no safe point to split.
    """
    begin = 0
    while len(text) - begin > size and (found := _CUT.search(text, begin + size)):
        yield text[begin : found.end()]
        begin = found.end()
    yield text[begin:]
