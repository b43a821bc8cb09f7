"""Tests of many clients and large bodies: scheduling order, early refusals, bounded memory."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("starlette", reason="the server extra is not installed")

from starlette.testclient import TestClient

from dflash_ggml.server.app import create_app, make_service
from dflash_ggml.server.dialect import Settings
from dflash_ggml.server.errors import ApiError
from dflash_ggml.server.limits import Limits, check_sizes, exceeds_values
from dflash_ggml.server.runner import Runner
from dflash_ggml.session.session import Session
from reference.fake_engine import FakeEngine
from reference.server_kit import ScriptedRunner, plain, service, serving, wait_until

PATH = "/v1/chat/completions"


def chat(content: str) -> dict[str, Any]:
    return {"model": "toy", "messages": [{"role": "user", "content": content}]}


def script(request: Any) -> Any:
    return None if request.messages[-1]["content"] == "endless" else plain()


@pytest.fixture
def runner() -> ScriptedRunner:
    made = ScriptedRunner(script)
    made.pace = 0.002
    return made


class Clients:
    """Connections of one test, closed at its end."""

    def __init__(self, port: int, stack: ExitStack) -> None:
        self._port, self._stack = port, stack

    def ask(self, content: str, key: str = "") -> http.client.HTTPConnection:
        """Send a question; the answer is not waited for."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        self._stack.callback(connection.close)
        headers = {"content-type": "application/json", **({"x-api-key": key} if key else {})}
        connection.request("POST", PATH, json.dumps(chat(content)), headers)
        return connection


def test_32_clients_of_one_address_are_served_in_order(runner: ScriptedRunner) -> None:
    made = service(runner)
    with serving(create_app(made)) as port, ExitStack() as stack:
        clients = Clients(port, stack)
        first = clients.ask("endless")
        wait_until(lambda: made.worker.running == 1)
        others = []
        for number in range(31):
            others.append(clients.ask(str(number)))
            wait_until(lambda n=number: made.worker.waiting == n + 1)
        first.close()
        assert [other.getresponse().status for other in others] == [200] * 31
    assert [request.messages[0]["content"] for request in runner.requests[1:]] == [str(n) for n in range(31)]


def test_a_client_has_a_limit_of_its_own(runner: ScriptedRunner) -> None:
    made = service(runner, queue_limit=2, client_limit=1, keys=["one", "two"])
    with serving(create_app(made)) as port, ExitStack() as stack:
        clients = Clients(port, stack)
        for key, n in (("one", 0), ("one", 1)):
            clients.ask("endless", key)
            wait_until(lambda n=n: made.worker.running == 1 and made.worker.waiting == n)
        for key, status, code, words in (
            ("one", 429, "client_queue_full", "1 requests of this client are waiting"),
            ("two", 503, "queue_full", "2 requests are waiting, the limit for all"),
        ):
            if key == "two":
                clients.ask("endless", key)
                wait_until(lambda: made.worker.waiting == 2)
            response = clients.ask("x", key).getresponse()
            error = json.load(response)["error"]
            assert (response.status, error["code"]) == (status, code) and words in error["message"]
            assert int(response.headers["retry-after"]) >= 1 and response.headers["x-should-retry"] == "true"


def test_a_new_client_goes_before_clients_being_served(runner: ScriptedRunner) -> None:
    made = service(runner, keys=["busy", "new"])
    with serving(create_app(made)) as port, ExitStack() as stack:
        clients = Clients(port, stack)
        first = clients.ask("endless", "busy")
        wait_until(lambda: made.worker.running == 1)
        answers = []
        for n, (content, key) in enumerate((("busy 1", "busy"), ("busy 2", "busy"), ("new", "new")), 1):
            answers.append(clients.ask(content, key))
            wait_until(lambda n=n: made.worker.waiting == n)
        first.close()
        assert [connection.getresponse().status for connection in answers] == [200] * 3
    contents = [request.messages[0]["content"] for request in runner.requests]
    assert contents == ["endless", "new", "busy 1", "busy 2"]


def test_a_client_over_its_share_leaves_others_every_second_slot(runner: ScriptedRunner) -> None:
    """It holds all slots and its part of the queue; of those that end every second goes to the other client."""
    runner.parallel = 2
    made = service(runner, queue_limit=9, client_limit=4, keys=["busy", "new"])
    with serving(create_app(made)) as port, ExitStack() as stack:
        clients = Clients(port, stack)
        held = []
        for n in range(2):
            held.append(clients.ask("endless", "busy"))
            wait_until(lambda n=n: made.worker.running == n + 1)
        answers = []
        for n in range(8):
            answers.append(clients.ask(f"{n}", "busy" if n < 4 else "new"))
            wait_until(lambda n=n: made.worker.waiting == n + 1)
        assert clients.ask("more", "busy").getresponse().status == 429
        held[0].close()
        assert [connection.getresponse().status for connection in answers] == [200] * 8
        held[1].close()
    contents = [request.messages[0]["content"] for request in runner.requests]
    assert contents[2:] == ["4", "0", "5", "1", "6", "2", "7", "3"]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[TestClient]:
    def opened(progress: Any) -> Runner:
        return Runner(Session(engine))  # type: ignore[arg-type]

    made = make_service(opened, Settings(names=("toy",), limits=Limits(tokens=1200)))
    with TestClient(create_app(made)) as http_client:
        made.worker.wait_ready(20)
        yield http_client


def test_a_text_of_megabytes_is_refused_by_its_bytes(
    client: TestClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one token is made of it."""

    def never(*args: Any, **options: Any) -> Any:
        raise AssertionError("tokenised")

    tokenizer = engine.tokenizer
    monkeypatch.setattr(tokenizer, "_with_special", type("Never", (), {"encode_batch_fast": never})())
    words = "exceed context window of 1024"
    for path, body, expected in (
        (PATH, chat("word " * 1_400_000), words),
        ("/v1/completions", {"prompt": "word " * 1_400_000}, words),
        ("/v1/messages", {**chat("word " * 1_400_000), "max_tokens": 5}, "prompt is too long"),  # Anthropic's
        ("/completion", {"prompt": ["word " * 1_400_000, 5]}, words),
        ("/v1/embeddings", {"input": "word " * 1_400_000}, words),
    ):
        response = client.post(path, json=body)
        message = response.json()["error"]["message"]
        assert response.status_code == 400 and expected in message
        assert "not all counted" in message or path == "/v1/messages"


def test_a_text_with_too_many_tokens_is_given_up_early(client: TestClient, engine: FakeEngine) -> None:
    """Where its byte count alone does not decide."""
    engine.tokenizer._longest = 1 << 30
    response = client.post(PATH, json=chat("word " * 100_000))
    assert response.status_code == 400
    found = int(response.json()["error"]["message"].split("(")[1].split(")")[0])
    assert 1024 <= found < 100_000
    assert client.post("/tokenize", json={"content": "word " * 100}).status_code == 200
    for content in ("word " * 100_000, ["word " * 100] * 100):
        response = client.post("/tokenize", json={"content": content})
        assert response.status_code == 400 and "more than 1200 tokens" in response.json()["error"]["message"]


def test_a_text_of_many_parts_is_given_up_early(client: TestClient) -> None:
    response = client.post("/completion", json={"prompt": ["word " * 1000, 7] * 500})
    message = response.json()["error"]["message"]
    assert response.status_code == 400 and "not all counted" in message
    assert int(message.split("(")[1].split(")")[0]) < 50_000


def test_nothing_is_read_in_the_event_loop(runner: ScriptedRunner) -> None:
    """Parsing and preparing happen in the intake's threads."""
    threads: set[str] = set()
    prepare = runner.prepare

    def seen(request: Any) -> Any:
        threads.add(threading.current_thread().name.rpartition("_")[0])
        return prepare(request)

    runner.prepare = seen  # type: ignore[method-assign]
    with TestClient(create_app(service(runner))) as http_client:
        assert http_client.post(PATH, json=chat("x")).status_code == 200
    assert threads == {"dflash-intake"}


def test_bodies_count_until_they_are_answered(runner: ScriptedRunner) -> None:
    made = service(runner, limits=Limits(held_bytes=1000))
    with serving(create_app(made)) as port, ExitStack() as stack:
        clients = Clients(port, stack)
        first = clients.ask("endless")
        wait_until(lambda: made.worker.running == 1)
        assert made.intake.held == len(json.dumps(chat("endless")))
        response = clients.ask("x" * 900).getresponse()
        error = json.load(response)["error"]
        assert response.status == 503 and "hold 1000 bytes" in error["message"]
        first.close()
        wait_until(lambda: made.intake.held == 0)
        assert clients.ask("x" * 200).getresponse().status == 200
        wait_until(lambda: made.intake.held == 0)


def test_bodies_of_small_values_are_refused_before_they_are_parsed(runner: ScriptedRunner) -> None:
    many, limits = 400_000, Limits()
    with TestClient(create_app(service(runner))) as http_client:
        for inner in (b"[]", b"{}", b'""', b"1", b'{"a":1}'):
            body = b'{"messages": [' + b",".join([inner] * many) + b"]}"
            headers = {"content-type": "application/json"}
            response = http_client.post(PATH, content=body, headers=headers)
            assert response.status_code == 400 and "300000 JSON values" in response.json()["error"]["message"]
        response = http_client.post(PATH, json={"messages": ["x"] * (limits.entries + 1)})
        assert response.status_code == 400 and "at most 8192" in response.json()["error"]["message"]


VALUES = st.recursive(
    st.none() | st.integers() | st.text('a,[{"\\ ', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text('b"\\,', max_size=3), inner, max_size=4)
    ),
    max_leaves=20,
)


def marks(value: Any) -> int:
    """What begins or divides: as many as a list or an object has entries, at least one."""
    if not isinstance(value, (dict, list)):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return max(1, len(value)) + sum(marks(item) for item in inner)


@given(VALUES, st.booleans())
def test_values_are_counted_without_parsing(value: Any, ascii_only: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    n = marks(value)
    assert not exceeds_values(body, n)
    assert n == 0 or exceeds_values(body, n - 1)


def test_texts_full_of_commas_are_not_values() -> None:
    body = json.dumps({"a": ",[{\\" * 1000, "b": [1, 2]}).encode()
    assert not exceeds_values(body, 4) and exceeds_values(body, 3)
    assert not exceeds_values(b'{"a": "' + b"," * 50, 4)  # the parser reports what is wrong


def test_lists_of_token_ids_may_be_long() -> None:
    limits = Limits(entries=10, fields=10)
    check_sizes({"prompt": [1] * 100, "input": [[1] * 100], "tokens": [1.0] * 100}, limits)
    for bad, field in (
        ({"prompt": ["a"] * 11}, "prompt"),
        ({"prompt": [1.5] * 11}, "prompt"),
        ({"messages": [1] * 11}, "messages"),
        ({"a": {"b": [{"c": [None] * 11}]}}, "a.b[0].c"),
        ({"a": {str(i): 1 for i in range(11)}}, "a"),
    ):
        with pytest.raises(ApiError, match="at most 10 are allowed") as caught:
            check_sizes(bad, limits)
        assert caught.value.param == field
