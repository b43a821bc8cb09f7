"""Tests of Llama's embeddings: llama-cpp-python's shapes around the target's pooled hidden states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_ggml.errors import ConfigError, ContextOverflowError
from reference.fake_engine import FakeEngine
from reference.toy_llama import ToyLlama

TEXT = "hello there"


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "toy.gguf").touch()
    return str(tmp_path / "toy.gguf")


def states(llm: ToyLlama, text: str = TEXT) -> Any:
    rows: list[Any] = []
    FakeEngine(llm.toy.config, llm.toy.tokenizer).open().hidden_states(
        llm.tokenize(text.encode()), rows.append
    )
    return np.concatenate(rows)


def test_one_text_or_many(path: str) -> None:
    llm = ToyLlama(path, embedding=True)
    rows = states(llm)
    one, count = llm.embed(TEXT, return_count=True)
    np.testing.assert_allclose(one, rows.mean(axis=0), atol=1e-6)
    assert count == len(rows) and all(isinstance(x, float) for x in one)
    assert llm.embed([TEXT]) == [one] and len(llm.embed([TEXT, "Once"])) == 2
    assert np.linalg.norm(llm.embed(TEXT, normalize=True)) == pytest.approx(1)
    made = llm.create_embedding([TEXT, "Once"])
    assert made["object"] == "list" and made["model"] == path
    assert [d["index"] for d in made["data"]] == [0, 1]
    np.testing.assert_allclose(made["data"][0]["embedding"], llm.embed(TEXT, normalize=True), atol=1e-6)
    n = len(rows) + len(llm.tokenize(b"Once"))
    assert made["usage"] == {"prompt_tokens": n, "total_tokens": n}
    assert llm.create_embedding(TEXT, model="named")["model"] == "named"


@pytest.mark.parametrize("pooling", [0, 1, 2, 3])
def test_poolings(path: str, pooling: int) -> None:
    llm = ToyLlama(path, pooling_type=pooling)
    rows = states(llm)
    wanted = (rows, rows.mean(axis=0), rows[0], rows[-1])[pooling]
    np.testing.assert_allclose(llm.embed(TEXT), wanted, atol=1e-6)
    assert llm.pooling_type() == pooling


def test_long_and_empty_texts(path: str) -> None:
    llm = ToyLlama(path, n_ctx=16)
    assert llm.embed("x" * 40, return_count=True) == llm.embed("x" * 16, return_count=True)
    with pytest.raises(ContextOverflowError):
        llm.embed("x" * 40, truncate=False)
    with pytest.raises(ConfigError, match=r"input\[1\]: it is empty"):
        llm.create_embedding([TEXT, ""])


def test_a_running_generation_is_not_disturbed(path: str) -> None:
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
    whole = ToyLlama(path).create_completion("Once upon", **options)
    llm = ToyLlama(path)
    llm.create_completion("Once upon", **options)
    before = llm._input_ids.tolist()
    llm.embed(TEXT)
    assert llm._input_ids.tolist() == before
    assert llm.create_completion("Once upon", **options)["choices"] == whole["choices"]
