"""Stop strings over streamed text."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ConfigError


class StopStrings:
    """Passes text through up to the first stop string, holding back only what may still become one.

    Of several stop strings the one that is complete first in the text wins, whatever their order in `stops`; of those
    that end at the same character, the longest. Judged character by character like this, the text does not depend on
    how many tokens arrive at once.

    Raises:
        ConfigError: A stop string is empty or no UTF-8.
    """

    def __init__(self, stops: Sequence[bytes | str] | bytes | str) -> None:
        if isinstance(stops, (bytes, str)):
            stops = [stops]
        self._stops = [_text(stop) for stop in stops]
        self._held = ""
        self.matched: str | None = None  # the stop string that ended the text

    def feed(self, text: str) -> tuple[str, bool]:
        """(text that may be shown now, whether a stop string was found); after a stop always ("", True)."""
        if self.matched is not None:
            return "", True
        if not self._stops:
            return text, False
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start], True
        start = min((_open_start(text, stop) for stop in self._stops), default=len(text))
        self._held = text[start:]
        return text[:start], False

    def flush(self) -> str:
        """The text held back, when generation ends without a stop string."""
        held, self._held = self._held, ""
        return held


def _open_start(text: str, stop: str) -> int:
    """Where the longest end of `text` begins that is a beginning of `stop`; len(text) if there is none."""
    start = max(len(text) - len(stop) + 1, 0)
    while (start := text.find(stop[0], start)) >= 0:
        if stop.startswith(text[start:]):
            return start
        start += 1
    return len(text)


def _text(stop: bytes | str) -> str:
    try:
        text = stop.decode() if isinstance(stop, bytes) else stop
    except UnicodeDecodeError:
        raise ConfigError(f"stop string {stop!r} is not valid UTF-8") from None
    if not text:
        raise ConfigError("a stop string must not be empty")
    return text
