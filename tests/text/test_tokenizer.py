"""Tests of the tokenizer: text to ids and back, streaming, what ends a generation, and mismatched vocabularies.

Vectors of an independent tokenizer are in `test_fixtures_tokenizer.py`. About 5 seconds.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_ggml.errors import ConfigError, ModelFileError
from dflash_ggml.files.gguf import GGUFFile
from dflash_ggml.text.tokenizer import _BYTES, Tokenizer, TooManyTokens
from reference import tiny_models as tiny
from reference.gguf_bytes import build

ID = {text: i for i, text in enumerate(tiny.TOKENS)}
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
LOOSE = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def demo(demo_target: Path) -> Tokenizer:
    with GGUFFile(demo_target) as file:
        return Tokenizer.from_gguf(file)


def tiny_tokenizer(folder: Path, **changes: Any) -> Tokenizer:
    """The tiny vocabulary with `changes` to the keys below `tokenizer.ggml.` (None drops a key)."""
    keys = tiny.tokenizer_keys() | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    path = folder / "model.gguf"
    path.write_bytes(build({key: value for key, value in keys.items() if value is not None}).data)
    with GGUFFile(path) as file:
        return Tokenizer.from_gguf(file)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return tiny_tokenizer(tmp_path)


def test_merges_and_bytes(tokenizer: Tokenizer):
    assert tokenizer.encode("hello") == [ID["hello"]]
    assert tokenizer.encode("help hell") == [ID["he"], ID["l"], ID["p"], ID["Ġ"], ID["hell"]]
    assert tokenizer.encode("é") == [ID["Ã©"]]
    assert tokenizer.encode("\n") == [ID["Ċ"]]
    assert tokenizer.encode("") == []


def test_special_tokens(tokenizer: Tokenizer):
    text = "he<|im_end|><think>"
    assert tokenizer.encode(text) == [ID["he"], ID["<|im_end|>"], ID["<think>"]]
    plain = tokenizer.encode(text, special=False)
    assert (
        ID["<|im_end|>"] not in plain and plain[-1] == ID["<think>"]
    )  # user-defined tokens are always parsed
    assert tokenizer.decode(plain) == text
    ids = tokenizer.encode(text)
    assert (tokenizer.decode(ids), tokenizer.decode(ids, special=True)) == ("he<think>", text)


def test_bytes_of_each_kind_of_token(tokenizer: Tokenizer):
    expected = {"hello": b"hello", "Ġ": b" ", "Ã©": "é".encode(), "<|im_end|>": b"<|im_end|>", "[PAD1]": b""}
    expected |= {"<think>": b"<think>", "<0x0A>": b"\n"}
    for text, piece in expected.items():
        assert tokenizer.token_bytes(ID[text]) == piece
    assert tokenizer.id_of("<think>") == ID["<think>"] and tokenizer.id_of("absent") is None
    assert tokenizer.is_control(ID["<|im_end|>"]) and not tokenizer.is_control(ID["<think>"])


@pytest.mark.parametrize("token", [-1, tiny.VOCAB, 10**12])
def test_ids_outside_the_vocabulary(tokenizer: Tokenizer, token: int):
    for call in (lambda: tokenizer.token_bytes(token), lambda: tokenizer.decode_bytes([token])):
        with pytest.raises(ConfigError, match=f"token id {token} is outside"):
            call()


def test_half_a_surrogate_pair_is_a_replacement_character(tokenizer: Tokenizer):
    assert tokenizer.encode("a\ud800b") == tokenizer.encode("a\ufffdb")
    assert tokenizer.encode("\ud83d\ude00\ude00") == tokenizer.encode("\U0001f600\ufffd")
    with pytest.raises(TooManyTokens):
        tokenizer.encode("\ud800" * 100_000, most=10)


def test_pre_tokenizers_differ_in_combining_marks(tmp_path: Path):
    merges = ["e Ì", "eÌ ģ"]  # e + U+0301
    tokens = [*tiny.TOKENS, "eÌ", "eÌģ"]
    changes = {"tokens": tokens, "token_type": [*tiny.TYPES, 1, 1], "merges": merges}
    old, new = (tiny_tokenizer(tmp_path, pre=pre, **changes) for pre in ("qwen2", "qwen35"))
    assert new.encode("e\u0301") == [tokens.index("eÌģ")]
    assert len(old.encode("e\u0301")) == 3


def test_digits_stand_alone_and_contractions_split(demo: Tokenizer):
    pieces = [demo.token_bytes(i) for i in demo.encode("x = 12345 it's")]
    assert [piece for piece in pieces if piece.isdigit()] == [b"1", b"2", b"3", b"4", b"5"]
    assert b"'s" in pieces


def test_characters_stay_decomposed(tmp_path: Path):
    assert tiny_tokenizer(tmp_path).encode("e\u0301") == [ID["e"], ID["Ì"], ID["ģ"]]


def test_declared_ids(tokenizer: Tokenizer, tmp_path: Path):
    assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.add_bos) == (ID["<|im_end|>"], None, False)
    assert tokenizer.chat_template == "{{ messages }}"
    assert tokenizer.n_vocab == tiny.VOCAB
    other = tiny_tokenizer(tmp_path, bos_token_id=3, mask_token_id=5, add_bos_token=True)
    assert (other.bos_id, other.add_bos, other.special_ids["mask"]) == (3, True, 5)


def test_what_a_prompt_begins_with(tmp_path: Path):
    wanted, declared, neither = (
        tiny_tokenizer(tmp_path, **keys)
        for keys in ({"bos_token_id": 3, "add_bos_token": True}, {"bos_token_id": 3}, {"add_bos_token": True})
    )
    assert (wanted.bos_ids, declared.bos_ids, neither.bos_ids) == ([3], [], [])


def test_what_ends_a_generation(tmp_path: Path):
    listed = {ID["<|im_end|>"], ID["<|endoftext|>"]}
    assert tiny_tokenizer(tmp_path).eog_ids == listed
    assert tiny_tokenizer(tmp_path, eot_token_id=9, eom_token_id=10).eog_ids == listed | {9, 10}
    assert tiny_tokenizer(tmp_path, eos_token_id=None, token_type=[1] * tiny.VOCAB).eog_ids == frozenset()


@LOOSE
@given(text=TEXTS, special=st.booleans())
def test_round_trip(demo: Tokenizer, text: str, special: bool):
    assert demo.decode_bytes(demo.encode(text, special), special=True).decode() == text


@LOOSE
@given(text=TEXTS)
def test_same_text_of_the_byte_alphabet_alone(tmp_path: Path, text: str):
    tokenizer = tiny_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode(text, special=False), special=True) == text


def test_streaming_over_every_split(tokenizer: Tokenizer):
    ids = tokenizer.encode("aé€😀<think>z")
    for first in range(len(ids) + 1):
        for second in range(first, len(ids) + 1):
            stream = tokenizer.stream()
            parts = [stream.feed(ids[:first]), stream.feed(ids[first:second]), stream.feed(ids[second:])]
            assert "".join(parts) == "aé€😀<think>z" and stream.flush() == ""
            assert all("\ufffd" not in part for part in parts)


@LOOSE
@given(data=st.binary(max_size=30), cuts=st.lists(st.integers(0, 30), max_size=4))
def test_streaming_equals_decoding_for_any_bytes(demo: Tokenizer, data: bytes, cuts: list[int]):
    """Also for bytes that are not UTF-8: one token per byte, cut anywhere."""
    single = {demo.token_bytes(i): i for i in range(demo.n_vocab) if len(demo.token_bytes(i)) == 1}
    ids = [single[data[i : i + 1]] for i in range(len(data))]
    stream, text = demo.stream(), ""
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(ids)], strict=True):
        text += stream.feed(ids[start:end])
    assert text + stream.flush() == data.decode(errors="replace") == demo.decode(ids)


def test_unfinished_characters_wait_then_show_as_replacement(tokenizer: Tokenizer):
    stream = tokenizer.stream()
    assert stream.feed([ID["Ã"]]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.feed([ID["a"]]) == "a"  # usable again
    assert stream.feed([ID["Ã"], ID["a"]]) == "\ufffda"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": "bert"},
            "key 'tokenizer.ggml.model': 'bert' is not supported (expected 'gpt2', 'llama' or 'gemma4')",
        ),
        ({"model": "llama"}, "key 'tokenizer.ggml.scores' is missing"),
        ({"model": "llama", "scores": [0.5]}, f"scores': expected {tiny.VOCAB} finite numbers"),
        (
            {"pre": "viking"},
            "key 'tokenizer.ggml.pre': 'viking' is not supported (expected one of qwen2, qwen35, laguna, ",
        ),
        ({"pre": None}, "key 'tokenizer.ggml.pre' is missing"),
        ({"tokens": None}, "key 'tokenizer.ggml.tokens' is missing"),
        ({"token_type": None}, "key 'tokenizer.ggml.token_type' is missing"),
        ({"merges": None}, "key 'tokenizer.ggml.merges' is missing"),
        ({"token_type": [1, 2]}, f"key 'tokenizer.ggml.token_type': 2 types for {tiny.VOCAB} tokens"),
        ({"token_type": [7] * tiny.VOCAB}, "token_type': a value is outside 0..6"),
        ({"tokens": []}, "tokens"),
        ({"merges": ["h e", "h e l"]}, "merge 1 ('h e l') is not two tokens"),
        ({"merges": ["x y"]}, "merges do not fit the vocabulary"),
        ({"merges": ["x 日"]}, "merges do not fit the vocabulary"),
        ({"eos_token_id": tiny.VOCAB}, f"eos token id {tiny.VOCAB} is outside the vocabulary"),
        ({"eos_token_id": "x"}, "eos_token_id' should be an integer"),
        ({"add_bos_token": 1}, "add_bos_token' should be true or false"),
    ],
)
def test_bad_vocabulary(tmp_path: Path, changes: dict[str, Any], message: str):
    with pytest.raises(ModelFileError, match=re.escape(message)):
        tiny_tokenizer(tmp_path, **changes)


def test_laguna_cuts_out_lines_first() -> None:
    """Tokens as llama.cpp's at the vendored revision: no merge joins a line's end to what is before or behind it."""
    merges = ["Ċ Ċ", "Ġ Ċ", "Ċ Ġ", "1 2", "Ġ a", "a b", "' s", "! Ċ", "Ġ Ġ"]
    tokens = [*map(chr, _BYTES), *(m.replace(" ", "") for m in merges), "</assistant>", "<think>"]
    types = [1] * (len(tokens) - 2) + [4, 4]
    tokenizer = Tokenizer(tokens, types, merges, "laguna", special_ids={"eos": 0})
    expected = {
        "ab \n\n ab": ["ab", "Ġ", "ĊĊ", "Ġa", "b"],
        "x  \n  y": ["x", "ĠĠ", "Ċ", "Ġ", "Ġ", "y"],
        "1212": ["1", "2", "1", "2"],
        "it's IT'S": ["i", "t", "'s", "Ġ", "I", "T", "'", "S"],
        "!\n\n!": ["!", "ĊĊ", "!"],
        "\n\n\n": ["ĊĊ", "Ċ"],
        " \n \n a": ["Ġ", "Ċ", "Ġ", "Ċ", "Ġa"],
        "ab</assistant>\n<think>": ["ab", "</assistant>", "Ċ", "<think>"],
        "!\nab 12\r\n\r\na": ["!", "Ċ", "ab", "Ġ", "1", "2", "č", "Ċ", "č", "Ċ", "a"],
        "\t\n a": ["ĉ", "Ċ", "Ġa"],
    }
    for text, pieces in expected.items():
        assert [tokens[i] for i in tokenizer.encode(text)] == pieces
    assert tokenizer.eog_ids == {0, tokens.index("</assistant>")}, "older files do not declare it"


def spm(folder: Path, **changes: Any) -> Tokenizer:
    """A SentencePiece vocabulary of a few pieces whose scores fall with their ids."""
    words = ["▁", "a", "b", "c", "▁a", "ab", "abc", "▁ab", "bc", "▁▁"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, "<|user|>"]
    types = [2, 3, 3, *[6] * 256, *[1] * len(words), 4]
    keys = {"model": "llama", "tokens": tokens, "token_type": types, "merges": None, "pre": None}
    keys |= {"scores": [float(-i) for i in range(len(tokens))], "eos_token_id": None, "add_bos_token": None}
    return tiny_tokenizer(folder, **{**keys, **changes})


def pieces_of(tokenizer: Tokenizer, text: str, special: bool = True) -> list[str]:
    return [tokenizer.tokens[i] for i in tokenizer.encode(text, special)]


def test_sentencepiece_joins_the_best_piece_first(tmp_path: Path) -> None:
    tokenizer = spm(tmp_path)
    expected = {
        "ab": ["▁ab"],
        "abc": ["▁ab", "c"],  # ▁a is better than ab, so that abc never comes to be
        "cabc": ["▁", "c", "abc"],
        "a  b": ["▁a", "▁▁", "b"],
        "é": ["▁", "<0xC3>", "<0xA9>"],
        "a\n": ["▁a", "<0x0A>"],
        "": [],
        "<|user|>a": ["<|user|>", "▁a"],
    }
    for text, pieces in expected.items():
        assert pieces_of(tokenizer, text) == pieces, text
    bare = spm(tmp_path, add_space_prefix=False)
    assert pieces_of(bare, "cab") == ["c", "ab"] and pieces_of(bare, " ab") == ["▁ab"]


def test_sentencepiece_numbers_and_bytes(tmp_path: Path) -> None:
    tokenizer = spm(tmp_path)
    assert (tokenizer.bos_ids, tokenizer.eos_id, tokenizer.eog_ids) == ([1], 2, {2})
    assert spm(tmp_path, add_bos_token=False).bos_ids == []
    assert spm(tmp_path, bos_token_id=0).bos_ids == [0]
    ids = tokenizer.encode("ab é")
    assert tokenizer.decode(ids) == " ab é" and tokenizer.pieces(ids)[:2] == [b" ab", b" "]
    assert len(ids) * tokenizer._longest >= len("ab é".encode())


def test_gemma4_lists_its_merges(tmp_path: Path) -> None:
    """Pieces and bytes as of SentencePiece, joined by a list; line ends are tokens that no merge makes."""
    words = ["▁", "a", "b", "c", "ab", "bc", "▁a", "abc", "\n", "\n\n"]
    tokens = ["<unk>", "<s>", "</s>", "<turn|>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    changes = {"tokens": tokens, "token_type": [2, 3, 3, 3, *[6] * 256, *[1] * len(words)], "scores": None}
    changes |= {"model": "gemma4", "merges": ["b c", "▁ a", "a b", "ab c"]}
    special = {"bos_token_id": 1, "eos_token_id": 2}
    tokenizer = spm(tmp_path, **changes, **special)
    expected = {
        "abc": ["a", "bc"],
        " ab": ["▁a", "b"],
        "ab\n\n\nc": ["ab", "\n\n", "\n", "c"],
        "é a": ["<0xC3>", "<0xA9>", "▁a"],
    }
    for text, pieces in expected.items():
        assert pieces_of(tokenizer, text) == pieces, text
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.bos_ids == [1] and tokenizer.eog_ids == {2, 3}
    with pytest.raises(ModelFileError, match="the merges do not fit the vocabulary"):
        spm(tmp_path, **{**changes, "merges": ["a x"]}, **special)


def test_no_text_makes_a_control_token_of_sentencepiece(tmp_path: Path) -> None:
    """Not even where its characters could be joined to its name, as llama.cpp does."""
    words = ["<", "/", "s", ">", "</", "s>", "▁"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    types = [2, 3, 3, *[6] * 256, *[1] * len(words)]
    tokenizer = spm(tmp_path, tokens=tokens, token_type=types, scores=[0.0] * len(tokens))
    assert pieces_of(tokenizer, "</s>", special=False) == ["▁", "</", "s>"]
    assert pieces_of(tokenizer, "</s>") == ["</s>"]


@LOOSE
@given(text=TEXTS, special=st.booleans())
def test_sentencepiece_round_trip(tmp_path: Path, text: str, special: bool) -> None:
    tokenizer = spm(tmp_path, add_space_prefix=False)
    assert tokenizer.decode_bytes(tokenizer.encode(text, special), special=True).decode() == text.replace(
        "▁", " "
    )


def test_numbers_of_several_digits_and_whole_words(tmp_path: Path) -> None:
    """llama-bpe takes digits by threes, and a word that is a token whole, though no merge makes it; smollm takes each digit."""
    changes = {"tokens": [*tiny.TOKENS, "12", "123", "xyz"], "token_type": [*tiny.TYPES, 1, 1, 1]}
    changes["merges"] = ["1 2", "12 3"]
    first = len(tiny.TOKENS)
    llama = tiny_tokenizer(tmp_path, pre="llama-bpe", add_bos_token=None, bos_token_id=3, **changes)
    assert llama.encode("123123") == [first + 1] * 2 and llama.encode("xyz") == [first + 2]
    assert llama.bos_ids == [3], "they begin with it unless the file says otherwise"
    smollm = tiny_tokenizer(tmp_path, pre="smollm", **changes)
    assert len(smollm.encode("123")) == 3 and len(smollm.encode("xyz")) == 3
    assert tiny_tokenizer(tmp_path, pre="starcoder", **changes).encode("123") == smollm.encode("123")


def test_tekken_parts_words_where_capitals_begin(tmp_path: Path) -> None:
    changes = {"tokens": [*tiny.TOKENS, "aB", "Ba", "ab"], "token_type": [*tiny.TYPES, 1, 1, 1]}
    tokenizer = tiny_tokenizer(tmp_path, pre="tekken", merges=["a B", "B a", "a b"], **changes)
    pieces = [tokenizer.tokens[i] for i in tokenizer.encode("abBa")]
    assert pieces == ["ab", "Ba"]
