"""Tests that log-probabilities are equal through the class and the server: split characters, chosen tokens, offsets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the server extra is not installed")

from starlette.testclient import TestClient

from dflash_ggml.llama.chat_completion import chat_body, chat_chunks
from dflash_ggml.llama.completion import Heading, completion_body, completion_chunks
from dflash_ggml.server.app import create_app, make_service
from dflash_ggml.server.dialect import Settings
from dflash_ggml.server.openai_chat import ChatEncoder
from dflash_ggml.server.openai_completions import CompletionEncoder
from dflash_ggml.server.runner import Runner
from dflash_ggml.server.tools import ToolSet
from dflash_ggml.session import Session
from dflash_ggml.session.events import (
    Begin,
    Finish,
    TextDelta,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from dflash_ggml.session.logprobs import token_text
from reference.fake_engine import FakeEngine
from reference.toy_llama import ToyLlama

# the character 中 in two tokens, the second not among its two best
HALF = TokenLogprob(1, b"\xe4\xb8", -0.5, (TopLogprob(1, b"\xe4\xb8", -0.5), TopLogprob(5, b"a", -1.0)), 6)
REST = TokenLogprob(2, b"\xad", -3.0, (TopLogprob(5, b"a", -0.1), TopLogprob(6, b"\xff", -2.0)), 6)
LAST = TokenLogprob(7, b" b", -0.2, (), 7)
EVENTS = [
    Begin(4, 0),
    TextDelta("中", (HALF, REST)),
    TextDelta(" b", (LAST,)),
    Usage(4, 0, 3, 0, 2, 0, 0, 1.0, 1.0, "plain", 0),
    Finish("stop"),
]
COMPLETION = {
    "tokens": [r"bytes:\xe4\xb8", r"bytes:\xad", " b"],
    "text_offset": [6, 6, 7],
    "token_logprobs": [-0.5, -3.0, -0.2],
    "top_logprobs": [
        {r"bytes:\xe4\xb8": -0.5, "a": -1.0},
        {"a": -0.1, r"bytes:\xff": -2.0, r"bytes:\xad": -3.0},
        {" b": -0.2},
    ],
}
CHAT = {
    "content": [
        {
            "token": r"bytes:\xe4\xb8",
            "bytes": [0xE4, 0xB8],
            "logprob": -0.5,
            "top_logprobs": [
                {"token": r"bytes:\xe4\xb8", "bytes": [0xE4, 0xB8], "logprob": -0.5},
                {"token": "a", "bytes": [97], "logprob": -1.0},
            ],
        },
        {
            "token": r"bytes:\xad",
            "bytes": [0xAD],
            "logprob": -3.0,
            "top_logprobs": [
                {"token": "a", "bytes": [97], "logprob": -0.1},
                {"token": r"bytes:\xff", "bytes": [0xFF], "logprob": -2.0},
            ],
        },
        {"token": " b", "bytes": [32, 98], "logprob": -0.2, "top_logprobs": []},
    ],
    "refusal": None,
}


def served(encoder: Any) -> tuple[Any, list[Any]]:
    """The logprobs of the server's body, and of its chunks that have any."""
    sent = [item.decode().strip().removeprefix("data: ") for event in EVENTS for item in encoder.feed(event)]
    chunks = [json.loads(data) for data in sent if data != "[DONE]"]
    return encoder.body()["choices"][0]["logprobs"], [found for c in chunks if (found := logprobs_of(c))]


def logprobs_of(chunk: dict[str, Any]) -> Any:
    return chunk["choices"][0]["logprobs"]


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: [entry for c in chunks for entry in c[key]] for key in COMPLETION}


def test_completions_through_both_faces() -> None:
    body, chunks = served(
        CompletionEncoder("toy", echo=False, include_usage=False, progress=False, logprobs=True)
    )
    streamed = [found for c in completion_chunks(EVENTS, Heading("toy")) if (found := logprobs_of(c))]
    assert body == logprobs_of(completion_body(EVENTS, Heading("toy"))) == COMPLETION
    assert chunks == streamed and joined(chunks) == COMPLETION and len(chunks) == 2


def test_chats_through_both_faces() -> None:
    body, chunks = served(ChatEncoder("toy", tool_set=ToolSet(), include_usage=False, progress=False))
    streamed = [found for c in chat_chunks(EVENTS, Heading("toy")) if (found := logprobs_of(c))]
    assert body == logprobs_of(chat_body(EVENTS, Heading("toy"))) == CHAT
    assert chunks == streamed and [len(c["content"]) for c in chunks] == [2, 1]


def test_no_two_tokens_look_the_same() -> None:
    texts = [bytes([b]) for b in range(256)] + [b"\\xff", b"\xff\\", b"\xff\\x5c", b"\\\xff", "é".encode()]
    assert len({token_text(t) for t in texts}) == len(texts)


@pytest.mark.parametrize("prompt", ["Ask: ", [65, 115, 107]])
def test_the_same_generation_through_both_faces(tmp_path: Path, prompt: Any) -> None:
    path = tmp_path / "toy.gguf"
    path.write_bytes(b"")
    llm = ToyLlama(str(path), chat_format="chatml")
    llm.toy.replies = ["né 中 a"]
    choice = llm(prompt, max_tokens=20, temperature=0, logprobs=2)["choices"][0]
    runner = Runner(Session(FakeEngine(config=llm.toy.config, replies=["né 中 a"])))
    with TestClient(create_app(make_service(lambda progress: runner, Settings(names=("toy",))))) as http:
        body = {"prompt": prompt, "max_tokens": 20, "temperature": 0, "logprobs": 2}
        answer = http.post("/v1/completions", json=body).json()["choices"][0]
    assert answer["text"] == choice["text"] == "né 中 a" and answer["logprobs"] == choice["logprobs"]
    entries = choice["logprobs"]
    assert len([t for t in entries["tokens"] if t.startswith("bytes:")]) == 2
    # every token's text begins at its offset, the prompt's characters counted too
    for token, at in zip(entries["tokens"], entries["text_offset"], strict=True):
        n = len("Ask") if isinstance(prompt, list) else len(prompt)
        assert token.startswith("bytes:") or choice["text"][at - n :].startswith(token)
    assert entries["text_offset"] == sorted(entries["text_offset"])
    for token, logprob, top in zip(entries["tokens"], entries["token_logprobs"], entries["top_logprobs"]):
        assert top[token] == logprob and 2 <= len(top) <= 3


def test_echoed_control_tokens_count_as_text(tmp_path: Path) -> None:
    path = tmp_path / "toy.gguf"
    path.write_bytes(b"")
    prompt = "a<|im_start|>b"
    choice = ToyLlama(str(path))(prompt, max_tokens=2, temperature=0, logprobs=0, echo=True)["choices"][0]
    assert choice["logprobs"]["text_offset"][:4] == [0, 1, 13, 14]
    assert choice["text"].startswith(prompt)
