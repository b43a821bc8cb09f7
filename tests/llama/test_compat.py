"""Tests of code written for llama-cpp-python on the facade: its surface, then three libraries, unchanged, on the embedded
pair."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_ggml import compat
from dflash_ggml.errors import ConfigError
from dflash_ggml.llama.llama import Llama

# in the 16 greedy tokens after it no second-best logit comes nearer than 1.0, with a penalty of 1.1 or
# without: no way of prefilling the prompt changes the output
PROMPT = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def __len__(self):\n"


@pytest.fixture
def facade() -> Iterator[Any]:
    yield compat.install()
    compat.uninstall()


@pytest.fixture(scope="module")
def llm(demo_target: Path, demo_draft: Path) -> Iterator[Llama]:
    with Llama(str(demo_target), draft_model=str(demo_draft), n_ctx=512, n_threads=1, verbose=False) as model:
        yield model


@pytest.fixture(scope="module")
def text(llm: Llama) -> str:
    """The pair's greedy answer to PROMPT."""
    return llm(PROMPT, max_tokens=16, temperature=0)["choices"][0]["text"]


def test_surface(facade: Any) -> None:
    import llama_cpp
    from llama_cpp import Llama as Facaded
    from llama_cpp import (
        LlamaGrammar,
        LlamaRAMCache,
        LogitsProcessor,
        LogitsProcessorList,
        StoppingCriteriaList,
    )
    from llama_cpp.llama import LlamaState
    from llama_cpp.llama_cache import LlamaDiskCache
    from llama_cpp.llama_chat_format import register_chat_completion_handler
    from llama_cpp.llama_grammar import LlamaGrammar as Same
    from llama_cpp.llama_speculative import LlamaDraftModel
    from llama_cpp.llama_tokenizer import LlamaHFTokenizer
    from llama_cpp.llama_types import CreateChatCompletionResponse

    assert (
        llama_cpp is facade
        and llama_cpp.__version__ == "0.3.36"
        and Facaded is Llama
        and Same is LlamaGrammar
    )
    assert importlib.util.find_spec("llama_cpp") is not None
    assert llama_cpp.llama_cpp.LLAMA_DEFAULT_SEED == 0xFFFFFFFF
    assert all(
        callable(x)
        for x in (
            LlamaRAMCache,
            LogitsProcessorList,
            StoppingCriteriaList,
            LlamaState,
            LlamaDiskCache,
            LlamaDraftModel,
        )
    )
    assert (
        register_chat_completion_handler
        and LlamaHFTokenizer
        and LogitsProcessor
        and CreateChatCompletionResponse
    )
    assert compat.install() is facade


def test_missing_features_are_refused_by_name(facade: Any) -> None:
    with pytest.raises(AttributeError, match="libllama's functions are not there"):
        facade.llama_load_model_from_file()
    with pytest.raises(ImportError):
        importlib.import_module("llama_cpp.mtmd_cpp")


def test_it_does_not_replace_the_real_one() -> None:
    sys.modules["llama_cpp"] = type(sys)("llama_cpp")
    try:
        with pytest.raises(ConfigError, match="already imported"):
            compat.install()
        compat.uninstall()
        assert "llama_cpp" in sys.modules
    finally:
        del sys.modules["llama_cpp"]


def test_uninstall_leaves_nothing(facade: Any) -> None:
    compat.uninstall()
    assert not [name for name in sys.modules if name.split(".")[0] == "llama_cpp"]


def test_langchain(facade: Any, demo_target: Path, llm: Llama) -> None:
    pytest.importorskip("langchain_community")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the library about itself
        from langchain_community.chat_models import ChatLlamaCpp
        from langchain_community.llms import LlamaCpp

        expected = llm(PROMPT, max_tokens=16, temperature=0, repeat_penalty=1.1)["choices"][0]["text"]
        model = LlamaCpp(
            model_path=str(demo_target), n_ctx=512, n_threads=1, temperature=0, max_tokens=16, verbose=False
        )
        assert isinstance(model.client, Llama)
        assert model.invoke(PROMPT) == expected
        assert "".join(model.stream(PROMPT)) == expected
        assert model.invoke(PROMPT, stop=["items"]) == expected.split("items")[0] != expected
        assert model.get_num_tokens(PROMPT) == len(llm.tokenize(PROMPT.encode()))
        model.client.close()

        grammar = 'root ::= "a" [0-9]{3}'
        held = LlamaCpp(
            model_path=str(demo_target), n_ctx=512, n_threads=1, max_tokens=16, verbose=False, grammar=None
        )
        held.grammar = facade.LlamaGrammar.from_string(grammar)
        assert re.fullmatch("a[0-9]{3}", held.invoke(PROMPT))
        held.client.close()

        chat = ChatLlamaCpp(
            model_path=str(demo_target), n_ctx=512, n_threads=1, temperature=0, max_tokens=12, verbose=False
        )
        answer = chat.invoke("Write a class.")
        assert "".join(str(c.content) for c in chat.stream("Write a class.")) == answer.content != ""
        tool = {
            "type": "function",
            "function": {
                "name": "add",
                "description": "adds",
                "parameters": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]},
            },
        }
        choice = {"type": "function", "function": {"name": "add"}}
        forced = chat.bind_tools([tool], tool_choice=choice).bind(max_tokens=120).invoke("add 1")
        assert forced.tool_calls[0]["name"] == "add" and forced.tool_calls[0]["args"]["a"] in (1, 2)
        chat.client.close()


def test_llama_index(facade: Any, demo_target: Path, text: str) -> None:
    pytest.importorskip("llama_index.core")
    pytest.importorskip("llama_index.llms.llama_cpp", reason="llama-index-llms-llama-cpp is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from llama_index.llms.llama_cpp import LlamaCPP

        llm = LlamaCPP(
            model_path=str(demo_target),
            temperature=0,
            max_new_tokens=16,
            context_window=512,
            model_kwargs={"n_threads": 1},
            verbose=False,
        )
        assert llm.metadata.context_window == 512
        assert llm.complete(PROMPT, formatted=True).text == text
        assert list(llm.stream_complete(PROMPT, formatted=True))[-1].text == text
        llm._model.close()


def test_lm_format_enforcer(facade: Any, llm: Llama) -> None:
    pytest.importorskip("lmformatenforcer")
    from lmformatenforcer import JsonSchemaParser, RegexParser
    from lmformatenforcer.integrations.llamacpp import (
        build_llamacpp_logits_processor,
        build_token_enforcer_tokenizer_data,
    )

    data = build_token_enforcer_tokenizer_data(llm)
    # control tokens have no text, which the library takes for "allowed everywhere"
    control = (t for t in range(llm.n_vocab()) if not llm.detokenize([t]))
    bias = {t: float("-inf") for t in control if t != llm.token_eos()}

    def ask(parser: Any, mode: str, **options: Any) -> dict[str, Any]:
        processors = facade.LogitsProcessorList([build_llamacpp_logits_processor(data, parser)])
        return llm(
            PROMPT, max_tokens=150, logits_processor=processors, mode=mode, logit_bias=bias, **options
        )["choices"][0]

    schema = {"type": "object", "properties": {"n": {"enum": ["one", "two"]}, "ok": {"type": "boolean"}}}
    schema |= {"required": ["n", "ok"]}
    for mode in ("plain", "tree"):
        assert re.fullmatch(r"x = \d{2,4};", ask(RegexParser(r"x = \d{2,4};"), mode, temperature=0)["text"])
    choice = ask(JsonSchemaParser(schema), "tree", temperature=0)
    assert choice["finish_reason"] == "stop"
    assert set(json.loads(choice["text"])) == {"n", "ok"}
    assert choice["text"] == ask(JsonSchemaParser(schema), "plain", temperature=0)["text"]


def test_langchain_embeddings(facade: Any, demo_target: Path, llm: Llama) -> None:
    """Texts about one thing lie nearer to each other than to another."""
    pytest.importorskip("langchain_community")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the library about itself
        from langchain_community.embeddings import LlamaCppEmbeddings

        model = LlamaCppEmbeddings(model_path=str(demo_target), n_ctx=256, n_threads=1, verbose=False)
        texts = ["def add(a, b):\n    return a + b", "def plus(x, y):\n    return x + y", "The cat sat down."]
        vectors = np.array(model.embed_documents(texts))
        alike, other, _ = (vectors @ vectors.T)[np.triu_indices(3, 1)]
        assert np.allclose(np.linalg.norm(vectors, axis=1), 1) and alike > other + 0.1
        query = np.array(model.embed_query(texts[0]))  # which the library does not ask to be normalised
        assert np.allclose(query / np.linalg.norm(query), vectors[0], atol=1e-6)
        model.client.close()
