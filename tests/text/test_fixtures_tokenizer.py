"""Tests of the tokenizer rebuilt from GGUF metadata against ids from the checkpoint's own tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

import fixtures
from dflash_ggml.files.gguf import GGUFFile
from dflash_ggml.text.tokenizer import Tokenizer

VECTORS = fixtures.tokenizer_vectors()


@pytest.fixture(scope="module")
def tokenizer(demo_target: Path) -> Tokenizer:
    with GGUFFile(demo_target) as file:
        return Tokenizer.from_gguf(file)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: repr(vector.text[:24]))
def test_encode(tokenizer: Tokenizer, vector: fixtures.TokenizerVector):
    assert tokenizer.encode(vector.text, special=True) == vector.special
    assert tokenizer.encode(vector.text, special=False) == vector.plain


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: repr(vector.text[:24]))
def test_decoding_gives_the_text_back(tokenizer: Tokenizer, vector: fixtures.TokenizerVector):
    assert tokenizer.decode_bytes(vector.plain).decode() == vector.text
    assert tokenizer.decode_bytes(vector.special, special=True).decode() == vector.text


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: repr(vector.text[:24]))
def test_streaming_one_token_at_a_time_gives_whole_characters(
    tokenizer: Tokenizer, vector: fixtures.TokenizerVector
):
    stream = tokenizer.stream(special=True)
    pieces = [stream.feed([token]) for token in vector.special]
    assert "".join(pieces) + stream.flush() == vector.text
    assert not any("\ufffd" in piece for piece in pieces)


def test_greedy_text(tokenizer: Tokenizer):
    for case in fixtures.greedy_cases():
        assert tokenizer.decode_bytes(case.greedy).decode() == case.greedy_text
