"""Tests of the engine in a separate process: what is the same as in the server's process, and what happens when it dies."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the server extra is not installed")
pytest.importorskip("dflash_ggml.ggml.bindings")

from starlette.testclient import TestClient

from dflash_ggml.errors import ConfigError
from dflash_ggml.server import remote_runner
from dflash_ggml.server.app import Service, create_app, make_service
from dflash_ggml.server.dialect import Settings
from dflash_ggml.server.errors import EngineLost
from dflash_ggml.server.pipe import spawn
from dflash_ggml.server.supervisor import Supervised
from dflash_ggml.server.worker import Worker
from reference.server_kit import serving, wait_until
from reference.supervised_kit import IN_GGML, IN_PREPARE, SLOWLY, ToyOpener

ENDLESS = {"max_tokens": 1_000_000, "ignore_eos": True}


class Served:
    """A server whose engine lives in a process of its own."""

    def __init__(self, service: Service, port: int) -> None:
        self.service = service
        self.port = port

    def ask(self, path: str, body: Any = None) -> http.client.HTTPResponse:
        """The response as soon as it has begun."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {"content-type": "application/json", "connection": "close"}
        connection.request(
            "GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers
        )
        return connection.getresponse()

    def send(self, body: Any) -> http.client.HTTPConnection:
        """A completion that is asked for; its response is not read yet."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        return connection

    def kill(self) -> None:
        """End the engine process as the kernel would for want of memory."""
        os.kill(self.service.worker.runner.pid, signal.SIGKILL)  # type: ignore[union-attr]

    def back(self) -> None:
        """Wait until requests are taken, and see one answered."""
        wait_until(lambda: self.ask("/health").status == 200)
        response = self.ask("/v1/completions", {"prompt": "hello", "max_tokens": 3, "temperature": 0})
        assert response.status == 200 and json.loads(response.read())["usage"]["completion_tokens"] == 3


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    service = make_service(Supervised(ToyOpener(), first_wait=0), Settings(names=("toy",)))
    with serving(create_app(service)) as port:
        service.worker.wait_ready(60)
        yield Served(service, port)


ASK = [{"role": "user", "content": "What is 6 x 7?"}]
QUESTIONS: list[tuple[str, Any]] = [
    ("/v1/completions", {"prompt": "hello", "max_tokens": 9, "seed": 3, "logprobs": 2, "echo": True}),
    (
        "/v1/completions",
        {"prompt": ["a", "b"], "n": 2, "max_tokens": 4, "seed": 1, "logit_bias": {"65": -50}},
    ),
    (
        "/v1/chat/completions",
        {"messages": ASK, "max_tokens": 9, "seed": 1, "logprobs": True, "top_logprobs": 3},
    ),
    (
        "/v1/chat/completions",
        {"messages": ASK, "max_tokens": 40, "seed": 1, "response_format": {"type": "json_object"}},
    ),
    ("/v1/messages", {"model": "toy", "messages": ASK, "max_tokens": 9, "temperature": 0}),
    ("/v1/messages/count_tokens", {"model": "toy", "messages": ASK}),
    ("/v1/embeddings", {"input": ["hello", [65, 66]]}),
    ("/completion", {"prompt": "hello", "n_predict": 5, "seed": 4, "logit_bias": [["STOP", False]]}),
    ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
    ("/tokenize", {"content": "hello é", "with_pieces": True, "add_special": True}),
    ("/detokenize", {"tokens": [104, 257, 262]}),
    ("/detokenize", {"tokens": [1_000_000]}),
    ("/apply-template", {"messages": ASK}),
    ("/api/show", {"model": "toy"}),
    ("/v1/completions", {"prompt": "hello", "grammar": "root ::= ("}),
    ("/v1/completions", {"prompt": "x", "suffix": "y"}),
    ("/v1/chat/completions", {"messages": ASK, "tool_choice": "required"}),
    ("/tokenizer_info", None),
    ("/props", None),
    ("/slots", None),
    ("/v1/models", None),
    ("/api/ps", None),
]


def plain(value: Any) -> Any:
    """Without what differs from one answer to the next: names and times."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        k: plain(v)
        for k, v in value.items()
        if k not in ("id", "created", "created_at", "modified_at", "request_id", "timings")
        and not k.endswith("duration")
    }


def test_every_path_answers_as_it_does_with_the_engine_beside_it(served: Served) -> None:
    statuses = []
    with TestClient(create_app(make_service(ToyOpener(), Settings(names=("toy",))))) as beside:
        wait_until(lambda: beside.get("/health").status_code == 200)
        for path, body in QUESTIONS:
            wanted = beside.get(path) if body is None else beside.post(path, json=body)
            got = served.ask(path, body)
            assert got.status == wanted.status_code, path
            assert plain(json.loads(got.read())) == plain(wanted.json()), path
            statuses.append(got.status)
    assert statuses.count(200) == 17 and len(statuses) == 22


@pytest.mark.parametrize(
    ("path", "body", "error"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": SLOWLY}]}, '"code":"engine_lost"'),
        ("/v1/messages", {"messages": [{"role": "user", "content": SLOWLY}]}, "event: error"),
        ("/api/generate", {"prompt": SLOWLY, "options": {"num_predict": -1}}, '{"error":"the engine process'),
    ],
)
def test_a_stream_ends_with_an_error_event_when_the_engine_is_killed(
    served: Served, path: str, body: Any, error: str
) -> None:
    response = served.ask(path, {"model": "toy", "stream": True, **ENDLESS, **body})
    assert response.status == 200 and response.readline()
    served.kill()
    rest = response.read().decode()
    assert (
        error in rest and "ended by SIGKILL" in rest and "[DONE]" not in rest and "message_stop" not in rest
    )
    served.back()


def test_running_and_waiting_requests_and_the_stage_are_reported(served: Served) -> None:
    running = served.send({"prompt": SLOWLY, **ENDLESS})
    wait_until(lambda: served.service.worker.running == 1)
    waiting = [served.send({"prompt": "hello"}), served.send({"prompt": "hello", "stream": True})]
    wait_until(lambda: served.service.worker.waiting == 2)
    served.kill()
    response = running.getresponse()
    # it may have been this request that ended it
    assert (response.status, response.headers["x-should-retry"]) == (500, "false")
    assert json.loads(response.read())["error"]["code"] == "engine_lost"
    for connection in waiting:
        response = connection.getresponse()
        assert (response.status, response.headers["x-should-retry"]) == (503, "true")
        assert "started again" in json.loads(response.read())["error"]["message"]
    health = served.ask("/health")
    assert health.status == 503 and json.loads(health.read())["stage"] in ("restart", "weights")
    served.back()


def test_an_abort_beside_the_inference_thread_is_a_500(served: Served) -> None:
    """What is asked of the tokenizer, the template and the grammars is on the other side, too."""
    response = served.ask("/v1/completions", {"prompt": IN_PREPARE, "max_tokens": 3})
    message = json.loads(response.read())["error"]["message"]
    assert response.status == 500 and "ended by SIGABRT" in message
    served.back()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_ends_its_job_in_the_other_process(served: Served, stream: bool) -> None:
    connection = served.send({"prompt": SLOWLY, **ENDLESS, "stream": stream})
    wait_until(lambda: served.service.worker.running == 1)
    if stream:
        assert connection.getresponse().readline()
    pid = served.service.worker.runner.pid  # type: ignore[union-attr]
    connection.close()
    served.back()  # jobs there run one after another, and the first would have taken hours
    assert served.service.worker.runner.pid == pid  # type: ignore[union-attr]


@pytest.fixture
def fates(tmp_path: Path) -> Callable[[str], ToyOpener]:
    """Makes an opener whose starts end so."""

    def make(letters: str) -> ToyOpener:
        path = tmp_path / "fates"
        path.write_text(letters)
        return ToyOpener(path)

    return make


def test_deaths_while_loading_are_tried_again_and_counted(fates: Callable[[str], ToyOpener]) -> None:
    stages: list[tuple[str, int, int]] = []
    runner = Supervised(fates("a."), tries=2, first_wait=0)(lambda *stage: stages.append(stage))
    runner.close()
    assert stages == [("weights", 1, 2), ("restart", 1, 2), ("weights", 1, 2)]
    opener = fates("aa.")
    with pytest.raises(EngineLost, match="ended by SIGABRT"):
        Supervised(opener, tries=2, first_wait=0)(lambda *stage: None)
    assert opener.fates is not None and opener.fates.read_text() == "."


def test_an_error_of_the_first_start_is_final(fates: Callable[[str], ToyOpener]) -> None:
    opener = fates("e.")
    with pytest.raises(ConfigError, match="^toy: this cannot be opened$"):
        Supervised(opener, first_wait=0)(lambda *stage: None)
    assert opener.fates is not None and opener.fates.read_text() == "."


def test_waits_grow_up_to_a_bound_and_can_be_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    supervised = Supervised(None, tries=6, first_wait=1, longest_wait=5)
    waits: list[float] = []

    def fail(self: Supervised, progress: Any) -> Any:
        raise EngineLost("gone")

    monkeypatch.setattr(Supervised, "_started", fail)
    monkeypatch.setattr(supervised._ended, "wait", waits.append)
    with pytest.raises(EngineLost):
        supervised(lambda *stage: None)
    assert waits == [1, 2, 4, 5, 5]
    supervised.abort()
    with pytest.raises(EngineLost):
        supervised(lambda *stage: None)
    assert len(waits) == 5


def test_stopping_ends_a_process_that_loads(fates: Callable[[str], ToyOpener], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "never")
    worker: Worker[Any] = Worker(Supervised(ToyOpener(tmp_path / "never"), first_wait=0))
    worker.start()
    wait_until(lambda: worker.loading[0] == "weights")
    assert worker.stop(60)
    assert worker.failure is None and worker.runner is None


@pytest.mark.parametrize("words", ["no JSON", '{"type":"Item"}', '["Result",0,1]', "[" * 100_000])
def test_a_process_that_sends_no_message_of_ours_is_ended(
    monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.setenv("SAID", words)
    monkeypatch.setattr(remote_runner, "spawn", lambda module: spawn("reference.supervised_kit"))
    monkeypatch.setattr(remote_runner, "GONE_SECONDS", 0)
    with pytest.raises(EngineLost, match="ended by SIGKILL"):
        Supervised(ToyOpener(), tries=1)(lambda *stage: None)


# the command with the toy instead of a model, and no waits
COMMAND = """
import functools, pathlib, sys
sys.path[:] = {path!r}
from dflash_ggml.server import cli
from reference.supervised_kit import ToyOpener
cli.Opener = lambda *given, **options: ToyOpener(pathlib.Path({fates!r}))
cli.Supervised = functools.partial(cli.Supervised, tries=2, first_wait=0)
sys.exit(cli.main(["--supervise", "--port", "0", "--drain", "60"]))
"""


@pytest.fixture
def command(fates: Callable[[str], ToyOpener]) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts `dflash-serve --supervise`, in a process group of its own, with starts of the engine that end so."""
    started: list[subprocess.Popen[str]] = []

    def start(letters: str) -> subprocess.Popen[str]:
        code = COMMAND.format(path=sys.path, fates=str(fates(letters).fates))
        options: Any = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        started.append(subprocess.Popen([sys.executable, "-c", code], **options))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def port_of(process: subprocess.Popen[str]) -> int:
    assert process.stderr is not None
    line = process.stderr.readline()
    found = re.search(r"ready at http://127\.0\.0\.1:(\d+)/", line)
    assert found, line
    return int(found.group(1))


def slow_stream(port: int, tokens: int) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {"prompt": SLOWLY, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    return response


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_to_all_processes_lets_the_answer_finish(
    command: Callable[[str], subprocess.Popen[str]], name: str
) -> None:
    """As a terminal and a service manager send it; the other end of stderr closes when the last process has ended."""
    process = command(".")
    response = slow_stream(port_of(process), 40)
    os.killpg(process.pid, getattr(signal, name))
    rest = response.read().decode()
    assert '"finish_reason":"length"' in rest and rest.rstrip().endswith("data: [DONE]")
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 0


def test_no_process_outlives_a_server_that_is_killed(command: Callable[[str], subprocess.Popen[str]]) -> None:
    process = command(".")
    slow_stream(port_of(process), 1_000_000)
    process.kill()
    assert "Traceback" not in process.communicate(timeout=60)[1]


@pytest.mark.parametrize(
    ("letters", "code", "words"),
    [
        ("e", 2, "toy: this cannot be opened"),
        ("aa", 1, "could not start: the engine process ended by SIGABRT"),
    ],
)
def test_exit_codes_of_a_server_that_cannot_start(
    command: Callable[[str], subprocess.Popen[str]], letters: str, code: int, words: str
) -> None:
    process = command(letters)
    printed = process.communicate(timeout=60)[1]
    assert (process.returncode, words in printed) == (code, True), printed


def test_an_abort_is_reported_and_a_server_without_engine_ends(
    command: Callable[[str], subprocess.Popen[str]],
) -> None:
    process = command(".ea")
    connection = http.client.HTTPConnection("127.0.0.1", port_of(process), timeout=60)
    body = json.dumps({"prompt": IN_GGML})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    assert connection.getresponse().status == 500
    printed = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert re.search(r"(?s)ggml stopped the process: .*GGML_ASSERT.*in build_bad_graph", printed)
    assert "toy: this cannot be opened; trying again (2 of 2)" in printed and "could not start: " in printed
