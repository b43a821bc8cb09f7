"""Client for other servers with OpenAI's interface: one streamed prompt, timed by chunks.

A thread reads, so that Ctrl-C does not wait for a silent server.
"""

from __future__ import annotations

import http.client
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from ..errors import ConfigError, DflashError
from .measure import Interrupted, Job, Run
from .prompts import one_line

CONNECT_SECONDS = 10.0
LIST_SECONDS = 20.0  # for the list of models
SILENCE_SECONDS = 600.0  # a long prompt on a slow machine


class ServerError(DflashError):
    """Another server is unreachable, refuses, or omits required data; a one-line message."""


class Server:
    """A server by its address, with or without `/v1` at the end. Raises ConfigError for an invalid address."""

    def __init__(self, url: str, key: str | None = None) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise ConfigError(f"--against: {url} is not an address; expected http://HOST:PORT") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--against: {url} is not an address; expected http://HOST:PORT")
        if parts.username or parts.password:
            raise ConfigError("--against: leave the key out of the address; --against-key takes it")
        self.url, self._host, self._port = url, parts.hostname, port
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._at = f"{parts.scheme}://{parts.netloc}{self._base}"
        self._secure, self._key = parts.scheme == "https", key
        self.model = ""

    def open(self) -> None:
        """Query the served models; the first one is used. Raises ServerError."""
        connection = self._connect()
        connection.sock.settimeout(LIST_SECONDS)
        try:
            answer = json.loads(self._ask(connection, "GET", "/v1/models").read())
            self.model = one_line(str(answer["data"][0]["id"]))
        except (OSError, http.client.HTTPException) as error:
            raise self._error("/v1/models", _reason(error)) from None
        except (ValueError, KeyError, IndexError, TypeError):
            problem = "names no model; is this an OpenAI-compatible server?"
            raise self._error("/v1/models", problem) from None
        finally:
            connection.close()

    def _error(self, path: str, problem: str) -> ServerError:
        return ServerError(f"{self._at}{path}: {problem}")

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
        except (OSError, UnicodeError) as error:  # UnicodeError: no name of a host
            problem = f"no connection: {_reason(error)}; is the server running?"
            raise ServerError(f"{self.url}: {problem}") from None
        connection.sock.settimeout(SILENCE_SECONDS)
        return connection

    def _ask(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any = None
    ) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json", "Accept": "*/*"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, self._base + path, data, headers)
            response = connection.getresponse()
            if response.status == 200:
                return response
            detail = _detail(response.read(4096))
        except (OSError, http.client.HTTPException) as error:
            raise self._error(path, _reason(error)) from None
        raise self._error(path, f"answered with status {response.status}{detail}")

    def complete(self, job: Job, should_stop: Callable[[], bool]) -> Run:
        """Let the server complete a job's text. Raises ServerError; Interrupted if `should_stop` is true."""
        with closing(self._connect()) as connection:
            return self._complete(connection, job, should_stop)

    def _complete(
        self, connection: http.client.HTTPConnection, job: Job, should_stop: Callable[[], bool]
    ) -> Run:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": job.n,
            "temperature": job.setting.temperature,
            "seed": job.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        path = "/v1/chat/completions" if job.prompt.chat else "/v1/completions"
        messages = {"messages": [{"role": "user", "content": job.text}]}
        body |= messages if job.prompt.chat else {"prompt": job.text}
        first = last = 0.0
        usage: Any = None
        finish = ""
        began = time.perf_counter()
        for at, chunk in self._chunks(connection, path, body, should_stop):
            if chunk.get("error"):
                raise self._error(path, _detail(json.dumps(chunk).encode()).lstrip(": "))
            try:
                usage = chunk.get("usage") or usage
                for choice in chunk.get("choices") or ():
                    finish = str(choice.get("finish_reason") or finish)
                    delta = choice.get("delta") or {}
                    if choice.get("text") or any(
                        map(delta.get, ("content", "reasoning_content", "reasoning"))
                    ):
                        first, last = first or at, at
            except (AttributeError, TypeError):
                raise self._error(path, "a chunk of its stream does not have OpenAI's form") from None
        if _count(usage, "completion_tokens") is None:
            raise self._error(path, "its stream ends without usage, so its tokens can't be counted")
        return Run(
            prompt=job.prompt.id,
            style=job.prompt.style,
            setting=job.setting.label,
            prompt_n=_count(usage, "prompt_tokens") or 0,
            n=_count(usage, "completion_tokens") or 0 if first else 0,
            ttft_ms=(first - began) * 1e3 if first else 0.0,
            decode_ms=(last - first) * 1e3,
            temperature=job.setting.temperature,
            finish=finish,
            cached_n=_count(usage, "prompt_tokens_details", "cached_tokens") or 0,
        )

    def _chunks(
        self,
        connection: http.client.HTTPConnection,
        path: str,
        body: dict[str, Any],
        should_stop: Callable[[], bool],
    ) -> Iterator[tuple[float, dict[str, Any]]]:
        """The events of a stream, with their arrival times."""
        lines: queue.SimpleQueue[tuple[float, bytes] | Exception | None] = queue.SimpleQueue()

        def read() -> None:
            try:
                for line in self._ask(connection, "POST", path, body):
                    lines.put((time.perf_counter(), line))
                lines.put(None)
            except (ServerError, OSError, ValueError, AttributeError, http.client.HTTPException) as error:
                lines.put(error)  # the last two but one: the connection was closed meanwhile

        threading.Thread(target=read, name="server", daemon=True).start()
        while True:
            try:
                found = lines.get(timeout=0.1)
            except queue.Empty:
                if should_stop():
                    raise Interrupted from None
                continue
            if should_stop():
                raise Interrupted
            if found is None:
                return
            if isinstance(found, ServerError):
                raise found
            if isinstance(found, Exception):
                raise self._error(path, _reason(found))
            at, line = found
            name, _, data = line.strip().partition(b":")
            if name != b"data" or data.strip() == b"[DONE]":
                continue
            try:
                chunk = json.loads(data)
            except ValueError:
                chunk = None
            if not isinstance(chunk, dict):
                raise self._error(path, "a chunk of its stream is not a JSON object")
            yield at, chunk


def _count(usage: Any, *keys: str) -> int | None:
    """An integer under these keys of a server's answer; None if missing."""
    for key in keys:
        usage = usage.get(key) if isinstance(usage, dict) else None
    return usage if isinstance(usage, int) and usage >= 0 else None


def _reason(error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return one_line(reason or type(error).__name__)


def _detail(body: bytes) -> str:
    """An error body's message, in one line of at most 200 characters, after a colon."""
    text = body.decode("utf-8", "replace")
    try:
        found = json.loads(text)
        found = found.get("error", found.get("detail", found))
        text = found["message"] if isinstance(found, dict) and "message" in found else str(found)
    except (ValueError, AttributeError):
        pass
    text = one_line(str(text))
    return f": {text[:200]}" if text else ""
