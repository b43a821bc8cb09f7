"""Tests of the vocabulary of real Qwen3.5 models against the token ids in llama.cpp's own tests."""

from __future__ import annotations

import pytest

from dflash_ggml.files.gguf import GGUFFile
from dflash_ggml.text.tokenizer import Tokenizer
from reference.vendored import vendored

NAME = "ggml-vocab-qwen35.gguf"
BETWEEN = "\n__ggml_vocab_test__\n"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    with GGUFFile(vendored(NAME)) as file:
        return Tokenizer.from_gguf(file)


def test_the_expected_tokenisations(tokenizer: Tokenizer) -> None:
    texts = vendored(f"{NAME}.inp").read_text(encoding="utf-8").split(BETWEEN)
    lines = vendored(f"{NAME}.out").read_text(encoding="utf-8").split("\n")
    expected = [[int(i) for i in line.split()] for line in lines]
    assert len(texts) == len(expected) == 51
    for text, ids in zip(texts, expected):
        assert tokenizer.encode(text, special=False) == ids, text
        assert tokenizer.decode(ids) == text
