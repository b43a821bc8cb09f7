"""Tests of message parts as text: readable parts are read, others are named."""

from __future__ import annotations

import base64
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the server extra is not installed")

from dflash_ggml.server.errors import ApiError
from dflash_ggml.server.media import content_text, thoughts
from dflash_ggml.server.notes import Notes
from dflash_ggml.server.responses_schema import seal, unseal

CLOUDS = base64.b64encode("Wölkchen".encode()).decode()


def b64(kind: str, data: str) -> dict[str, Any]:
    return {"type": "base64", "media_type": kind, "data": data}


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ("plain", "plain"),
        ({"text": "no type"}, "no type"),
        ({"type": "output_text", "text": "o", "annotations": [1]}, "o"),
        ({"type": "refusal", "refusal": "no"}, "no"),
        ({"type": "thinking", "thinking": "t"}, ""),
        ({"type": "tool_reference", "tool_name": "Edit"}, "The tool Edit can be used now."),
        ({"type": "document", "source": b64("text/plain; charset=utf-8", CLOUDS)}, "Wölkchen"),
        ({"type": "document", "title": "T", "source": {"type": "text", "data": "d"}}, "T\nd"),
        (
            {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "c"}]}},
            "c",
        ),
        (
            {"type": "input_file", "filename": "f.md", "file_data": f"data:text/markdown;base64,{CLOUDS}"},
            "f.md\nWölkchen",
        ),
        (
            {
                "type": "search_result",
                "title": "T",
                "source": "S",
                "content": [{"type": "text", "text": "c"}],
            },
            "T\nS\nc",
        ),
    ],
)
def test_what_can_be_read(part: Any, text: str) -> None:
    notes = Notes(strict=True)
    assert content_text([part], "c", notes) == text and notes.header == ""


@pytest.mark.parametrize(
    ("part", "what"),
    [
        ({"type": "image_url", "image_url": {"url": "data:,"}}, "image"),
        ({"type": "input_audio", "input_audio": {}}, "audio"),
        ({"type": "document", "source": b64("application/pdf", CLOUDS)}, "document"),
        ({"type": "document", "source": b64("text/plain", "!")}, "document"),
        ({"type": "document", "source": {"type": "file", "file_id": "f"}}, "document"),
        ({"type": "file", "file": {"file_id": "f"}}, "file"),
        ({"type": "hologram"}, "part of type hologram"),
    ],
)
def test_what_cannot_be_read(part: Any, what: str) -> None:
    notes = Notes()
    assert content_text(["a ", part], "c", notes) == f"a [{what} left out: this model reads text only]"
    assert notes.header == f"left out: {what}"
    with pytest.raises(ApiError, match=r"c\[0\].*text only"):
        content_text([part], "c", Notes(strict=True))


def test_a_field_without_a_name_leaves_no_blank_at_the_end_of_the_header() -> None:
    notes = Notes()
    notes.ignore("\ufeff")
    notes.ignore("")
    assert notes.header == "ignored: ?,"


def test_the_name_of_a_file_is_shown_to_the_model() -> None:
    part = {"type": "file", "file": {"filename": "a.pdf"}}
    assert content_text([part], "c", Notes()) == "[file 'a.pdf' left out: this model reads text only]"


@pytest.mark.parametrize(
    ("content", "param"),
    [(3, "c"), ([3], "c[0]"), ([{"type": 3}], "c[0].type"), ([{"type": "text"}], "c[0].text")],
)
def test_malformed_parts_are_named(content: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        content_text(content, "c", Notes())
    assert caught.value.param == param


def test_thinking_is_found_among_the_parts() -> None:
    parts = [
        {"type": "thinking", "thinking": "a"},
        {"type": "text", "text": "x"},
        {"type": "reasoning", "text": "b"},
    ]
    assert thoughts(parts) == "a\n\nb" and thoughts("text") == "" and thoughts(None) == ""


def test_sealed_reasoning_comes_back() -> None:
    assert unseal(seal("Grübeln\n")) == "Grübeln\n"
    assert unseal("gAAAA") is None and unseal(None) is None and unseal("dflash:?") is None
