"""Stop strings over streamed text."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ConfigError
from .call_forms import partial_suffix


class StopStrings:
    """Passes text through up to the first stop string, holding back only possible beginnings of one.

    Of several stop strings the first complete one in the text wins, independent of their order in `stops`; of those that
    end at the same character, the longest. So the result does not depend on how many tokens arrive at once.

    Raises:
        ConfigError: A stop string is empty or not UTF-8.
    """

    def __init__(self, stops: Sequence[bytes | str] | bytes | str) -> None:
        if isinstance(stops, (bytes, str)):
            stops = [stops]
        self._stops = [_text(stop) for stop in stops]
        self._held = ""
        self.matched: str | None = None  # the stop string that ended the text

    def feed(self, text: str) -> tuple[str, bool]:
        """(text to emit, whether a stop string was found); after a stop always ("", True)."""
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
        start = len(text) - partial_suffix(text, self._stops)
        self._held = text[start:]
        return text[:start], False

    def flush(self) -> str:
        """The held-back text, when generation ends without a stop string."""
        held, self._held = self._held, ""
        return held


def _text(stop: bytes | str) -> str:
    try:
        text = stop.decode() if isinstance(stop, bytes) else stop
    except UnicodeDecodeError:
        raise ConfigError(f"stop string {stop!r} is not valid UTF-8") from None
    if not text:
        raise ConfigError("a stop string must not be empty")
    return text
