"""Tests of the client for other servers: requests, parsing of streams, and one-line errors."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from dflash_ggml.bench import servers
from dflash_ggml.bench.measure import Interrupted, Job, Run, Setting
from dflash_ggml.bench.prompts import Prompt
from dflash_ggml.bench.servers import Server, ServerError
from dflash_ggml.errors import ConfigError

MODELS = {"data": [{"id": "first"}, {"id": "second"}]}
USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}}
CHAT = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"delta": {"reasoning_content": "hm"}}]},
    {"choices": [{"delta": {"content": "yes"}}]},
    {"choices": [{"delta": {}, "finish_reason": "stop"}]},
    {"choices": [], "usage": USAGE},
]
COMPLETION = [
    {"choices": [{"text": "a"}], "usage": None},
    {"choices": [{"text": "b", "finish_reason": "length"}]},
    {"choices": [], "usage": USAGE},
    {"choices": [], "usage": None},
]


def sse(*chunks: Any) -> bytes:
    return (
        b": a comment\n\n"
        + b"".join(f"data: {json.dumps(c)}\n\n".encode() for c in chunks)
        + b"data: [DONE]\n\n"
    )


class StandIn(ThreadingHTTPServer):
    """A scripted server: a status and a body for each path; `asked` has the requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, tuple[int, bytes]] = {
            "/v1/models": (200, json.dumps(MODELS).encode()),
            "/v1/chat/completions": (200, sse(*CHAT)),
            "/v1/completions": (200, sse(*COMPLETION)),
        }
        self.asked: list[tuple[str, Any, str | None]] = []
        self.length: int | None = None
        self.wait = threading.Event()
        self.wait.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def log_message(self, *args: object) -> None:
        pass

    def answer(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.loads(data) if data else None
        self.server.asked.append((self.path, body, self.headers.get("Authorization")))
        status, answer = self.server.answers.get(self.path, (404, b'{"detail": "Not Found"}'))
        self.send_response(status)
        if self.server.length is not None:
            self.send_header("Content-Length", str(self.server.length))
        self.end_headers()
        self.wfile.write(answer[:40])
        self.wfile.flush()
        self.server.wait.wait(60)
        self.wfile.write(answer[40:])

    do_GET = do_POST = answer


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    with serving(StandIn()) as server:
        yield server


@contextmanager
def serving(server: StandIn) -> Iterator[StandIn]:
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.wait.set()
        server.shutdown()
        thread.join()
        server.server_close()


def ask(server: Server, chat: bool = False, should_stop: Callable[[], bool] = lambda: False) -> Run:
    setting = Setting("there", temperature=0.5, server=server.url)
    return server.complete(Job(Prompt("one", "chat", "Hi", chat), [1], "Hi", setting, 9, 3), should_stop)


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_a_completion(stand_in: StandIn, end: str) -> None:
    server = Server(stand_in.url + end, "secret")
    server.open()
    assert server.model == "first"
    found = ask(server)
    assert (found.prompt, found.style, found.setting, found.finish) == ("one", "chat", "there", "length")
    assert (found.prompt_n, found.n, found.cached_n, found.steps) == (7, 5, 3, 0)
    assert found.ttft_ms > 0 and found.decode_ms >= 0 and found.fresh_ttft_ms is None
    path, body, key = stand_in.asked[-1]
    assert path == "/v1/completions" and key == "Bearer secret"
    assert body == {
        "model": "first", "prompt": "Hi", "max_tokens": 9, "temperature": 0.5, "seed": 3, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip


def test_a_chat(stand_in: StandIn) -> None:
    """Reasoning counts as text; a chunk that only names the role does not."""
    server = Server(stand_in.url)
    server.open()
    assert (ask(server, chat=True).n, ask(server, chat=True).finish) == (5, "stop")
    path, body, key = stand_in.asked[-1]
    assert path == "/v1/chat/completions" and body["messages"] == [{"role": "user", "content": "Hi"}]
    assert key is None and "prompt" not in body
    silent = [CHAT[0], {"choices": [], "usage": {"completion_tokens": 1}}]
    stand_in.answers["/v1/chat/completions"] = (200, sse(*silent))
    found = ask(server, chat=True)
    assert (found.n, found.per_second, found.fresh_ttft_ms) == (0, None, None)


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (500, b'{"error": {"message": "out of\\nmemory"}}', "answered with status 500: out of memory$"),
        (404, b'{"detail": "Not Found"}', "answered with status 404: Not Found$"),
        (403, b"<html>no</html>", "answered with status 403: <html>no</html>$"),
        (503, b"", "answered with status 503$"),
        (200, sse(*COMPLETION[:2]), "ends without usage"),
        (200, b"", "ends without usage"),
        (200, sse({"choices": [], "usage": {"prompt_tokens": 3}}), "ends without usage"),
        (200, b"data: {nonsense\n\n", "not a JSON object"),
        (200, b"data: [1]\n\n", "not a JSON object"),
        (200, sse({"error": {"message": "too long", "code": 400}}), "completions: too long$"),
        (500, b'{"error": "\\u001b[2Jgone"}', r"status 500: \[2Jgone$"),
        (200, sse({"choices": 3}), "does not have OpenAI's form"),
        (200, sse({"choices": [3]}), "does not have OpenAI's form"),
        (200, sse({"choices": [{"delta": "a"}]}), "does not have OpenAI's form"),
        (200, sse(COMPLETION[0], {"choices": [], "usage": {"completion_tokens": -5}}), "ends without usage"),
    ],
)
def test_what_can_go_wrong(stand_in: StandIn, status: int, body: bytes, words: str) -> None:
    server = Server(stand_in.url)
    server.open()
    stand_in.answers["/v1/completions"] = (status, body)
    with pytest.raises(ServerError, match=words) as caught:
        ask(server)
    assert str(caught.value).startswith(server.url) and "\n" not in str(caught.value)


def test_what_is_odd_but_usable(stand_in: StandIn) -> None:
    """A null where others have no error, and counts that are none."""
    usage = {"completion_tokens": 5, "prompt_tokens": "many", "prompt_tokens_details": "none"}
    chunks = [{"choices": [{"text": "a"}], "error": None}, {"choices": None, "usage": usage}]
    stand_in.answers["/v1/completions"] = (200, sse(*chunks))
    stand_in.answers["/v1/models"] = (200, json.dumps({"data": [{"id": "a\x1b[31m\nb"}]}).encode())
    server = Server(stand_in.url)
    server.open()
    assert server.model == "a [31m b"
    found = ask(server)
    assert (found.n, found.prompt_n, found.cached_n) == (5, 0, 0)


def test_a_list_of_models_that_ends_too_early(stand_in: StandIn) -> None:
    stand_in.answers["/v1/models"] = (200, b"")
    stand_in.length = 1000
    with pytest.raises(ServerError, match=rf"^{stand_in.url}/v1/models: IncompleteRead"):
        Server(stand_in.url + "/v1").open()


def test_a_list_of_models_that_does_not_come(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "LIST_SECONDS", 0.2)
    stand_in.wait.clear()
    with pytest.raises(ServerError, match="/v1/models: timed out"):
        Server(stand_in.url).open()


@pytest.mark.parametrize("body", [b"", b"[]", b'{"data": []}', b'{"data": 3}', b"<html>"])
def test_something_else_listens(stand_in: StandIn, body: bytes) -> None:
    stand_in.answers["/v1/models"] = (200, body)
    with pytest.raises(ServerError, match="names no model; is this an OpenAI-compatible server"):
        Server(stand_in.url).open()


def test_connection_refused() -> None:
    with serving(StandIn()) as server:
        url = server.url
    with pytest.raises(
        ServerError, match=f"^{url}: no connection: Connection refused; is the server running"
    ):
        Server(url).open()


def test_no_name_of_a_host() -> None:
    with pytest.raises(ServerError, match="^http://a..b: no connection: "):
        Server("http://a..b").open()


@pytest.mark.parametrize("url", ["localhost:8080", "ftp://x", "http://", "http://x:port", "", "http://[::1"])
def test_addresses(url: str) -> None:
    with pytest.raises(ConfigError, match="is not an address; expected http://HOST:PORT"):
        Server(url)


def test_a_key_does_not_belong_into_the_address() -> None:
    with pytest.raises(ConfigError, match="--against-key takes it") as caught:
        Server("http://user:secret@host")
    assert "secret" not in str(caught.value)


def test_interrupt_does_not_wait_for_a_silent_server(stand_in: StandIn) -> None:
    server = Server(stand_in.url)
    server.open()
    stand_in.wait.clear()
    n_requests = len(stand_in.asked)
    with pytest.raises(Interrupted):
        ask(server, should_stop=lambda: len(stand_in.asked) > n_requests)
