"""Tests of requests in the shape of real clients, each posted twice: as a stream and whole, second turns with a tool's result.

`clients/*.json` hold a client's turns: the body it sends (on top of `base`), what the model writes, and what must come of
it: text, calls in the client's own shape, words that must be in the prompt, and words of the notes (none: no header).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the server extra is not installed")
pytest.importorskip("llguidance", reason="the grammar extra is not installed")

from starlette.testclient import TestClient

from dflash_ggml.config import EngineConfig
from dflash_ggml.server import anthropic, openai_chat, openai_responses
from dflash_ggml.server.app import create_app, make_service
from dflash_ggml.server.dialect import Settings
from dflash_ggml.server.response_store import ResponseStore
from dflash_ggml.server.runner import Runner
from dflash_ggml.session.session import Session
from reference.fake_engine import TOOL_TEMPLATE, FakeEngine, byte_vocabulary
from reference.vendored import vendored

CLIENTS = sorted((Path(__file__).parent / "clients").glob("*.json"))
GPT_OSS = "openai-gpt-oss-120b"
# what the published template of Qwen3.5 refuses
REFUSALS = (
    "{%- if not messages | selectattr('role', 'equalto', 'user') | list %}"
    "{{ raise_exception('No user query') }}{% endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'system' and not loop.first %}{{ raise_exception('System must be first') }}{% endif %}"
    "{%- if m.role not in ['system', 'user', 'assistant', 'tool'] %}{{ raise_exception('Odd role') }}{% endif %}"
    "{% endfor %}"
)


class Prompts(Runner):
    """A runner that remembers the prompts."""

    def prepare(self, request: Any) -> Any:
        self.prepared = super().prepare(request)
        return self.prepared


@pytest.fixture(scope="module", params=["tags", "harmony"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[TestClient, Prompts, FakeEngine]]:
    is_harmony = request.param == "harmony"
    template = vendored(f"templates/{GPT_OSS}.jinja").read_text("utf-8") if is_harmony else TOOL_TEMPLATE
    engine = FakeEngine(
        config=EngineConfig(model=Path("toy.gguf"), n_ctx=1 << 16, n_batch=4096),
        tokenizer=byte_vocabulary(
            template=template if is_harmony else REFUSALS + template, harmony=is_harmony
        ),
    )
    runner = Prompts(Session(engine))  # type: ignore[arg-type]
    app = create_app(make_service(lambda progress: runner, Settings(names=("toy",))))
    with TestClient(app) as http:
        yield http, runner, engine


def spoken(reply: dict[str, Any]) -> str:
    """Model output that thinks, answers and calls this."""
    text = "" if reply["think"] is None else f"{reply['think']}</think>\n\n"
    text += reply["text"]
    for call in reply["calls"]:
        pairs = call["arguments"].items()
        inner = "".join(
            f"<parameter={k}>\n{v if isinstance(v, str) else json.dumps(v)}\n</parameter>\n" for k, v in pairs
        )
        text += f"<tool_call>\n<function={call['name']}>\n{inner}</function>\n</tool_call>\n"
    return text.rstrip("\n") if reply["calls"] else text


def spoken_in_harmony(reply: dict[str, Any]) -> str:
    """As `spoken`, of gpt-oss: text before calls is commentary."""
    parts = [] if reply["think"] is None else [f"<|channel|>analysis<|message|>{reply['think']}"]
    if reply["text"] or not reply["calls"]:
        channel = "commentary" if reply["calls"] else "final"
        parts.append(f"<|channel|>{channel}<|message|>{reply['text']}")
    for call in reply["calls"]:
        head = f"<|channel|>commentary to=functions.{call['name']} <|constrain|>json<|message|>"
        parts.append(head + json.dumps(call["arguments"]))
    return "<|end|><|start|>assistant".join(parts) + ("<|call|>" if reply["calls"] else "<|return|>")


def events_of(text: str) -> list[dict[str, Any]]:
    """The data of server-sent events."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def chat(answer: Any, streamed: bool) -> tuple[str, str, list[dict[str, Any]]]:
    """Thinking, text and calls of a chat answer."""
    if not streamed:
        message = answer["choices"][0]["message"]
        deltas = [
            message
            | {"tool_calls": [{"index": i, **c} for i, c in enumerate(message.get("tool_calls") or ())]}
        ]
    else:
        deltas = [event["choices"][0]["delta"] for event in answer if event["choices"]]
    calls: dict[int, dict[str, Any]] = {}
    for call in (c for d in deltas for c in d.get("tool_calls") or ()):
        whole = calls.setdefault(call["index"], {"type": call.get("type"), "arguments": ""})
        whole["arguments"] += call["function"]["arguments"]
        whole.setdefault("name", call["function"].get("name"))
    for call in calls.values():
        call["arguments"] = json.loads(call["arguments"])
    text, thought = ("".join(d.get(k) or "" for d in deltas) for k in ("content", "reasoning_content"))
    return thought, text, list(calls.values())


def responses(answer: Any, streamed: bool) -> tuple[str, str, list[dict[str, Any]]]:
    """As `chat`, of a response; its events must add up to it."""
    if streamed:
        done = [event["item"] for event in answer if event["type"] == "response.output_item.done"]
        for item in done:
            mine = [event for event in answer if event.get("item_id") == item["id"]]
            pieces = [event["delta"] for event in mine if event["type"].endswith("_call_input.delta")]
            assert "".join(pieces) == item.get("input", "")
        answer = answer[-1]["response"]
        assert answer["output"] == done
    parts = [p for item in answer["output"] for p in item.get("content") or ()]
    thought = "".join(p["text"] for p in parts if p["type"] == "reasoning_text")
    text = "".join(p["text"] for p in parts if p["type"] == "output_text")
    calls = [dict(item) for item in answer["output"] if item["type"].endswith("_call")]
    for call in calls:
        if "arguments" in call:
            call["arguments"] = json.loads(call["arguments"])
    return thought, text, calls


def messages(answer: Any, streamed: bool) -> tuple[str, str, list[dict[str, Any]]]:
    """As `chat`, of a message."""
    blocks: list[dict[str, Any]] = [] if streamed else answer["content"]
    for event in answer if streamed else ():
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"], partial=""))
        elif event["type"] == "content_block_delta":
            kind, value = event["delta"]["type"], list(event["delta"].values())[-1]
            key = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}.get(
                kind
            )
            blocks[-1][key or "partial"] += value
    for block in blocks:
        if block["type"] == "tool_use" and streamed:
            block["input"] = json.loads(block["partial"])
    thought = "".join(b["thinking"] for b in blocks if b["type"] == "thinking")
    text = "".join(b["text"] for b in blocks if b["type"] == "text")
    return thought, text, [b for b in blocks if b["type"] == "tool_use"]


_CALL = re.compile(r"(?:<function=(.*?)>\n?)?(?:<parameter=\w+>\n)?(.*)", re.DOTALL)


def is_shown(words: str, prompt: str) -> bool:
    """Whether a prompt holds these words, as they are or as gpt-oss gets calls and results: by recipient, and as JSON."""
    if words in prompt:
        return True
    match = _CALL.fullmatch(words)
    assert match
    recipient = f" to=functions.{match[1]}<" if match[1] else ""
    return recipient in prompt and json.dumps(match[2], ensure_ascii=False)[1:-1] in prompt


READERS = {"/v1/chat/completions": chat, "/v1/responses": responses, "/v1/messages": messages}


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", CLIENTS, ids=lambda path: path.stem)
def test_client(server: tuple[TestClient, Prompts, FakeEngine], path: Path, streamed: bool) -> None:
    http, runner, engine = server
    client = json.loads(path.read_text(encoding="utf-8"))
    assert len(client["turns"]) > 1
    for turn in client["turns"]:
        is_harmony = runner.session.templates.of(None)[0].is_harmony
        engine.replies = [(spoken_in_harmony if is_harmony else spoken)(turn["reply"])]
        body = {**client["base"], **turn["body"], "stream": streamed, "temperature": 0}
        response = http.post(client["path"], json=body)
        assert response.status_code == 200, response.text
        answer = events_of(response.text) if streamed else response.json()
        thought, text, calls = READERS[client["path"]](answer, streamed)
        assert (thought.strip(), text.strip()) == (turn["reply"]["think"] or "", turn["text"])
        expected = turn.get("calls", [])
        assert len(calls) == len(expected)
        assert [{key: call.get(key) for key in wanted} for call, wanted in zip(calls, expected)] == expected
        assert [words for words in turn.get("prompt", ()) if not is_shown(words, runner.prepared.text)] == []
        notes = response.headers.get("x-dflash-notes", "")
        assert bool(notes) == bool(turn.get("notes")), notes
        assert [words for words in turn.get("notes", ()) if words not in notes] == []


@pytest.mark.parametrize("name", ["Qwen3.5-4B", "poolside-Laguna-S-2.1", GPT_OSS])
def test_real_templates_show_all_that_clients_send(name: str) -> None:
    template = vendored(f"templates/{name}.jinja").read_text(encoding="utf-8")
    session = Session(FakeEngine(tokenizer=byte_vocabulary(template=template)))  # type: ignore[arg-type]
    read = {
        "/v1/chat/completions": openai_chat.read_call,
        "/v1/responses": partial(openai_responses.read_call, store=ResponseStore()),
        "/v1/messages": anthropic.read_call,
    }
    for client in (json.loads(path.read_text(encoding="utf-8")) for path in CLIENTS):
        for turn in client["turns"]:
            call = read[client["path"]]({**client["base"], **turn["body"]}, Settings(names=("toy",)))
            prompt = session.prompts.make(call.request).text
            contents = [m["content"].strip() for m in call.request.messages]
            assert [text for text in contents if not is_shown(text, prompt)] == [], client["client"]


def test_every_client_is_here() -> None:
    assert len(CLIENTS) == 15
