"""Tests of the vocabularies of Llama 2, Llama 3 and their relatives against the token ids in llama.cpp's own tests."""

from __future__ import annotations

import pytest

from dflash_ggml.files.gguf import GGUFFile
from dflash_ggml.text.tokenizer import Tokenizer
from reference.vendored import vendored

BETWEEN = "\n__ggml_vocab_test__\n"


@pytest.mark.parametrize("name", ["llama-spm", "llama-bpe", "starcoder"])
def test_the_expected_tokenisations(name: str) -> None:
    file = f"ggml-vocab-{name}.gguf"
    with GGUFFile(vendored(file)) as opened:
        tokenizer = Tokenizer.from_gguf(opened)
    texts = vendored(f"{file}.inp").read_text(encoding="utf-8").split(BETWEEN)
    lines = vendored(f"{file}.out").read_text(encoding="utf-8").split("\n")
    expected = [[int(i) for i in line.split()] for line in lines]
    assert len(texts) == len(expected) == 47
    before = " " if name == "llama-spm" else ""
    for text, ids in zip(texts, expected):
        assert tokenizer.encode(text, special=False) == ids, text
        assert tokenizer.decode(ids) == (before + text if ids else "")
