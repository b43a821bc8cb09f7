"""Tests of tokenising long texts in pieces: the same tokens, and aborted as soon as there are too many."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_ggml.text.pieces import pieces, uncuttable
from dflash_ggml.text.tokenizer import PRE_TOKENIZERS, Tokenizer, TooManyTokens
from reference.fake_engine import MERGES, byte_vocabulary

WORDS = st.sampled_from(
    [
        *"aZé中 \n\t.,;:()'\"-_0",
        " ",
        "\n",
        "don't",
        "  ",
        "\r\n",
        "e\u0301",
        "x1",
        "<|im_end|>",
        "</think>",
        "hello",
        "²",
        "\u017f",
    ]
)
BYTES = byte_vocabulary()
VOCABULARIES = {pre: Tokenizer(BYTES.tokens, list(BYTES._types), MERGES, pre) for pre in PRE_TOKENIZERS}
TEXTS = st.lists(WORDS, max_size=60).map("".join)


@given(TEXTS, st.integers(1, 20))
def test_pieces_are_the_text_and_not_too_long(text: str, size: int) -> None:
    parts = list(pieces(text, size))
    assert "".join(parts) == text
    assert all(len(part) >= size for part in parts[:-1])


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
@given(text=TEXTS, size=st.integers(1, 20), special=st.booleans())
def test_tokens_of_pieces_are_the_tokens_of_the_text(pre: str, text: str, size: int, special: bool) -> None:
    tokenizer = VOCABULARIES[pre]
    whole = (tokenizer._with_special if special else tokenizer._plain).encode(text).ids
    joined = [i for part in pieces(text, size) for i in tokenizer.encode(part, special)]
    assert joined == whole == tokenizer.encode(text, special)


def test_a_long_text_is_cut_and_keeps_its_tokens() -> None:
    text = "def hello(there):\n    return 'in', \"on\"  # don't\n" * 2000
    tokenizer = BYTES
    assert len(list(pieces(text))) > 3
    assert tokenizer.encode(text) == tokenizer._with_special.encode(text).ids


@given(TEXTS.filter(bool))
def test_bytes_bound_the_tokens_from_below(text: str) -> None:
    n = len(BYTES.encode(text))
    assert len(text.encode()) <= n * BYTES._longest
    assert BYTES.encode(text, most=n - 1) == BYTES.encode(text)  # a short one is counted to its end


def test_a_long_text_is_given_up_when_there_are_too_many() -> None:
    text = "hello there " * 5000
    n = len(BYTES.encode(text))
    assert len(BYTES.encode(text, most=n)) == n
    for most in (1, 100, n // 2):
        with pytest.raises(TooManyTokens) as caught:
            BYTES.encode(text, most=most)
        assert most < caught.value.found < n
    lossy = Tokenizer([t for t in BYTES.tokens if t != "x"], [1] * (BYTES.n_vocab - 1), [], "qwen2")
    assert (
        lossy.encode("x" * 50_000, most=10) == []
    )  # it has no token for this byte: nothing follows from their number


def test_a_token_that_could_be_cut_keeps_texts_whole() -> None:
    assert uncuttable(["<a>", "a b"]) and not uncuttable(["<|im_end|>", "</tool_call>", "▁a"])
