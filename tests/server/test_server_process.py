"""Tests of `dflash-serve` as a process, on the embedded pair: start, answer, refuse, stop."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the server extra is not installed")
pytest.importorskip("dflash_ggml.ggml.bindings")

COMMAND = [sys.executable, "-m", "dflash_ggml.server.cli", "-c", "512", "-t", "1", "-ngl", "0"]
SHORT = {"prompt": "def f(", "max_tokens": 60, "temperature": 0, "stream": True, "dflash": {"mode": "plain"}}
LONG = {**SHORT, "max_tokens": 3900, "ignore_eos": True}  # needs seconds: no signal comes after its end


@contextlib.contextmanager
def started(*options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The process and its port, once it has reported that it is ready."""
    command = [*COMMAND, "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.search(r"ready at http://127\.0\.0\.1:(\d+)/", line)
        assert found, line + process.stderr.read()
        yield process, int(found.group(1))
    finally:
        process.kill()
        process.communicate()


def post(port: int, body: object) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"content-type": "application/json", "connection": "close"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    return connection.getresponse()


def test_strict_options_hold_and_sigterm_lets_a_short_answer_finish() -> None:
    with started("--drain", "60", "--alias", "demo", "--strict", "--strict-model") as (process, port):
        assert post(port, {"prompt": "x", "model": "other"}).status == 404
        assert post(port, {"prompt": "x", "nonsense": 1}).status == 400
        response = post(port, {**SHORT, "model": "demo"})
        assert response.readline().startswith(b"data: ")
        process.send_signal(signal.SIGTERM)
        rest = response.read().decode()
        assert '"finish_reason":"length"' in rest and rest.rstrip().endswith("data: [DONE]")
        assert process.wait(60) == 0


def test_sigterm_cancels_a_long_answer() -> None:
    with started("--drain", "0", "-c", "4096") as (process, port):
        response = post(port, LONG)
        assert response.readline().startswith(b"data: ")
        process.send_signal(signal.SIGTERM)
        rest = response.read().decode()
        assert "shutting down" in rest and "[DONE]" not in rest
        assert process.wait(60) == 0


def test_ctrl_c_while_draining_ends_what_runs() -> None:
    with started("--drain", "60", "-c", "4096") as (process, port):
        response = post(port, LONG)
        assert response.readline().startswith(b"data: ")
        process.send_signal(signal.SIGTERM)
        with pytest.raises(ConnectionError):  # heard: refused, or reset where the listener closed meanwhile
            while True:
                socket.create_connection(("127.0.0.1", port)).close()
        process.send_signal(signal.SIGINT)
        assert "shutting down" in response.read().decode()
        assert process.wait(60) == 0 and process.stderr is not None and process.stderr.read() == ""


def test_sigterm_ends_requests_whose_bodies_have_not_come() -> None:
    """They are refused at once, and one line counts them; a client that sends slowly does not delay the exit."""
    head = "POST {} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n{}\r\n\r\n{}"
    sent = [
        head.format("/v1/completions", "Content-Length: 500", '{"prompt": '),
        head.format("/v1/messages", "Transfer-Encoding: chunked", '4\r\n{"mo'),
        "POST /v1/completions HTTP/1.1\r\nHost: 12",
    ]
    with started("--drain", "0") as (process, port), contextlib.ExitStack() as open_ones:
        clients = [
            open_ones.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60)) for _ in sent
        ]
        for client, text in zip(clients, sent):
            client.sendall(text.encode())
        assert post(port, {"prompt": "x", "max_tokens": 1}).status == 200  # they have been heard
        process.send_signal(signal.SIGTERM)
        answers = [client.makefile("rb").read().decode() for client in clients]
        assert process.wait(60) == 0 and process.stderr is not None
        assert process.stderr.read() == "dflash-serve: incomplete requests refused at shutdown: 2\n"
    for answer in answers[:2]:
        assert answer.startswith("HTTP/1.1 503 ") and "the server is shutting down" in answer
    assert answers[2] == ""


def test_a_port_in_use_is_reported_before_loading() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        # a file that no loading survives: the port is looked at first
        command = [*COMMAND, "--port", str(port), "-m", __file__, "--mode", "plain"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"--port: {port} of 127.0.0.1 is taken by another program" in done.stderr


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--host", "0.0.0.0"], 2, "give --api-key"),
        (["--api-key", " x"], 2, "API key"),
        (["-m", "/nonexistent.gguf"], 2, "does not exist"),
        (["-m", __file__, "--mode", "plain"], 2, Path(__file__).name),
        (["-l", "99999+1"], 2, "-l/--logit-bias: 99999 is not a token of this model"),
        (["--queue", "0"], 2, "--queue"),
        (["--queue", "4", "--queue-per-client", "5"], 2, "--queue-per-client: 5 is outside 1..4"),
        (["--port", "99999"], 2, "--port: 99999 is outside 0..65535"),
        (["--host", "nowhere.invalid", "--api-key", "k"], 2, "cannot resolve"),
        (["--host", "192.0.2.1", "--api-key", "k"], 2, "is not an address of this machine"),
        (["--allowed-host", "a*b"], 2, "--allowed-host: 'a*b' is not a host name"),
        (["--temp", "nan"], 2, "--temp"),
        (["-hf", "no-slash"], 2, "user/repo"),
        (["-md", "/nonexistent"], 2, "-md"),
    ],
)
def test_refusals(options: list[str], code: int, words: str) -> None:
    done = subprocess.run([*COMMAND, "--port", "0", *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == code
    assert words in done.stderr and done.stderr.startswith("dflash-serve: ") and done.stderr.count("\n") == 1
