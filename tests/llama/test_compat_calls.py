"""Tests of the calls that outlines, guidance, llama-cpp-haystack, autogen-ext and llm-gguf make on llama_cpp, imitated. Toy
engine."""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_ggml import compat
from dflash_ggml.errors import ConfigError
from reference.toy_llama import ToyLlama

ADD = {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'


@pytest.fixture(autouse=True)
def facade() -> Iterator[Any]:
    yield compat.install()
    compat.uninstall()


@pytest.fixture
def llm(tmp_path: Path) -> ToyLlama:
    path = tmp_path / "toy.gguf"
    path.touch()
    return ToyLlama(str(path), call_tags=False)


class OnlyDigits:
    """A mask over a vocabulary of strings, as outlines' processors are: no list, no function."""

    def __init__(self, vocabulary: dict[str, int]) -> None:
        self.allowed = [i for text, i in vocabulary.items() if text.isdigit()]

    def __call__(self, ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
        masked = np.full_like(scores, -np.inf)
        masked[self.allowed] = scores[self.allowed]
        return masked


def test_as_outlines_does(facade: Any, llm: ToyLlama) -> None:
    from llama_cpp import LogitsProcessorList, llama_model_get_vocab, llama_token_to_piece

    assert not hasattr(llm.tokenizer_, "hf_tokenizer")
    vocab, size, vocabulary = llama_model_get_vocab(llm.model), 32, {}
    buffer = (ctypes.c_char * size)()
    for i in range(llm.n_vocab()):
        n = llama_token_to_piece(vocab, i, buffer, size, 0, True)
        if n >= 0:
            vocabulary[buffer[:n].decode("utf-8", errors="replace")] = i
    assert (
        vocabulary["hello"] == llm.tokenize(b"hello")[0]
        and vocabulary["<|im_end|>"] == llm._model.token_eos()
    )

    processors = LogitsProcessorList([OnlyDigits(vocabulary)])
    out: Any = llm("n = ", logits_processor=processors, max_tokens=6)
    assert out["choices"][0]["text"].isdigit() and len(out["choices"][0]["text"]) == 6
    out = llm.create_chat_completion(
        [{"role": "user", "content": "n?"}], logits_processor=processors, max_tokens=6
    )
    assert out["choices"][0]["message"]["content"].isdigit()
    llm.reset()
    chunks: Any = llm("n = ", logits_processor=processors, max_tokens=6, stream=True)
    assert "".join(c["choices"][0]["text"] for c in chunks).isdigit()
    assert llm.tokenizer().detokenize(llm.tokenizer().tokenize(b"x y", add_bos=True, special=True)) == b"x y"


def test_as_llguidance_builds_its_tokenizer(facade: Any, llm: ToyLlama) -> None:
    pytest.importorskip("llguidance")
    builder = importlib.import_module("llguidance.llamacpp")
    tokenizer = importlib.reload(builder).lltokenizer_from_vocab(facade.llama_model_get_vocab(llm.model))
    text = "hello <|im_end|> wörld"
    assert tokenizer.tokenize_bytes(text.encode(), parse_special=True) == llm.tokenize(
        text.encode(), special=True
    )
    assert tokenizer.eos_token == llm.token_eos() and tokenizer.vocab_size == llm.n_vocab()
    assert tokenizer.is_special_token(llm.token_eos())


def test_as_guidance_computes_logits(facade: Any, llm: ToyLlama) -> None:
    """It keeps ids and rows of its own, takes back what does not fit and asks for the rest with all rows."""
    cached: list[int] = []

    def logits(ids: list[int]) -> np.ndarray:
        known = next((i for i, (a, b) in enumerate(zip(ids, cached)) if a != b), min(len(ids), len(cached)))
        known = min(known, len(ids) - 1)
        facade.llama_memory_seq_rm(facade.llama_get_memory(llm.ctx), -1, known, -1)
        batch = facade.llama_batch_init(llm.n_batch, 0, llm.n_ctx())
        batch.n_tokens = n = len(ids) - known
        for j in range(n):
            batch.token[j], batch.pos[j], batch.logits[j] = ids[known + j], known + j, True
            batch.seq_id[j][0], batch.n_seq_id[j] = 0, 1
        assert facade.llama_decode(llm.ctx, batch) == 0
        pointer = facade.llama_get_logits(llm.ctx)
        rows = np.ctypeslib.as_array(pointer, shape=(n, llm.n_vocab())).copy()
        facade.llama_batch_free(batch)
        cached[:] = ids
        return rows[-1]

    def by_eval(ids: list[int]) -> np.ndarray:
        other = ToyLlama(llm.model_path, call_tags=False)
        other.eval(ids)
        return other.session.slots.all[0].logits

    for text in (b"a tree", b"a tree and", b"a trap", b"a trap", b"a"):
        ids = llm.tokenize(text, special=True)
        assert np.array_equal(logits(ids), by_eval(ids))


def test_as_haystack_does(facade: Any, llm: ToyLlama) -> None:
    from llama_cpp import (
        ChatCompletionMessageToolCall,
        ChatCompletionRequestAssistantMessage,
        ChatCompletionRequestMessage,
        ChatCompletionRequestMessageContentPart,
        ChatCompletionResponseChoice,
        ChatCompletionStreamResponseDelta,
        ChatCompletionStreamResponseDeltaEmpty,
        ChatCompletionTool,
        CreateChatCompletionResponse,
        CreateChatCompletionStreamResponse,
        llama_chat_format,
    )
    from llama_cpp.llama_chat_format import Llava15ChatHandler
    from llama_cpp.llama_tokenizer import LlamaHFTokenizer

    assert ChatCompletionRequestMessage and ChatCompletionRequestMessageContentPart and LlamaHFTokenizer
    assert ChatCompletionMessageToolCall and ChatCompletionRequestAssistantMessage and ChatCompletionTool
    assert (
        ChatCompletionResponseChoice and CreateChatCompletionResponse and CreateChatCompletionStreamResponse
    )
    assert ChatCompletionStreamResponseDelta and ChatCompletionStreamResponseDeltaEmpty
    with pytest.raises(ConfigError, match="no image encoder"):
        getattr(llama_chat_format, "Llava15ChatHandler")(clip_model_path="mmproj.gguf")  # noqa: B009
    assert Llava15ChatHandler

    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "add", "arguments": json.dumps({"a": "é"}, ensure_ascii=False)},
    }
    talk: Any = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "add"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "function", "content": "3", "name": "add"},
    ]
    llm.toy.replies = ["three", CALL, "four"]
    out: Any = llm.create_chat_completion(messages=talk, tools=[], temperature=0)
    assert out["choices"][0]["message"]["content"] == "three" and out["usage"]["total_tokens"]
    tools: Any = [{"type": "function", "function": ADD}]
    out = llm.create_chat_completion(messages=talk, tools=tools, temperature=0)
    (found_call,) = out["choices"][0]["message"]["tool_calls"]
    assert found_call["function"] == {"name": "add", "arguments": "{}"} and found_call["id"]
    assert out["choices"][0]["finish_reason"] == "tool_calls"
    chunks: Any = list(llm.create_chat_completion(messages=talk, tools=[], stream=True, temperature=0))
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == "four"
    assert all(c["choices"][0].get("delta", {}).get("tool_calls") is None and c["created"] for c in chunks)


def test_as_autogen_does(facade: Any, llm: ToyLlama) -> None:
    pytest.importorskip("llguidance")
    from llama_cpp import (
        ChatCompletionFunctionParameters,
        ChatCompletionRequestFunctionMessage,
        ChatCompletionRequestSystemMessage,
        ChatCompletionRequestToolMessage,
        ChatCompletionTool,
        ChatCompletionToolFunction,
        llama_chat_format,
    )

    assert ChatCompletionFunctionParameters and llama_chat_format.LlamaChatCompletionHandler
    assert ChatCompletionRequestFunctionMessage and ChatCompletionRequestSystemMessage
    assert ChatCompletionRequestToolMessage
    tool = ChatCompletionTool(type="function", function=ChatCompletionToolFunction(**ADD))
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    bound: Any = {"type": "json_object", "schema": schema}

    async def ask(**options: Any) -> Any:
        loop = asyncio.get_running_loop()
        talk = [{"role": "user", "content": "x"}]
        return await loop.run_in_executor(
            None, lambda: llm.create_chat_completion(messages=talk, stream=False, **options)
        )

    llm.toy.replies = ["fine", '{"ok": true}']
    assert asyncio.run(ask(tools=[tool]))["choices"][0]["message"]["content"] == "fine"
    answer = asyncio.run(ask(tools=[], response_format=bound))
    assert json.loads(answer["choices"][0]["message"]["content"]) == {"ok": True}
    assert llm.n_ctx() - len(llm.tokenize(b"json")) > 0


def test_as_llm_gguf_does(facade: Any, llm: ToyLlama) -> None:
    from llama_cpp import Llama, llama_chat_format

    assert Llama is type(llm).__mro__[1] and hasattr(llama_chat_format, "Qwen25VLChatHandler")
    other = ToyLlama(llm.model_path, n_ctx=0, chat_format="chatml-function-calling", call_tags=False)
    other.toy.replies = ["well"]
    talk: Any = [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]
    chunks: Any = other.create_chat_completion(messages=talk, stream=True)
    assert "".join(c["choices"][0].get("delta", {}).get("content") or "" for c in chunks)


# --- llama_cpp.server


def test_the_servers_app(facade: Any, demo_target: Path) -> None:
    testclient = pytest.importorskip("starlette.testclient")
    pytest.importorskip("uvicorn")
    from llama_cpp.server.app import Settings, create_app

    settings = Settings(
        model=str(demo_target),
        model_alias="demo",
        n_ctx=256,
        n_threads=1,
        api_key="k",
        draft_model="prompt-lookup-decoding",
        chat_format="llama-2",
        interrupt_requests=True,
    )
    assert (settings.host, settings.port, settings.n_ctx) == ("localhost", 8000, 256)
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0}
    with testclient.TestClient(create_app(settings=settings)) as client:
        while client.get("/health").status_code == 503:
            pass
        assert client.post("/v1/chat/completions", json=body).status_code == 401
        client.headers["authorization"] = "Bearer k"
        answer = client.post("/v1/chat/completions", json=body).json()
        assert answer["model"] == "demo" and answer["usage"]["completion_tokens"] == 3
        prompt = len(client.post("/tokenize", json={"content": "[INST] hi [/INST]"}).json()["tokens"])
        assert answer["usage"]["prompt_tokens"] == prompt


def test_the_servers_settings(facade: Any) -> None:
    pytest.importorskip("starlette")
    from llama_cpp.server.app import create_app
    from llama_cpp.server.settings import ModelSettings, ServerSettings

    with pytest.raises(ConfigError, match="expected settings"):
        create_app()
    with pytest.raises(ConfigError, match="not 'nope'"):
        create_app(server_settings=ServerSettings(), model_settings=[ModelSettings("x", chat_format="nope")])
    with pytest.warns(UserWarning, match="one model is served: a.gguf"):
        create_app(
            server_settings=ServerSettings(port=1),
            model_settings=[ModelSettings("a.gguf"), ModelSettings("b.gguf")],
        )


def test_the_servers_app_samples_as_the_file_recommends(facade: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    app = pytest.importorskip("dflash_ggml.server.app")
    from dflash_ggml.llama import served

    made: list[Any] = []
    make_service = app.make_service
    monkeypatch.setattr(served, "file_metadata", lambda path: {"general.sampling.temp": 0.25})
    monkeypatch.setattr(app, "make_service", lambda *a, **k: (made.append(a[1]), make_service(*a, **k))[1])
    served.create_app(served.Settings(model="a.gguf"))
    assert made[0].sampling.temperature == 0.25 and made[0].names == ("a",)
