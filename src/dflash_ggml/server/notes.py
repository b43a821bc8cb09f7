"""Notes on fields that are not honoured: named in the header x-dflash-notes, or refused where the server is strict."""

from __future__ import annotations

import re
from collections import Counter

from .errors import bad_request

HEADER = "x-dflash-notes"
MOST = 512  # characters of the header
_INDEX = re.compile(r"\[\d+\]")  # a note on many messages is given once
_NAME = 64  # characters of a name that the client made up


class Notes:
    """Collected while a request is read.

    Args:
        strict: What would be left undone is refused instead, with ApiError 400.
    """

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self._ignored: dict[str, str] = {}
        self._left_out: Counter[str] = Counter()
        self._texts: dict[str, None] = {}

    def ignore(self, param: str, why: str = "") -> None:
        """A field that has no effect here; the answer is right without it."""
        if self.strict:
            raise bad_request(
                f"{param}: {why or 'this field is not supported here'}", param, "unsupported_parameter"
            )
        self._ignored.setdefault(_plain(_INDEX.sub("[]", param)[:_NAME]), why)

    def leave_out(self, what: str, param: str) -> None:
        """A piece of the conversation that the model cannot read: an image, a document."""
        if self.strict:
            raise bad_request(f"{param}: {what}: this model takes text only", param, "unsupported_value")
        self._left_out[_plain(what[:_NAME])] += 1

    def weaken(self, param: str, text: str) -> None:
        """Something that is met in a weaker sense than asked, and was never met by a strict server."""
        if self.strict:
            raise bad_request(f"{param}: {text}", param, "unsupported_value")
        self.say(f"{_INDEX.sub('[]', param)}: {text}")

    def say(self, text: str) -> None:
        """Something that is met in a weaker sense, on strict servers too."""
        self._texts.setdefault(_plain(text))

    @property
    def header(self) -> str:
        """All of it on one line of ASCII, at most `MOST` characters; empty when there is nothing to say."""
        texts = list(self._texts)
        if self._left_out:
            counts = (f"{what} ({n})" if n > 1 else what for what, n in self._left_out.items())
            texts.insert(0, f"left out: {', '.join(counts)}")
        if self._ignored:
            names = (f"{name} ({why})" if why else name for name, why in self._ignored.items())
            texts.append(f"ignored: {', '.join(names)}")
        line = "; ".join(texts).strip()  # names may be empty or blank, and a header's end may not
        return line if len(line) <= MOST else line[: MOST - 4] + " ..."


def _plain(text: str) -> str:
    """ASCII without control characters, as a header needs it."""
    return "".join(c if " " <= c <= "~" else "?" for c in text)
