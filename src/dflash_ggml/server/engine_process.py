"""The engine process of `--supervise`: opens the model, answers calls, ends with its server.

SIGINT and SIGTERM have a handler that does nothing, since the server decides how long running answers may continue; unlike an
ignored or blocked signal, a handler is not inherited by child processes. The process ends on a `Close` message, or when the
pipe is closed (docs/decisions/0006).
"""

from __future__ import annotations

import logging
import os
import pkgutil
import signal
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..session.prompts import Prepared
from .intake import THREADS
from .messages import (
    RESULTS,
    About,
    Call,
    Cancel,
    Close,
    Failed,
    Item,
    Named,
    Order,
    Prompt,
    Result,
    prompt_of,
)
from .pipe import HELD_BACK, Pipe, convert
from .runner import Runner

log = logging.getLogger(__name__)

JOBS = {"events", "embed"}
REQUEST_CALLS = {"prepare", "count", "render", "events"}
SWITCH_SECONDS = 0.001


class EngineProcess:
    """Threads: this one opens and closes the model, one receives, one per slot runs jobs, a few answer other calls."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._pool = ThreadPoolExecutor(THREADS, "dflash-calls")
        self._cancelled: dict[int, threading.Event] = {}  # of running calls
        self._closing = threading.Event()

    def serve(self, first: Call) -> int:
        """Open the model and answer calls until told to close; returns the exit code."""
        threading.Thread(target=self._receive, name="dflash-receive", daemon=True).start()
        name, given, _ = first.args
        try:
            opener = convert(given, pkgutil.resolve_name(name))
            self._side: Runner = opener(lambda *stage: self._pipe.send(Item(first.id, stage)))
        except BaseException as error:  # noqa: BLE001 - sent to the server, which decides
            self._fail(first.id, error)
            return 1
        side, tokenizer = self._side, self._side.tokenizer
        facts = side.info(), side.metadata(), side.vocabulary(), side.skills()
        self._jobs = ThreadPoolExecutor(side.parallel, "dflash-jobs")
        about = About(*facts, side.n_ctx, side.parallel, tokenizer.n_vocab, tokenizer.bos_ids)
        self._pipe.send(Result(first.id, about))
        self._closing.wait()
        self._jobs.shutdown()
        side.close()
        return 0

    def _receive(self) -> None:
        try:
            while True:
                match self._pipe.receive(Order):
                    case Call() as call:
                        self._cancelled[call.id] = threading.Event()
                        pool = self._jobs if call.method in JOBS else self._pool
                        pool.submit(self._answer, call)
                    case Cancel(id):
                        self._cancelled.get(id, threading.Event()).set()  # the call may have ended
                    case Close():
                        self._closing.set()
        except (EOFError, OSError):
            os._exit(1)  # the server has exited: no peer is left to report to
        except BaseException:  # noqa: BLE001 - the exit code is reported
            traceback.print_exc()
            os._exit(1)

    def _answer(self, call: Call) -> None:
        try:
            self._pipe.send(Result(call.id, self._value(call)))
        except Exception as error:  # noqa: BLE001 - sent to the server
            self._fail(call.id, error)
        finally:
            del self._cancelled[call.id]

    def _fail(self, id: int, error: BaseException) -> None:
        failed = Failed.of(id, error)
        if not failed.is_expected:
            log.error("a call failed", exc_info=error)
        self._pipe.send(failed)

    def _value(self, call: Call) -> Any:
        """The result of a call; a job's events are sent as they occur."""
        cancelled, args = self._cancelled[call.id].is_set, list(call.args)
        if call.method in REQUEST_CALLS:
            args[0] = convert(args[0], Named).value()
        if call.method == "events":
            for event in self._side.events(Prepared(args[0], *convert(args[1:], Prompt)), cancelled):
                self._pipe.send(Item(call.id, Named.of(event)))
            return None
        if call.method == "embed":
            return self._side.embed(args[0], cancelled).astype("<f4").tobytes()
        if call.method == "prepare":
            return prompt_of(self._side.prepare(*args))
        if call.method not in RESULTS:
            raise ValueError(f"there is no method {call.method!r}")
        owner: Any = self._side if hasattr(self._side, call.method) else self._side.tokenizer
        return getattr(owner, call.method)(*args, **call.options)


def main(fd: int) -> None:
    """Serve on this end of the pipe; does not return."""
    code = 1
    for name in HELD_BACK:
        signal.signal(name, lambda signum, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)
    try:
        pipe = Pipe(fd)
        first = pipe.receive(Call)
        logging.basicConfig(format="dflash-serve: %(message)s", level=first.args[2])
        sys.setswitchinterval(SWITCH_SECONDS)
        code = EngineProcess(pipe).serve(first)
    except (EOFError, OSError):
        pass  # the server is gone
    except BaseException:  # noqa: BLE001 - the exit code is reported
        traceback.print_exc()
    # without waiting for the threads of calls
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
