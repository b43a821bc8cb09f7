"""Tests that a prompt is rendered once and tokenised once, with a state cache too."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_ggml.llama.cache import LlamaRAMCache
from reference.prompt_calls import recorded
from reference.toy_llama import ToyLlama


@pytest.mark.parametrize("cache", [None, LlamaRAMCache()], ids=["bare", "cache"])
def test_one_rendering_and_one_tokenisation_per_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: LlamaRAMCache | None
) -> None:
    path = tmp_path / "toy.gguf"
    path.write_bytes(b"")
    llm = ToyLlama(str(path))
    llm.set_cache(cache)
    made = recorded(monkeypatch)
    llm("abc", max_tokens=3)
    assert made == ["encode"]
    made.clear()
    llm.create_chat_completion([{"role": "user", "content": "hi"}], max_tokens=3)
    assert made == ["render", "encode"]
