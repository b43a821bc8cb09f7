"""Tests of stop strings against a character-by-character reference, for any chunking."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_ggml.errors import ConfigError
from dflash_ggml.text.stopping import StopStrings

letters = st.text("abc", max_size=40)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=6), max_size=4)


def reference(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text before the stop string that is complete first; of those ending together, the longest."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


def chunks(text: str, data: st.DataObject) -> list[str]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(letters, stop_lists, st.data())
def test_equals_the_reference_for_any_chunking(text: str, stops: list[str], data: st.DataObject) -> None:
    stream, shown, fed = StopStrings(stops), "", ""
    expected, stopped = reference(text, stops)
    for chunk in chunks(text, data):
        fed += chunk
        emitted, done = stream.feed(chunk)
        shown += emitted
        assert done == reference(fed, stops)[1], "a stop is reported as soon as it is there"
        if not done:
            held = fed[len(shown) :]
            assert all(not fed.endswith(stop[:n]) for stop in stops for n in range(len(held) + 1, len(stop)))
            assert not held or any(stop.startswith(held) for stop in stops), "held back without need"
    assert done == stopped and (stream.matched is not None) == stopped
    assert shown + stream.flush() == expected


def test_the_first_in_the_text_wins_over_the_first_in_the_list() -> None:
    stream = StopStrings(["STOP", "\n\n"])
    assert stream.feed("a\n\nSTOP") == ("a", True)
    assert stream.matched == "\n\n"
    assert stream.feed("more") == ("", True) and stream.flush() == ""


def test_only_a_possible_beginning_is_held_back() -> None:
    stream = StopStrings(["</end>", b"\nclass"])
    assert stream.feed("x </") == ("x ", False)
    assert stream.feed("en") == ("", False)
    assert stream.feed("try\n") == ("</entry", False)
    assert stream.flush() == "\n" and stream.flush() == ""


def test_a_beginning_within_a_beginning_is_still_found() -> None:
    stream = StopStrings("aab")
    assert stream.feed("aa") == ("", False)
    assert stream.feed("a") == ("a", False)
    assert stream.feed("b") == ("", True)


def test_no_stop_strings_hold_nothing_back() -> None:
    assert StopStrings([]).feed("text") == ("text", False)


def test_a_very_long_stop_string_and_text() -> None:
    stream = StopStrings(["a" * 5000 + "b"])
    assert stream.feed("xa" * 20000) == ("xa" * 19999 + "x", False)
    assert stream.feed("a" * 4999 + "b") == ("", True)


@pytest.mark.parametrize("stop", ["", b"", b"\xff"])
def test_unusable_stop_strings_are_refused(stop: str | bytes) -> None:
    with pytest.raises(ConfigError, match="stop string"):
        StopStrings([stop])
