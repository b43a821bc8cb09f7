"""Tests of lone surrogates in JSON text, whole and as it streams in."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_ggml.text.json_text import loads, well_formed, well_formed_json

HALVES = st.text(st.sampled_from('ab"\\\n\ud83d\ude00\ud800\udfff\ufffdé'), max_size=12)


def judged(text: str) -> str:
    """With its pairs joined, and U+FFFD for every half that is left."""
    joined = text.encode("utf-16-be", "surrogatepass").decode("utf-16-be", "surrogatepass")
    return re.sub("[\ud800-\udfff]", "\ufffd", joined)


@given(HALVES)
def test_a_text_keeps_all_but_its_halves(text: str) -> None:
    assert well_formed(text) == judged(text)


@given(HALVES)
def test_json_text_is_read_as_if_its_texts_had_none(text: str) -> None:
    written = json.dumps({text: [text]})
    assert loads(written) == {judged(text): [judged(text)]}
    assert well_formed_json(well_formed_json(written)) == well_formed_json(written)


@given(st.text(st.sampled_from('ab"\\\n\U0001f600é'), max_size=12))
def test_text_without_halves_is_kept_at_every_cut(text: str) -> None:
    written = json.dumps(text)
    for i in range(len(written)):
        assert well_formed_json(written[:i]) == written[:i]


@pytest.mark.parametrize("text", [r'"\ud83', r'"\u', '"\\', r"\x", r'"\ud8zz"', ""])
def test_what_is_no_escape_is_left_alone(text: str) -> None:
    assert well_formed_json(text) == text
