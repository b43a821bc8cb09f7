"""Tests of the application over real sockets: abuse, limits, authentication, cancellation, and the queue."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the server extra is not installed")

from starlette.testclient import TestClient

from dflash_ggml.errors import ConfigError, DeviceError
from dflash_ggml.server.app import create_app
from dflash_ggml.server.auth import KeyRing, is_loopback, require_safe_bind
from dflash_ggml.server.errors import ApiError
from dflash_ggml.server.host_guard import check_name
from dflash_ggml.server.limits import Limits, check_sizes
from dflash_ggml.server.worker import Worker
from reference.server_kit import (
    ScriptedRunner,
    application,
    plain,
    service,
    serving,
    wait_until,
)

CHAT = {"model": "toy", "messages": [{"role": "user", "content": "Hi"}]}
ENDLESS = {"model": "toy", "messages": [{"role": "user", "content": "endless"}]}


def script(request: Any) -> Any:
    return None if request.messages[-1]["content"] == "endless" else plain()


@pytest.fixture
def runner() -> ScriptedRunner:
    made = ScriptedRunner(script)
    made.pace = 0.002
    return made


@contextlib.contextmanager
def posted(port: int, body: Any, path: str = "/v1/chat/completions") -> Iterator[http.client.HTTPResponse]:
    """POST a body and give the response, whose connection is cut on leaving."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    data = body if isinstance(body, bytes) else json.dumps(body)
    connection.request("POST", path, data, {"content-type": "application/json"})
    try:
        yield connection.getresponse()
    finally:
        connection.close()


def test_disconnect_ends_a_stream(runner: ScriptedRunner) -> None:
    with serving(application(runner)) as port:
        with posted(port, {**ENDLESS, "stream": True}) as response:
            assert response.status == 200
            assert response.readline().startswith(b"data: ")
        wait_until(lambda: runner.cancelled == 1)
        with posted(port, CHAT) as response:
            assert json.load(response)["choices"][0]["message"]["content"] == "Hello there"


def test_closing_a_stream_of_the_official_clients_cancels(runner: ScriptedRunner) -> None:
    openai, anthropic = pytest.importorskip("openai"), pytest.importorskip("anthropic")
    with serving(application(runner)) as port:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0)
        with client.chat.completions.create(**ENDLESS, stream=True) as chunks:
            next(iter(chunks))
        wait_until(lambda: runner.cancelled == 1)
        with client.responses.create(model="toy", input="endless", stream=True) as events:
            next(iter(events))
        wait_until(lambda: runner.cancelled == 2)
        other = anthropic.Anthropic(base_url=f"http://127.0.0.1:{port}", api_key="x", max_retries=0)
        with other.messages.create(**ENDLESS, max_tokens=9, stream=True) as events:
            next(iter(events))
        wait_until(lambda: runner.cancelled == 3)


def test_disconnect_ends_a_whole_answer_and_a_waiting_one(runner: ScriptedRunner) -> None:
    made = service(runner)
    with serving(create_app(made)) as port:
        first = http.client.HTTPConnection("127.0.0.1", port)
        second = http.client.HTTPConnection("127.0.0.1", port)
        for connection in (first, second):
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(ENDLESS), headers)
            wait_until(lambda: made.worker.running == 1)
        wait_until(lambda: made.worker.waiting == 1)
        second.close()
        wait_until(lambda: made.worker.waiting == 0)
        assert runner.cancelled == 0
        first.close()
        wait_until(lambda: runner.cancelled == 1)
        assert len(runner.requests) == 1


def test_many_abrupt_disconnects(runner: ScriptedRunner) -> None:
    made = service(runner)
    with serving(create_app(made)) as port:
        for i in range(200):
            body = json.dumps({**ENDLESS, "stream": bool(i % 2)}).encode()
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
                sock.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body[: len(body) - i % 3])

        def answered() -> bool:
            with posted(port, CHAT) as response:
                return (
                    response.status == 200
                )  # 503 while requests of disconnected clients still fill the queue

        wait_until(answered)
        wait_until(lambda: made.worker.running == 0 and made.worker.waiting == 0)


def test_half_sent_body_times_out(runner: ScriptedRunner) -> None:
    limits = Limits(body_seconds=0.1)
    with serving(application(runner, limits=limits)) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            sock.sendall(head + b'Content-Length: 500\r\n\r\n{"model": ')
            status = sock.recv(4096)
        assert status.startswith(b"HTTP/1.1 408 ")
        with posted(port, CHAT) as response:
            assert response.status == 200


def test_slow_reader_is_cut_off(runner: ScriptedRunner) -> None:
    runner.pace, runner.word = 0.01, "x" * 1_000_000
    with serving(application(runner, limits=Limits(send_seconds=0.3))) as port:
        with posted(port, {**ENDLESS, "stream": True}) as response:
            assert response.status == 200
            wait_until(lambda: runner.cancelled == 1)
        with posted(port, CHAT) as response:
            assert response.status == 200


def test_queue_full_and_order(runner: ScriptedRunner) -> None:
    made = service(runner, queue_limit=1)
    with serving(create_app(made)) as port, contextlib.ExitStack() as stack:
        connections = []
        for expected in (0, 1):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            stack.callback(connection.close)
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(ENDLESS), headers)
            connections.append(connection)
            wait_until(lambda n=expected: made.worker.running == 1 and made.worker.waiting == n)
        for path in ("/v1/chat/completions", "/v1/messages"):
            body = CHAT if "chat" in path else {**CHAT, "max_tokens": 5}
            with posted(port, body, path) as response:
                error = json.load(response)["error"]
                assert response.status == 503 and int(response.headers["retry-after"]) >= 1
                assert response.headers["x-should-retry"] == "true"
                assert error.get("code") == "queue_full" or error["type"] == "overloaded_error"
                assert "1 requests are waiting, the limit for all" in error["message"]


@pytest.fixture
def http_client(runner: ScriptedRunner) -> Iterator[TestClient]:
    limits = Limits(body_bytes=4000, nesting=16, messages=4)
    with TestClient(application(runner, limits=limits)) as client:
        yield client


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 400, "empty"),
        (b"{", 400, "JSON"),
        (b"[1]", 400, "object"),
        (b"null", 400, "object"),
        (b'{"a": NaN}', 400, "JSON"),
        (b"\xff\xfe", 400, "JSON"),
        (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", 400, "nested"),
        (b"[" * 3000, 400, "JSON"),
        (b'{"x": "' + b"y" * 5000 + b'"}', 413, "larger"),
        (json.dumps({"messages": [{"role": "user", "content": "x"}] * 5}).encode(), 400, "at most 4"),
    ],
)
def test_malformed_bodies(http_client: TestClient, body: bytes, status: int, words: str) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize"):
        if words == "at most 4" and path != "/v1/chat/completions":
            continue
        response = http_client.post(path, content=body, headers={"content-type": "application/json"})
        assert response.status_code == status, path
        assert words in response.json()["error"]["message"]


def test_chunked_body_is_limited_too(http_client: TestClient) -> None:
    headers = {"content-type": "application/json"}
    response = http_client.post("/v1/chat/completions", content=iter([b"x" * 3000] * 2), headers=headers)
    assert response.status_code == 413


def test_other_content_types_are_refused(http_client: TestClient) -> None:
    response = http_client.post(
        "/v1/chat/completions", content=json.dumps(CHAT), headers={"content-type": "text/plain"}
    )
    assert response.status_code == 415


def test_unknown_paths_and_methods(http_client: TestClient) -> None:
    missing = http_client.get("/v1/nothing")
    assert missing.status_code == 404 and missing.json()["error"]["type"] == "not_found_error"
    wrong = http_client.get("/v1/messages")
    assert wrong.status_code == 405 and wrong.json()["type"] == "error"
    assert http_client.get("/static/../server/app.py").status_code == 404


def test_head_and_health(http_client: TestClient) -> None:
    for path in ("/", "/health", "/v1/models", "/metrics"):
        assert http_client.head(path).status_code == 200
    assert http_client.get("/health").json()["status"] == "ok"


def test_tokenize_detokenize_props_metrics(http_client: TestClient) -> None:
    tokens = http_client.post("/tokenize", json={"content": "hello é"}).json()["tokens"]
    text = http_client.post("/detokenize", json={"tokens": tokens}).json()
    assert text == {"content": "hello é", "prompt": "hello é"}
    pieces = http_client.post("/tokenize", json={"content": "hello", "with_pieces": True}).json()["tokens"]
    assert "".join(p["piece"] for p in pieces) == "hello"
    assert http_client.post("/detokenize", json={"tokens": [10**6]}).status_code == 400
    assert http_client.get("/props").json()["n_ctx"] == 256
    http_client.post("/v1/chat/completions", json=CHAT)
    text = http_client.get("/metrics").text
    assert 'dflash_request_success_total{finished_reason="stop"} 1.0' in text
    assert "dflash_spec_decode_num_draft_tokens_total 60.0" in text
    assert "dflash_spec_decode_num_accepted_tokens_total 5.0" in text
    assert "dflash_spec_decode_num_drafts_total 4.0" in text
    for source, drafted, accepted in (("dflash", 52, 3), ("suffix", 14, 4)):
        assert f'dflash_spec_decode_source_draft_tokens_total{{source="{source}"}} {drafted}.0' in text
        assert f'dflash_spec_decode_source_accepted_tokens_total{{source="{source}"}} {accepted}.0' in text


def test_prompt_too_long_is_refused_before_the_queue(http_client: TestClient, runner: ScriptedRunner) -> None:
    long = {"model": "toy", "messages": [{"role": "user", "content": "x" * 300}]}
    response = http_client.post("/v1/chat/completions", json={**long, "stream": True})
    assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"
    assert runner.requests == []


def test_keys(runner: ScriptedRunner) -> None:
    with TestClient(application(runner, keys=["one", "two"])) as client:
        for path in ("/v1/models", "/metrics", "/props", "/v1/models/toy"):
            assert client.get(path).status_code == 401
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 401
        assert client.post("/v1/messages", json=CHAT).json()["error"]["type"] == "authentication_error"
        for headers in (
            {"authorization": "Bearer two"},
            {"authorization": "bearer one"},
            {"x-api-key": "one"},
        ):
            assert client.get("/v1/models", headers=headers).status_code == 200
        for headers in ({"authorization": "Basic two"}, {"x-api-key": ""}, {"authorization": "Bearer on"}):
            assert client.get("/v1/models", headers=headers).status_code == 401
        assert client.get("/health").status_code == 200 and client.get("/").status_code == 200


def test_key_rules() -> None:
    assert KeyRing([]).authorise({}) == ""
    assert KeyRing(["a", "b"]).authorise({"x-api-key": "b"}) == "1"
    for bad in ("", " a", "é", "a\n"):
        with pytest.raises(ConfigError):
            KeyRing([bad])
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("localhost")
    assert not is_loopback("0.0.0.0") and not is_loopback("example.org")
    require_safe_bind("127.0.0.1", [])
    require_safe_bind("0.0.0.0", ["key"])
    with pytest.raises(ConfigError, match="--api-key"):
        require_safe_bind("0.0.0.0", [])


def test_foreign_hosts_and_origins(runner: ScriptedRunner) -> None:
    with TestClient(create_app(service(runner), allowed_hosts=["127.0.0.1"])) as client:
        refused = client.get("/health", headers={"host": "evil.example:8080"})
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "host_not_allowed"
        assert "--allowed-host evil.example," in refused.json()["error"]["message"]
        assert client.get("/health", headers={"host": "127.0.0.1:8080"}).status_code == 200
    with TestClient(application(runner)) as client:
        answer = client.get("/health", headers={"origin": "http://evil.example"})
        assert "access-control-allow-origin" not in answer.headers
    with TestClient(create_app(service(runner), cors_origins=["http://good.example"])) as client:
        answer = client.get("/health", headers={"origin": "http://good.example"})
        assert answer.headers["access-control-allow-origin"] == "http://good.example"


# what the official clients for JavaScript send beside what every page may
CLIENT_HEADERS = (
    "anthropic-beta,anthropic-dangerous-direct-browser-access,anthropic-version,authorization,content-type,"
    "idempotency-key,openai-beta,openai-organization,openai-project,x-api-key,x-stainless-arch,"
    "x-stainless-helper-method,x-stainless-lang,x-stainless-os,x-stainless-package-version,"
    "x-stainless-retry-count,x-stainless-runtime,x-stainless-runtime-version,x-stainless-timeout"
)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/messages"),
        ("DELETE", "/v1/responses/r"),
        ("GET", "/api/tags"),
    ],
)
def test_pages_of_an_allowed_origin_may_use_the_official_clients(
    runner: ScriptedRunner, method: str, path: str
) -> None:
    headers = {
        "origin": "http://good.example",
        "access-control-request-method": method,
        "access-control-request-headers": CLIENT_HEADERS,
        "access-control-request-private-network": "true",
    }
    with TestClient(create_app(service(runner, keys=["k"]), cors_origins=["http://good.example"])) as client:
        answer = client.options(path, headers=headers)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "http://good.example"
        assert answer.headers["access-control-allow-headers"] == CLIENT_HEADERS
        assert answer.headers["access-control-allow-private-network"] == "true"
        assert method in answer.headers["access-control-allow-methods"]
        refused = client.options(path, headers={**headers, "origin": "http://evil.example"})
        assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers
        assert client.request(method, path, headers=headers).status_code == 401


@pytest.mark.parametrize(
    ("body", "status", "names"),
    [
        ({**CHAT, "verbosity": "low"}, 200, {"x-dflash-notes", "x-request-id", "request-id"}),
        ({**CHAT, "messages": "x"}, 400, {"x-should-retry", "x-request-id"}),
    ],
)
def test_pages_may_read_the_headers_that_clients_read(
    runner: ScriptedRunner, body: dict[str, Any], status: int, names: set[str]
) -> None:
    with TestClient(create_app(service(runner), cors_origins=["http://good.example"])) as client:
        origin = {"origin": "http://good.example"}
        answer = client.post("/v1/chat/completions", json=body, headers=origin)
        other = client.post("/v1/chat/completions", json=body, headers={"origin": "http://evil.example"})
    assert answer.status_code == status
    exposed = {name.strip() for name in answer.headers["access-control-expose-headers"].split(",")}
    assert names <= set(answer.headers) and names <= exposed and "retry-after" in exposed
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    ("allowed", "let_in", "refused"),
    [
        (["localhost", "::1"], ["LocalHost:80", "[::1]:8080", "[::1]"], ["", "::2", "localhost.example"]),
        (["*.home"], ["a.home", "b.a.home:1"], ["home", "ahome", "a.home.example"]),
        (["*"], ["anything", ""], []),
    ],
)
def test_names_of_hosts(
    runner: ScriptedRunner, allowed: list[str], let_in: list[str], refused: list[str]
) -> None:
    with TestClient(create_app(service(runner), allowed_hosts=allowed)) as client:
        codes = {
            name: client.get("/health", headers={"host": name}).status_code for name in (*let_in, *refused)
        }
    assert codes == {**dict.fromkeys(let_in, 200), **dict.fromkeys(refused, 400)}


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("LLM.home:8080", "llm.home"),
        ("[::1]:80", "::1"),
        ("[::1]", "::1"),
        ("::1", "::1"),
        ("fe80::1%eth0", "fe80::1%eth0"),
        ("*.example.org:80", "*.example.org"),
        ("home.", "home."),
        ("*", "*"),
    ],
)
def test_an_allowed_name_is_taken_from_the_header(name: str, plain: str) -> None:
    assert check_name(name) == plain


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        ":80",
        "http:",
        "http://a",
        "a,b",
        ".example.org",
        "a..b",
        "*.",
        "*.*",
        "a*",
        ".",
        "a]",
        "[::1",
        "a b",
    ],
)
def test_a_name_that_never_matches_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a host name"):
        check_name(name)


@pytest.mark.parametrize("host", ["*", "*.home", "a,b", ""])
def test_no_advice_to_allow_what_is_no_name(runner: ScriptedRunner, host: str) -> None:
    with TestClient(create_app(service(runner), allowed_hosts=["127.0.0.1"])) as client:
        refused = client.get("/health", headers={"host": host})
    assert refused.status_code == 400 and "--allowed-host" not in refused.json()["error"]["message"]


def test_a_failed_load_is_reported() -> None:
    def refuse(progress: Any) -> Any:
        raise DeviceError("no memory for the K/V cache")

    worker: Worker[Any] = Worker(refuse)
    worker.start()
    with pytest.raises(DeviceError):
        worker.wait_ready(10)
    with pytest.raises(ApiError, match="no memory") as caught:
        worker.require_ready()
    assert caught.value.status == 503
    assert worker.stop()


def test_stop_closes_the_runner_and_refuses(runner: ScriptedRunner) -> None:
    made = service(runner)
    with TestClient(create_app(made)) as client:
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
        made.worker.drain()
        answer = client.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "shutting_down"
        assert client.get("/health").status_code == 503
    assert runner.closed


def test_depth() -> None:
    limits = Limits(nesting=3)
    check_sizes({"a": [1, {"b": 2}]}, limits)
    with pytest.raises(ApiError, match="nested deeper than 3 levels"):
        check_sizes({"a": [1, {"b": []}]}, limits)
