"""Tests of several requests at once: which run, wait or are cancelled, and what every API reports about it."""

from __future__ import annotations

import http.client
import json
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the server extra is not installed")

from dflash_ggml.config import EngineConfig
from dflash_ggml.server.app import create_app, make_service
from dflash_ggml.server.dialect import Settings
from dflash_ggml.server.runner import Runner
from dflash_ggml.session.answer import Answer
from dflash_ggml.session.requests import CompletionRequest
from dflash_ggml.session.session import Session, run_completion
from reference.fake_engine import FakeEngine
from reference.server_kit import ScriptedRunner, plain, service, serving, wait_until

CONFIG = EngineConfig(model=Path("toy.gguf"), n_ctx=1024, n_batch=32)


def post(port: int, path: str, body: dict[str, Any], key: str = "") -> http.client.HTTPConnection:
    """Send a request; the answer is not waited for."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"content-type": "application/json", **({"x-api-key": key} if key else {})}
    connection.request("POST", path, json.dumps(body), headers)
    return connection


def got(connection: http.client.HTTPConnection) -> dict[str, Any]:
    """The answer's body."""
    try:
        return dict(json.loads(connection.getresponse().read()))
    finally:
        connection.close()


def get(port: int, path: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path)
    answer = connection.getresponse().read()
    connection.close()
    return answer


def ask(content: str) -> dict[str, Any]:
    return {"model": "toy", "messages": [{"role": "user", "content": content}]}


def endless_or_plain(request: Any) -> Any:
    return None if request.messages[-1]["content"] == "endless" else plain()


def test_as_many_run_as_there_are_slots_and_cancelling_frees_one() -> None:
    runner = ScriptedRunner(endless_or_plain)
    runner.parallel, runner.pace = 3, 0.005
    made = service(runner)
    with serving(create_app(made)) as port:
        wait_until(lambda: made.worker.ready)
        holders = [post(port, "/v1/chat/completions", {**ask("endless"), "stream": True}) for _ in range(3)]
        wait_until(lambda: made.worker.running == 3)
        assert [slot["is_processing"] for slot in json.loads(get(port, "/slots"))] == [True] * 3
        assert json.loads(get(port, "/slots?fail_on_no_slot=1"))["error"]["code"] == "no_slot"
        assert json.loads(get(port, "/props"))["total_slots"] == 3
        waiting = post(port, "/v1/chat/completions", ask("short"))
        wait_until(lambda: made.worker.waiting == 1)
        assert json.loads(get(port, "/health")) == {"status": "ok", "running": 3, "waiting": 1}
        holders[0].close()
        assert got(waiting)["choices"][0]["message"]["content"] == "Hello there"
        wait_until(lambda: made.worker.running == 2 and runner.cancelled == 1)
        text = get(port, "/metrics").decode()
        assert "dflash_num_requests_running 2.0" in text and "dflash_columns_per_pass" in text
        for holder in holders[1:]:
            holder.close()
        wait_until(lambda: made.worker.running == 0)
        assert [slot["is_processing"] for slot in json.loads(get(port, "/slots"))] == [False] * 3


def test_shutting_down_ends_all_that_run() -> None:
    runner = ScriptedRunner(endless_or_plain)
    runner.parallel, runner.pace = 2, 0.005
    made = service(runner, drain_seconds=0.1)
    with serving(create_app(made)) as port:
        wait_until(lambda: made.worker.ready)
        holders = [post(port, "/v1/chat/completions", {**ask("endless"), "stream": True}) for _ in range(2)]
        wait_until(lambda: made.worker.running == 2)
        assert made.worker.stop(20)
        bodies = [holder.getresponse().read() for holder in holders]
        assert all(b"shutting_down" in body for body in bodies)
        for holder in holders:
            holder.close()
    assert runner.closed


PATHS = {
    "/v1/completions": {"prompt": "one text", "max_tokens": 20, "temperature": 0},
    "/completion": {"prompt": "another text", "n_predict": 20, "temperature": 0},
    "/api/generate": {"prompt": "a third", "stream": False, "options": {"num_predict": 20, "temperature": 0}},
    "/v1/chat/completions": {**ask("hello"), "max_tokens": 20, "temperature": 0},
    "/v1/messages": {**ask("hello there"), "max_tokens": 20, "temperature": 0},
    "/v1/responses": {"input": "what is it?", "max_output_tokens": 20, "temperature": 0},
    "/api/chat": {**ask("once"), "stream": False, "options": {"num_predict": 20, "temperature": 0}},
}


def answer_text(body: dict[str, Any]) -> str:
    """All the text of an answer, whatever its shape."""
    found = []

    def walk(value: Any, key: str = "") -> None:
        if isinstance(value, dict):
            for name, part in value.items():
                walk(part, name)
        elif isinstance(value, list):
            for part in value:
                walk(part, key)
        elif key in ("text", "content", "response") and isinstance(value, str):
            found.append(value)

    walk(
        {
            name: part
            for name, part in body.items()
            if name not in ("prompt", "generation_settings", "instructions")
        }
    )
    return "".join(found)


def test_concurrent_apis_answer_as_each_does_alone() -> None:
    def opened(parallel: int) -> Any:
        engine = FakeEngine(CONFIG, parallel=parallel)
        return lambda progress: Runner(Session(engine))  # type: ignore[arg-type]

    answers: dict[int, dict[str, str]] = {}
    for parallel in (1, 4):
        made = make_service(opened(parallel), Settings(names=("toy",)))
        with serving(create_app(made)) as port:
            wait_until(lambda made=made: made.worker.ready)  # type: ignore[misc]
            sent = {path: post(port, path, {"model": "toy", **body}) for path, body in PATHS.items()}
            answers[parallel] = {path: answer_text(got(connection)) for path, connection in sent.items()}
    assert answers[4] == answers[1] and all(answers[4].values())


@pytest.mark.parametrize("n", [2, 5])
def test_choices_of_one_request_leave_slots_for_others(n: int) -> None:
    """`n` answers of a request on two slots, beside another client's."""
    made = make_service(
        lambda progress: Runner(Session(FakeEngine(CONFIG, parallel=2))),  # type: ignore[arg-type]
        Settings(names=("toy",)),
    )
    with serving(create_app(made)) as port:
        wait_until(lambda: made.worker.ready)
        body = {"model": "toy", "prompt": "text", "max_tokens": 10, "seed": 3}
        several, one = (
            post(port, "/v1/completions", {**body, "n": n}),
            post(port, "/v1/completions", body, "other"),
        )
        assert len(got(several)["choices"]) == n
        assert len(got(one)["choices"]) == 1


def test_choices_are_batched_while_no_request_waits() -> None:
    """Four choices on three slots; a client that disconnects ends all of them."""
    runner = ScriptedRunner(lambda request: None)
    runner.parallel, runner.pace = 3, 0.005
    made = service(runner)
    with serving(create_app(made)) as port:
        wait_until(lambda: made.worker.ready)
        holder = post(port, "/v1/chat/completions", {**ask("endless"), "n": 4, "stream": True})
        wait_until(lambda: made.worker.running == 3)
        other = post(port, "/v1/chat/completions", ask("endless"), "other")
        wait_until(lambda: made.worker.waiting == 1)
        holder.close()
        wait_until(lambda: made.worker.running == 1 and made.worker.waiting == 0)
        other.close()
        wait_until(lambda: made.worker.running == 0)
    runner = ScriptedRunner()
    runner.parallel, runner.pace = 3, 0.01
    made = service(runner)
    with serving(create_app(made)) as port:
        wait_until(lambda: made.worker.ready)
        body = got(post(port, "/v1/chat/completions", {**ask("short"), "n": 4}))
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        assert {choice["message"]["content"] for choice in body["choices"]} == {"Hello there"}


def test_a_soak_of_requests_and_disconnects() -> None:
    """Forty requests from eight clients, every fifth of which disconnects: nothing runs, waits or holds a slot at the end."""
    engine = FakeEngine(CONFIG, parallel=3)
    session = Session(engine)  # type: ignore[arg-type]
    made = make_service(lambda progress: Runner(session), Settings(names=("toy",)))
    expected = {
        i: Answer.of(run_completion(Session(FakeEngine(CONFIG)), _request(i))).text  # type: ignore[arg-type]
        for i in range(4)
    }
    wrong: list[Any] = []
    with serving(create_app(made)) as port:
        wait_until(lambda: made.worker.ready)

        def client(number: int) -> None:
            for i in range(5):
                which = (number + i) % 4
                body = {"prompt": _request(which).prompt, "max_tokens": 30, "temperature": 0, "model": "toy"}
                connection = post(port, "/v1/completions", {**body, "stream": i == 4}, f"key {number}")
                if i == 4:
                    connection.getresponse().read(10)
                    connection.close()
                elif (text := got(connection)["choices"][0]["text"]) != expected[which]:
                    wrong.append(text)

        threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        wait_until(lambda: made.worker.running == 0 and made.worker.waiting == 0)
        wait_until(lambda: not session.scheduler.is_busy)
        assert not wrong and not any(slot.busy for slot in session.slots.all)
    assert engine.slots == []


def _request(i: int) -> CompletionRequest:
    from dflash_ggml.decode.sampling import SamplingParams

    return CompletionRequest(
        prompt=f"request {i} " * 4, max_tokens=30, sampling=SamplingParams(temperature=0)
    )
