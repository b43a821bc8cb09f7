"""The server's end of its engine process: a Runner whose calls all go through the pipe.

With its own tokenizer, templates and grammars the server would save a round trip of some hundred microseconds per call, but
hold the vocabulary twice, and could crash while compiling. So it only has the model's data for /props and the lists;
everything that untrusted files and texts could crash is in the other process.
"""

from __future__ import annotations

import itertools
import logging
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..session.events import Event
from ..session.prompts import Prepared
from ..session.requests import ChatRequest, CompletionRequest
from .errors import EngineLost
from .messages import RESULTS, About, Answer, Call, Cancel, Close, Failed, Item, Named, Result, prompt_of
from .pipe import convert, spawn
from .runner import Progress

POLL_SECONDS = 0.02  # interval of checks for cancellation, while nothing arrives
EXIT_SECONDS = 20.0  # seconds to free the model's memory
GONE_SECONDS = 5.0  # seconds between the end of the pipe and the process's exit


class Channel:
    """A new engine process and the calls to it; thread-safe."""

    def __init__(self) -> None:
        self._process, self._pipe = spawn("dflash_ggml.server.engine_process")
        self._waiting: dict[int, queue.SimpleQueue[Answer]] = {}
        self._ids = itertools.count()
        self._is_closing = False
        self._lost = Future[str]()  # how the process ended
        self._reader = threading.Thread(target=self._receive, name="dflash-receive", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def open(self, opener: object, progress: Progress) -> About:
        """Load the model.

        Returns:
            The process's description of the model.

        Raises:
            Exception: The exception of loading.
            EngineLost: The process ended.
        """
        name = f"{type(opener).__module__}:{type(opener).__qualname__}"
        answers = self.call("open", name, opener, logging.getLogger().getEffectiveLevel())
        while isinstance(answer := next(answers), Item):
            progress(*answer.value)
        return convert(answer.value, About)

    def ask(self, method: str, *args: Any, **options: Any) -> Any:
        """The result of one call.

        Raises:
            Exception: What the call raised there.
            EngineLost: The process ended.
        """
        sent = (Named.of(arg) if isinstance(arg, (ChatRequest, CompletionRequest)) else arg for arg in args)
        [answer] = self.call(method, *sent, options=options)
        return convert(answer.value, RESULTS[method])

    def call(
        self,
        method: str,
        *args: Any,
        options: dict[str, Any] | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Generator[Item | Result, None, None]:
        """The answers to one call: items, at last the result; closing the iterator cancels the call, like `cancelled`.

        Raises:
            Exception: What the call raised there.
            EngineLost: The process ended.
        """
        number, answers = next(self._ids), queue.SimpleQueue[Answer]()
        self._waiting[number] = answers
        if self._lost.done():
            answers.put(Failed.of(number, EngineLost(self._lost.result())))
        answer: Answer | None = None
        try:
            self._send(Call(number, method, args, options or {}))
            while not isinstance(answer, Result):
                try:
                    answer = answers.get(timeout=POLL_SECONDS)
                except queue.Empty:
                    pass
                else:
                    if isinstance(answer, Failed):
                        raise answer.error()
                    yield answer
                if cancelled():
                    self._send(Cancel(number))
        finally:
            del self._waiting[number]
            if answer is None or isinstance(answer, Item):
                self._send(Cancel(number))

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Call `on_lost` with a description if the process ends by itself; immediately if it already has."""
        self._lost.add_done_callback(lambda lost: None if self._is_closing else on_lost(lost.result()))

    def kill(self) -> None:
        """Kill the process; waiting callers fail."""
        self._process.kill()

    def close(self, seconds: float = EXIT_SECONDS) -> None:
        """Close the process: regularly, or after `seconds` by force."""
        self._is_closing = True
        self._send(Close())
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self.kill()
        self._reader.join()
        self._pipe.close()

    def _send(self, message: Call | Cancel | Close) -> None:
        with suppress(OSError):  # the reader thread notices, and notifies waiting callers
            self._pipe.send(message)

    def _receive(self) -> None:
        with suppress(
            EOFError, OSError, ValueError, RecursionError
        ):  # end of the pipe, or an invalid message
            while True:
                answer = self._pipe.receive(Answer)
                waiting = self._waiting.get(answer.id)
                if waiting is not None:  # a cancelled call has no waiter
                    waiting.put(answer)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_SECONDS if self._is_closing else GONE_SECONDS)
        self.kill()
        lost = ending(self._process.wait())
        self._lost.set_result(lost)  # first, so that no notified thread takes another job
        for number, answers in list(self._waiting.items()):
            answers.put(Failed.of(number, EngineLost(lost)))


def ending(code: int) -> str:
    """Description of a process's end, by its exit status."""
    if code >= 0:
        return f"the engine process ended with exit code {code}"
    name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
    hint = " (killed, perhaps for want of memory)" if -code == signal.SIGKILL else ""
    return f"the engine process ended by {name}{hint}"


class RemoteRunner:
    """A `Runner` in another process, with its tokenizer; methods raise EngineLost, too."""

    def __init__(self, channel: Channel, about: About) -> None:
        self._channel = channel
        self._about = about
        self.tokenizer = self
        self.n_ctx, self.parallel, self.n_vocab = about.n_ctx, about.parallel, about.n_vocab
        self.info, self.metadata = lambda: about.info, lambda: about.metadata
        self.vocabulary, self.skills = lambda: about.vocabulary, lambda: about.skills
        self.pid, self.watch, self.close = channel.pid, channel.watch, channel.close

    @property
    def bos_ids(self) -> list[int]:
        """See `Tokenizer.bos_ids`."""
        return list(self._about.bos_ids)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A method of the remote runner or its tokenizer."""
        if name not in RESULTS:
            raise AttributeError(name)
        return partial(self._channel.ask, name)

    def prepare(self, request: ChatRequest | CompletionRequest) -> Prepared:
        """See `Runner.prepare`; only the prompt is returned through the pipe."""
        return Prepared(request, *self._channel.ask("prepare", request))

    def events(self, prepared: Prepared, cancelled: Callable[[], bool]) -> Generator[Event, None, None]:
        """See `Runner`."""
        args = Named.of(prepared.request), *prompt_of(prepared)
        with closing(self._channel.call("events", *args, cancelled=cancelled)) as answers:
            for answer in answers:
                if isinstance(answer, Item):
                    yield convert(answer.value, Named).value()

    def embed(self, ids: Sequence[int], cancelled: Callable[[], bool]) -> NDArray[np.float32]:
        """See `Runner`."""
        [answer] = self._channel.call("embed", list(ids), cancelled=cancelled)
        return np.frombuffer(convert(answer.value, bytes), "<f4").astype(np.float32)
