"""The vocabulary of gpt-oss, o200k, from the package `bpe-openai`, which ships it, and OpenAI's own encoding over it.

`openai-harmony` fetches its vocabulary, or reads it from a folder; a machine that tests may have no way to fetch it.
"""

from __future__ import annotations

import base64
import hashlib
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dflash_ggml.text.tokenizer import _BYTES, CONTROL, NORMAL, UNUSED, Tokenizer

N_RANKS, N_VOCAB = 199_998, 201_088
SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"  # of OpenAI's file
SPECIALS = {
    199_998: "<|startoftext|>",
    199_999: "<|endoftext|>",
    200_002: "<|return|>",
    200_003: "<|constrain|>",
    200_005: "<|channel|>",
    200_006: "<|start|>",
    200_007: "<|end|>",
    200_008: "<|message|>",
    200_012: "<|call|>",
}


@cache
def ranks() -> list[bytes]:
    """The bytes of each token, best first."""
    library = pytest.importorskip("bpe_openai", reason="bpe-openai is not installed (extra: test)")
    encoding = library.get_encoding("o200k_base")
    return [encoding.decode_single_token_bytes(i) for i in range(N_RANKS)]


@cache
def encoding(folder: Path) -> Any:
    """OpenAI's encoding of conversations, its vocabulary written to a folder."""
    library = pytest.importorskip("openai_harmony", reason="openai-harmony is not installed (extra: test)")
    lines = b"".join(base64.b64encode(data) + b" %d\n" % i for i, data in enumerate(ranks()))
    assert hashlib.sha256(lines).hexdigest() == SHA256
    (folder / "o200k_base.tiktoken").write_bytes(lines)
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(folder)
    return library.load_harmony_encoding(library.HarmonyEncodingName.HARMONY_GPT_OSS)


@cache
def tokenizer(template: str | None = None) -> Tokenizer:
    """As the files of gpt-oss have it: any two tokens that join to a third are a merge."""
    letters = {byte: chr(code) for code, byte in _BYTES.items()}
    names = ["".join(letters[byte] for byte in data) for data in ranks()]
    known = {data: rank for rank, data in enumerate(ranks())}
    merges: list[str] = []
    for data in ranks():
        cuts = ((data[:i], data[i:]) for i in range(1, len(data)))
        pairs = sorted((known[a], known[b]) for a, b in cuts if a in known and b in known)
        merges += [f"{names[a]} {names[b]}" for a, b in pairs]
    tokens = [*names, *(SPECIALS.get(i, f"<|reserved_{i}|>") for i in range(N_RANKS, N_VOCAB))]
    types = [NORMAL] * N_RANKS + [CONTROL if i in SPECIALS else UNUSED for i in range(N_RANKS, N_VOCAB)]
    special = {"bos": 199_998, "eos": 200_002, "padding": 199_999}
    return Tokenizer(tokens, types, merges, "gpt-4o", special_ids=special, chat_template=template)
