"""Tests of gpt-oss's tokenizer against OpenAI's own. 10 seconds, most of them for its 446,189 merges."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_real_vocabulary import BETWEEN

from reference import o200k
from reference.vendored import vendored

TEXTS = [
    "I'm HE'LL we'Ve DON'T o'clock 'tis",
    "camelCaseHTTPServer XMLHttpRequest ALLCAPS lower Title",
    "1234567 12 345.678,90 ٣٤٥٦ ½ x2y",
    "path/to/file.py\n\n\t  indented //comment\r\n  end  ",
    "Ünïcödé École DŽungla ǅ ʰ ª",
    "e\u0301te\u0301 नमस्ते สวัสดี ทดสอบ 한국어 日本語テキスト",
    "🤖👩‍👩‍👧 ✨!!! ... --->>> ///",
    "   \n   \n\n a \u00a0 b\u2003c",
    "<|start|>assistant<|channel|>final<|message|>no marks<|end|>",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("o200k")


def test_tokens_are_those_of_openai(folder: Path) -> None:
    theirs, ours = o200k.encoding(folder), o200k.tokenizer()
    more = vendored("ggml-vocab-qwen35.gguf.inp").read_text(encoding="utf-8").split(BETWEEN)
    template = vendored("templates/openai-gpt-oss-120b.jinja").read_text(encoding="utf-8")
    for text in (*TEXTS, *more, template):
        plain = theirs.encode(text, disallowed_special=())
        assert ours.encode(text, special=False) == plain, text
        assert ours.decode(plain) == text
        assert ours.encode(text) == theirs.encode(text, allowed_special="all"), text


def test_only_two_marks_end_a_turn() -> None:
    ours = o200k.tokenizer()
    assert {ours.tokens[i] for i in ours.eog_ids} == {"<|return|>", "<|call|>", "<|endoftext|>"}
