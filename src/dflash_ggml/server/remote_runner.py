"""The server's end of its engine process: the interface of `Runner`, whose every question goes through the socket.

Two ways were weighed. With a tokenizer, templates and grammars of its own the server would save a round trip of some
hundred microseconds per question, and read the vocabulary twice, hold it twice, and die of what it compiles. Here it has
nothing of the model but what /props and the lists show: whatever strangers' files and texts can bring down is on the other side.
"""

from __future__ import annotations

import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..session.events import Event
from ..session.prompts import Prepared
from ..session.requests import ChatRequest, CompletionRequest
from .engine_process import OPENING
from .engine_side import Progress
from .errors import EngineLost
from .frames import Link, pack, unpack, unpack_error

POLL_SECONDS = 0.02  # between two looks at whether a request was cancelled, while nothing comes
EXIT_SECONDS = 20.0  # to free the model's memory
GONE_SECONDS = 5.0  # between the end of the socket and that of the process

Answers = queue.SimpleQueue[dict[str, Any] | None]  # None: the process has ended


class Channel:
    """Questions to the engine process and their answers, for any number of threads."""

    def __init__(self, process: subprocess.Popen[bytes], link: Link) -> None:
        self._process = process
        self._link = link
        self._waiting: dict[int, Answers] = {OPENING: queue.SimpleQueue()}
        self._next = OPENING + 1
        self._lock = threading.Lock()
        self._closing = False
        self._on_lost: Callable[[str], None] | None = None
        self.lost: str | None = None  # how the process ended
        self._reader = threading.Thread(target=self._read, name="dflash-frames", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def opened(self, progress: Progress) -> dict[str, Any]:
        """What the process says of the model once it is loaded. Raises what loading raised, or EngineLost."""
        answers = self._waiting[OPENING]
        while "result" not in (frame := self._answer(answers)):
            progress(*frame["event"])
        result: dict[str, Any] = frame["result"]
        return result

    def ask(self, op: str, *args: Any) -> Any:
        """The answer to one question. Raises what it raised there, or EngineLost."""
        number, answers = self._put(op, args)
        try:
            return unpack(self._answer(answers)["result"])
        finally:
            self._forget(number)

    def stream(self, op: str, given: Any, cancelled: Callable[[], bool]) -> Generator[Any, None, None]:
        """The events of one job; closing the iterator cancels it, like `cancelled`. Raises as `ask`."""
        number, answers = self._put(op, [given])
        going = True
        try:
            while True:
                try:
                    frame = self._answer(answers, POLL_SECONDS)
                except queue.Empty:
                    frame = {}
                if going and cancelled():
                    going = False
                    self._send({"id": number, "op": "cancel"})
                if "end" in frame:
                    going = False
                    return
                if frame:
                    yield unpack(frame["event"])
        finally:
            self._forget(number)
            if going:
                self._send({"id": number, "op": "cancel"})

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Have `on_lost` told how the process ended when it does so by itself, at once if it has."""
        with self._lock:
            self._on_lost = on_lost
            lost = self.lost
        if lost is not None and not self._closing:
            on_lost(lost)

    def kill(self) -> None:
        """End the process by force; who waits for it is told."""
        self._process.kill()

    def close(self, seconds: float = EXIT_SECONDS) -> None:
        """End the process: as it should end, or after `seconds` by force."""
        self._closing = True
        self._send({"op": "close"})
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
        self._reader.join()
        self._link.close()

    def _put(self, op: str, args: Sequence[Any]) -> tuple[int, Answers]:
        frame = {"op": op, "args": pack(list(args))}
        answers: Answers = queue.SimpleQueue()
        with self._lock:
            if self.lost is not None:
                raise EngineLost(self.lost)
            number, self._next = self._next, self._next + 1
            self._waiting[number] = answers
        self._send({"id": number, **frame})
        return number, answers

    def _send(self, frame: dict[str, Any]) -> None:
        with suppress(OSError):  # the reader finds out, and tells all who wait
            self._link.send(frame)

    def _answer(self, answers: Answers, seconds: float | None = None) -> dict[str, Any]:
        frame = answers.get(timeout=seconds)
        if frame is None:
            raise EngineLost(self.lost or "")
        if "error" in frame:
            raise unpack_error(frame["error"])
        return frame

    def _forget(self, number: int) -> None:
        with self._lock:
            self._waiting.pop(number, None)

    def _read(self) -> None:
        with suppress(EOFError, OSError, ValueError, KeyError, TypeError):  # the end, or no frame of ours
            while True:
                frame = self._link.receive()
                answers = self._waiting.get(frame["id"])
                if answers is not None:  # nobody waits for what was cancelled
                    answers.put(frame)
        try:
            code = self._process.wait(EXIT_SECONDS if self._closing else GONE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        with self._lock:
            self.lost = lost = ending(code)
            waiting, on_lost = list(self._waiting.values()), self._on_lost
        for answers in waiting:
            answers.put(None)
        if on_lost is not None and not self._closing:
            on_lost(lost)


def ending(code: int) -> str:
    """How a process ended, by its exit status."""
    if code >= 0:
        return f"the engine process ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (killed, perhaps for want of memory)" if -code == signal.SIGKILL else ""
    return f"the engine process ended by {name}{hint}"


class RemoteVocabulary:
    """The vocabulary on the other side."""

    def __init__(self, channel: Channel, n_vocab: int, bos_ids: list[int]) -> None:
        self._channel = channel
        self.n_vocab = n_vocab
        self._bos_ids = bos_ids

    @property
    def bos_ids(self) -> list[int]:
        return list(self._bos_ids)

    def id_of(self, text: str) -> int | None:
        found: int | None = self._channel.ask("id_of", text)
        return found

    def encode(self, text: str, special: bool = True, most: int | None = None) -> list[int]:
        tokens: list[int] = self._channel.ask("encode", text, special, most)
        return tokens

    def pieces(self, tokens: Iterable[int]) -> list[bytes]:
        found: list[bytes] = self._channel.ask("pieces", list(tokens))
        return found

    def decode_bytes(self, tokens: Iterable[int], special: bool = False) -> bytes:
        data: bytes = self._channel.ask("decode_bytes", list(tokens), special)
        return data


class RemoteRunner:
    """An EngineSide in another process; `about` is what that said of itself when it had loaded. Methods raise EngineLost, too."""

    def __init__(self, channel: Channel, about: dict[str, Any]) -> None:
        self._channel = channel
        self._about = about
        self.tokenizer = RemoteVocabulary(channel, about["n_vocab"], about["bos_ids"])
        self.n_ctx: int = about["n_ctx"]
        self.parallel: int = about["info"].get("parallel", 1)

    @property
    def pid(self) -> int:
        """The number of the engine process."""
        return self._channel.pid

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Have `on_lost` told how the process ended once it has by itself; in a thread of its own."""
        self._channel.watch(on_lost)

    def prepare(self, request: ChatRequest | CompletionRequest) -> Prepared:
        prepared: Prepared = self._channel.ask("prepare", request)
        return prepared

    def count(self, request: ChatRequest | CompletionRequest) -> int:
        n: int = self._channel.ask("count", request)
        return n

    def render(self, request: ChatRequest | CompletionRequest) -> str:
        text: str = self._channel.ask("render", request)
        return text

    def text_tokens(self, text: str | list[int], truncate: bool) -> tuple[int, ...]:
        return tuple(self._channel.ask("text_tokens", text, truncate))

    def info(self) -> dict[str, Any]:
        return dict(self._about["info"])

    def metadata(self) -> dict[str, Any]:
        return dict(self._about["metadata"])

    def vocabulary(self) -> dict[str, Any]:
        return dict(self._about["vocabulary"])

    def skills(self) -> list[str]:
        return list(self._about["skills"])

    def load(self) -> dict[str, float]:
        return dict(self._channel.ask("load"))

    def events(self, prepared: Prepared, cancelled: Callable[[], bool]) -> Generator[Event, None, None]:
        return self._channel.stream("events", prepared, cancelled)

    def embed(self, ids: Sequence[int], cancelled: Callable[[], bool]) -> NDArray[np.float32]:
        with closing(self._channel.stream("embed", list(ids), cancelled)) as vectors:
            vector: NDArray[np.float32] = next(vectors)
            return vector

    def close(self) -> None:
        """End the process, if it has not."""
        self._channel.close()
