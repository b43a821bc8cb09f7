"""Notes on unsupported fields: listed in the header x-dflash-notes, or refused by a strict server."""

from __future__ import annotations

import re
from collections import Counter

from .errors import bad_request

HEADER = "x-dflash-notes"
MOST = 512  # most characters of the header
_INDEX = re.compile(r"\[\d+\]")  # index of a message: notes on many messages are merged
_NAME = 64  # characters of a client-defined name


class Notes:
    """Notes collected while a request is parsed.

    Args:
        strict: Refuse what would be noted, with ApiError 400.
    """

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self._ignored: dict[str, str] = {}
        self._left_out: Counter[str] = Counter()
        self._texts: dict[str, None] = {}

    def ignore(self, param: str, why: str = "") -> None:
        """Note a field without effect; the answer is right without it."""
        if self.strict:
            raise bad_request(
                f"{param}: {why or 'this field is not supported here'}", param, "unsupported_parameter"
            )
        self._ignored.setdefault(_plain(_INDEX.sub("[]", param)[:_NAME]), why)

    def leave_out(self, what: str, param: str) -> None:
        """Note a part of the conversation that the model cannot read: an image, a document."""
        if self.strict:
            raise bad_request(f"{param}: {what}: this model takes text only", param, "unsupported_value")
        self._left_out[_plain(what[:_NAME])] += 1

    def weaken(self, param: str, text: str) -> None:
        """Note something only partly supported; refused by a strict server."""
        if self.strict:
            raise bad_request(f"{param}: {text}", param, "unsupported_value")
        self.say(f"{_INDEX.sub('[]', param)}: {text}")

    def say(self, text: str) -> None:
        """Note something only partly supported, on strict servers too."""
        self._texts.setdefault(_plain(text))

    @property
    def header(self) -> str:
        """All notes on one line of ASCII, at most `MOST` characters; empty without notes."""
        texts = list(self._texts)
        if self._left_out:
            counts = (f"{what} ({n})" if n > 1 else what for what, n in self._left_out.items())
            texts.insert(0, f"left out: {', '.join(counts)}")
        if self._ignored:
            names = (f"{name} ({why})" if why else name for name, why in self._ignored.items())
            texts.append(f"ignored: {', '.join(names)}")
        line = "; ".join(texts).strip()  # names may be blank, but a header must not end so
        return line if len(line) <= MOST else line[: MOST - 4] + " ..."


def _plain(text: str) -> str:
    """ASCII without control characters, as a header needs it."""
    return "".join(c if " " <= c <= "~" else "?" for c in text)
