"""Tests of request bodies as clients send them: compressed, with whole numbers as floats, with lone surrogates."""

from __future__ import annotations

import copy
import gzip
import json
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the server extra is not installed")

import brotli
from pydantic import ValidationError, create_model
from starlette.testclient import TestClient

from dflash_ggml.server import (  # noqa: F401 - defines request bodies
    anthropic_schema,
    app,
    ollama_models,
    responses_schema,
)
from dflash_ggml.server.limits import Limits
from dflash_ggml.server.schema import Body
from dflash_ggml.session.events import Begin, Finish, ToolCallArgs, ToolCallBegin, ToolCallEnd
from dflash_ggml.session.requests import ChatRequest
from dflash_ggml.session.session import Session
from reference.fake_engine import TOOL_TEMPLATE, FakeEngine, byte_vocabulary
from reference.requests import REQUESTS
from reference.server_kit import USAGE, ScriptedRunner, application

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

HALF = "cut \ud83d"
WHOLE = "cut \ufffd"
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "Hi"}]}
TYPE = {"content-type": "application/json"}


def raw_deflate(data: bytes) -> bytes:
    """Without zlib's header."""
    stream = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return stream.compress(data) + stream.flush()


COMPRESSED = {
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("X-GZip", gzip.compress),
    "gzip in two members": ("gzip", lambda data: gzip.compress(data[:9]) + gzip.compress(data[9:])),
    "deflate": ("deflate", zlib.compress),
    "deflate without header": ("deflate", raw_deflate),
    "zstd": ("zstd", zstd.compress),
    "zstd in two frames": ("zstd", lambda data: zstd.compress(data[:9]) + zstd.compress(data[9:])),
    "br": ("br", brotli.compress),
    "identity": ("identity", bytes),
}


@pytest.fixture
def runner() -> ScriptedRunner:
    return ScriptedRunner()


@pytest.fixture
def http(runner: ScriptedRunner) -> Iterator[TestClient]:
    with TestClient(application(runner, limits=Limits(body_bytes=4000, held_bytes=6000))) as client:
        yield client


def post(http: TestClient, body: bytes, encoding: str, path: str = "/v1/chat/completions") -> Any:
    return http.post(path, content=body, headers={**TYPE, "content-encoding": encoding})


# --- compressed


@pytest.mark.parametrize("form", COMPRESSED)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"])
def test_compressed_bodies_are_decoded(
    http: TestClient, runner: ScriptedRunner, form: str, path: str
) -> None:
    name, compress = COMPRESSED[form]
    body = {**CHAT, "max_tokens": 7, "input": "Hi"} if path != "/v1/responses" else {"input": "Hi"}
    answer = post(http, compress(json.dumps(body).encode()), name, path)
    assert answer.status_code == 200, answer.text
    assert runner.requests[-1].messages[-1]["content"] == "Hi"


@pytest.mark.parametrize("form", [form for form in COMPRESSED if form != "identity"])
def test_a_body_that_is_not_in_its_encoding_is_refused(http: TestClient, form: str) -> None:
    name, compress = COMPRESSED[form]
    good = compress(json.dumps(CHAT).encode())
    for bad in (good[:-3], good[:2], b"junk, and no more than that"):
        answer = post(http, bad, name)
        assert answer.status_code == 400 and name.lower() in answer.json()["error"]["message"], answer.text
    assert "empty" in post(http, compress(b""), name).json()["error"]["message"]


@pytest.mark.parametrize("form", [form for form in COMPRESSED if form != "identity"])
def test_no_more_is_decoded_than_a_body_may_have(http: TestClient, form: str) -> None:
    name, compress = COMPRESSED[form]
    bomb = compress(bytes(1 << 24))
    if len(bomb) <= 4000:
        assert post(http, bomb, name).status_code == 413
    fits = json.dumps({**CHAT, "user": ""}).encode()
    fits = fits.replace(b'"user": ""', b'"user": "%s"' % (b"x" * (4000 - len(fits))))
    assert len(fits) == 4000 and post(http, compress(fits), name).status_code == 200
    assert post(http, compress(fits + b" "), name).status_code == 413


def test_a_zstd_frame_may_not_ask_for_a_large_window(http: TestClient) -> None:
    options = {zstd.CompressionParameter.window_log: 27, zstd.CompressionParameter.content_size_flag: 0}
    stream = zstd.ZstdCompressor(options=options)
    frame = stream.compress(json.dumps(CHAT).encode()) + stream.flush()
    assert post(http, frame, "zstd").status_code == 400


@pytest.mark.parametrize("encoding", ["compress", "gzip, gzip", "snappy", "x"])
def test_an_unknown_encoding_is_named(http: TestClient, encoding: str) -> None:
    answer = post(http, b"whatever", encoding)
    error = answer.json()["error"]
    assert answer.status_code == 415 and error["code"] == "unsupported_content_encoding"
    assert repr(encoding) in error["message"] and "gzip" in error["message"] and "zstd" in error["message"]
    assert repr(encoding) in post(http, b"", encoding, "/v1/messages").json()["error"]["message"]


def test_decoded_bytes_count_as_held(runner: ScriptedRunner) -> None:
    limits = Limits(body_bytes=4000, held_bytes=3000)
    with TestClient(application(runner, limits=limits)) as http:
        small = gzip.compress(json.dumps({**CHAT, "user": "x" * 3000}).encode())
        answer = post(http, small, "gzip")
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "too_many_bytes"
        assert post(http, gzip.compress(json.dumps(CHAT).encode()), "gzip").status_code == 200


# --- whole numbers

NUMBERS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        **CHAT,
        "max_tokens": 5,
        "n": 1,
        "seed": 3,
        "top_k": 4,
        "min_tokens": 2,
        "repeat_last_n": 6,
        "mirostat": 2,
        "n_probs": 2,
        "logprobs": True,
        "top_logprobs": 3,
        "stop_token_ids": [7, 8],
        "logit_bias": [[5, 1], [6, -2]],
        "dflash": {"budget": 7},
    },
    "/chat/completions": {**CHAT, "max_completion_tokens": 5, "logit_bias": {"5": 1}},
    "/v1/completions": {"prompt": [[1, 2], [3]], "max_tokens": 4, "n": 2, "best_of": 3, "logprobs": 1},
    "/completions": {"prompt": [1, 2], "n_predict": 4},
    "/v1/responses": {"input": "a", "max_output_tokens": 5, "top_logprobs": 2, "dflash": {"budget": 3}},
    "/v1/messages": {
        **CHAT,
        "max_tokens": 3000,
        "top_k": 3,
        "thinking": {"type": "enabled", "budget_tokens": 2000},
    },
    "/completion": {
        "prompt": [1, "a", 2],
        "n_predict": 4,
        "max_tokens": 3,
        "n_probs": 2,
        "n": 1,
        "n_cmpl": 2,
        "seed": -1,
        "top_k": 0,
        "logit_bias": [[5, 1], ["a", 2], [6, False]],
    },
    "/infill": {"input_prefix": "a", "n_predict": 3},
    "/api/chat": {
        **CHAT,
        "options": {"num_predict": 3, "top_k": 2, "seed": 1, "repeat_last_n": 2, "num_ctx": 64},
        "keep_alive": 5,
        "logprobs": True,
        "top_logprobs": 2,
    },
    "/api/generate": {"model": "toy", "prompt": "a", "options": {"num_predict": 3}},
    "/v1/embeddings": {"input": [[1, 2], [3]], "dimensions": 4},
    "/embedding": {"content": [1, 2], "embd_normalize": -1},
    "/api/embed": {"model": "toy", "input": "a", "dimensions": 4},
    "/tokenize": {"content": ["a", 2, 3], "with_pieces": True},
    "/detokenize": {"tokens": [72, 105]},
    "/v1/messages/count_tokens": {**CHAT, "thinking": {"type": "enabled", "budget_tokens": 2000}},
}


def floats(value: Any) -> Any:
    """The value with every whole number written as a float."""
    if isinstance(value, dict):
        return {key: floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [floats(item) for item in value]
    return float(value) if type(value) is int else value


@pytest.mark.parametrize("path", NUMBERS)
def test_whole_numbers_may_be_written_as_floats(path: str) -> None:
    runner = ScriptedRunner()
    with TestClient(application(runner)) as http:
        answers = [http.post(path, json=body) for body in (NUMBERS[path], floats(NUMBERS[path]))]
        halves = http.post(path, json=halved(NUMBERS[path]))
    if path == "/infill":  # not with this vocabulary
        assert [answer.status_code for answer in answers] == [501, 501]
        return
    assert [answer.status_code for answer in answers] == [200, 200], answers[1].text
    assert answers[0].headers.get("x-dflash-notes") == answers[1].headers.get("x-dflash-notes")
    half = len(runner.requests) // 2
    assert repr(runner.requests[:half]) == repr(runner.requests[half : 2 * half])
    if not runner.requests and "duration" not in answers[0].text:
        assert answers[0].json() == answers[1].json()
    assert halves.status_code == 400 and "internal" not in halves.text, halves.text


def halved(value: Any) -> Any:
    """The value with a half more in the first whole number."""
    text = json.dumps(value)
    at = next(i for i, c in enumerate(text) if c.isdigit() and text[i - 1] in " [-")
    end = next(i for i in range(at, len(text)) if not text[i].isdigit())
    return json.loads(f"{text[:end]}.5{text[end:]}")


def bodies(kind: type[Body] = Body) -> Iterator[type[Body]]:
    for below in kind.__subclasses__():
        yield below
        yield from bodies(below)


def test_every_field_that_takes_a_whole_number_takes_it_as_a_float() -> None:
    found = 0
    for body in set(bodies()):
        for name, field in body.model_fields.items():
            probe = create_model(
                "Probe", __config__={"strict": True}, value=(field.rebuild_annotation(), ...)
            )
            for sample in (1, 2, [1], [[1, 2]]):
                try:
                    taken = probe(value=sample)
                except ValidationError:
                    continue
                found += 1
                assert probe(value=floats(sample)) == taken, (body.__name__, name)
    assert found > 50


# --- no characters


@pytest.fixture(scope="module")
def rendering() -> Iterator[tuple[TestClient, ScriptedRunner]]:
    """A server whose prompts are rendered and tokenised; its model calls a tool with half a surrogate pair."""
    runner = ScriptedRunner(
        lambda request: [
            Begin(12, 5),
            ToolCallBegin(0, "call_a", "f"),
            ToolCallArgs(0, '{"a": "\\ud8'),
            ToolCallArgs(0, '3d", "input": "\\ud83d\\ude00 \\ude00"}'),
            ToolCallEnd(0),
            USAGE,
            Finish("tool_calls"),
        ]
    )
    session = Session(FakeEngine(tokenizer=byte_vocabulary(template=TOOL_TEMPLATE)))  # type: ignore[arg-type]
    runner.n_ctx = 1 << 16

    def count(request: Any) -> int:
        return session.count_tokens(request) if isinstance(request, ChatRequest) else 1

    runner.count = count  # type: ignore[method-assign]
    with TestClient(application(runner)) as made:
        yield made, runner


def strings(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every text inside `value`."""
    for key, child in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(child, (dict, list)):
            yield from strings(child, (*path, key))
        elif isinstance(child, str):
            yield (*path, key)


@pytest.mark.parametrize("path", REQUESTS)
def test_half_a_surrogate_pair_may_be_in_any_text(
    rendering: tuple[TestClient, ScriptedRunner], path: str
) -> None:
    http, _ = rendering
    for where in [*strings(REQUESTS[path]), ("metadata",), ("user",)]:
        body = copy.deepcopy(REQUESTS[path])
        holder: Any = body
        for key in where[:-1]:
            holder = holder[key]
        old = holder.get(where[-1], "") if isinstance(holder, dict) else holder[where[-1]]
        holder[where[-1]] = {HALF: HALF} if where == ("metadata",) else old + HALF
        for text in (
            json.dumps(body).encode(),
            json.dumps(body, ensure_ascii=False).encode(errors="surrogatepass"),
        ):
            answer = http.post(path, content=text, headers=TYPE)
            assert answer.status_code in (200, 400, 404), (where, answer.text)
            assert "internal error" not in answer.content.decode() and "JSON" not in answer.text, (
                where,
                answer.text,
            )


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": HALF})}}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": HALF}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": HALF}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": HALF},
            {"role": "user", "content": [{"type": "text", "text": HALF}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": HALF},
        ]
    },
    "/v1/responses": {
        "instructions": HALF,
        "metadata": {"a": HALF},
        "input": [
            {"role": "user", "content": HALF},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": json.dumps({"a": HALF})},
            {"type": "function_call_output", "call_id": "c", "output": HALF},
        ],
    },
    "/v1/messages": {
        "model": "toy",
        "max_tokens": 5,
        "system": HALF,
        "messages": [
            {"role": "user", "content": HALF},
            {"role": "assistant", "content": [USE]},
            {"role": "user", "content": [RESULT]},
        ],
    },
    "/api/chat": {
        "model": "toy",
        "messages": [
            {"role": "user", "content": HALF},
            {"role": "assistant", "content": HALF, "tool_calls": [{"function": {"name": "f", "arguments": {"a": HALF}}}]},
            {"role": "tool", "content": HALF, "tool_name": "f"},
        ],
    },
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", CONVERSATIONS)
def test_the_history_may_hold_halves_and_the_answer_too(
    rendering: tuple[TestClient, ScriptedRunner], path: str, stream: bool
) -> None:
    http, runner = rendering
    text = json.dumps({**CONVERSATIONS[path], "stream": stream})
    answer = http.post(path, content=text, headers=TYPE)
    assert answer.status_code == 200 and "internal" not in answer.text, answer.text
    messages = runner.requests[-1].messages
    assert [m["content"] for m in messages if m["content"]] == [WHOLE] * sum(
        bool(m["content"]) for m in messages
    )
    body = answer.content.decode()  # is UTF-8
    if not stream and path in (
        "/v1/messages",
        "/api/chat",
    ):  # these send objects, the others the model's own text
        assert '"a":"\ufffd"' in body and '"input":"\U0001f600 \ufffd"' in body


def test_a_stored_conversation_goes_on(rendering: tuple[TestClient, ScriptedRunner]) -> None:
    http, runner = rendering
    first = http.post(
        "/v1/responses", content=json.dumps(CONVERSATIONS["/v1/responses"]), headers=TYPE
    ).json()
    assert first["metadata"] == {"a": WHOLE} and first["instructions"] == WHOLE
    result = {"type": "function_call_output", "call_id": "call_a", "output": HALF}
    more = {"input": [result], "previous_response_id": first["id"]}
    assert http.post("/v1/responses", content=json.dumps(more), headers=TYPE).status_code == 200
    assert [m["content"] for m in runner.requests[-1].messages if m["content"]] == [WHOLE] * 3


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        (rb"\ud83d\ude00", "\U0001f600"),
        (rb"\\ud83d", r"\ud83d"),
        (rb"\\\ud83d", "\\\ufffd"),
        (rb"\uDC00\uD83D", "\ufffd\ufffd"),
        (rb"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (rb"\ud83d\n", "\ufffd\n"),
        (b"caf\xe9", "caf\ufffd"),
        (b"\xe2\x82", "\ufffd"),
        (rb"\u0000\uffff", "\x00\uffff"),
    ],
)
def test_values_in_place_of_text(
    http: TestClient, runner: ScriptedRunner, inner: bytes, expected: str
) -> None:
    body = b'{"messages": [{"role": "user", "content": "%s"}]}' % inner
    answer = http.post("/v1/chat/completions", content=body, headers=TYPE)
    assert answer.status_code == 200, answer.text
    assert runner.requests[-1].messages[-1]["content"] == expected


def test_a_byte_order_mark_is_no_error(http: TestClient) -> None:
    body = b"\xef\xbb\xbf" + json.dumps(CHAT).encode()
    assert http.post("/v1/chat/completions", content=body, headers=TYPE).status_code == 200


@pytest.mark.parametrize(
    ("field", "name"),
    [
        (b'"metadata": {"a": [0, %s]}', "metadata.a[1]"),
        (b'"temperature": %s', "temperature"),
        (b'"x": [[%s]]', "x[0][0]"),
    ],
)
@pytest.mark.parametrize("number", [b"1e999", b"-1e999"])
def test_numbers_that_no_float_can_hold_are_refused(
    http: TestClient, number: bytes, field: bytes, name: str
) -> None:
    rest = json.dumps({**CHAT, "max_tokens": 5, "input": "a"}).encode()[1:]
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"):
        answer = http.post(path, content=b"{" + field % number + b", " + rest, headers=TYPE)
        assert answer.status_code == 400 and f"{name}: the number is too large" in answer.text
