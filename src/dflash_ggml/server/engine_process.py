"""The process that `--supervise` puts the engine into: opens the model, answers frames, ends with its server.

SIGINT and SIGTERM do nothing here: a terminal and a service manager send them to all processes of a group, and a running
answer may go on for as long as the server lets it. `supervisor` starts this process with both held back until handlers
stand; a handler, unlike what is ignored or held back, is not inherited by processes that are started from here. What
ends this process is a frame that says so, or the end of the socket: the kernel closes that however the server ends,
by SIGKILL too. PR_SET_PDEATHSIG was the other way: Linux only, and bound to the thread that started the process.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .engine_side import EngineSide
from .frames import Link, is_known, pack, pack_error, unpack
from .intake import THREADS

log = logging.getLogger(__name__)

CALLS = {"prepare", "count", "render", "text_tokens", "load"}
VOCABULARY_CALLS = {"id_of", "encode", "pieces", "decode_bytes"}
SWITCH_SECONDS = 0.001
HELD_BACK = (signal.SIGINT, signal.SIGTERM)
OPENING = 0  # the id of what is said about the opening of the model


class EngineProcess:
    """One thread reads frames, this one opens the model and runs jobs in turn, others beside it where the model has places for
    several texts; a few more answer calls."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._side: EngineSide | None = None
        self._jobs: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(THREADS, "dflash-calls")
        self._cancelled: set[int] = set()

    def serve(self, opener: Any) -> int:
        """Open the model and run jobs until told to end; the exit code."""
        threading.Thread(target=self._read, name="dflash-frames", daemon=True).start()
        try:
            side: EngineSide = opener(self._progress)
        except BaseException as error:  # noqa: BLE001 - told to the server, which decides
            self._link.send({"id": OPENING, "error": pack_error(error)})
            return 1
        self._side = side
        about: dict[str, Any] = {"info": side.info(), "metadata": side.metadata(), "skills": side.skills()}
        about["vocabulary"] = side.vocabulary()
        tokenizer = side.tokenizer
        about |= {"n_ctx": side.n_ctx, "n_vocab": tokenizer.n_vocab, "bos_ids": tokenizer.bos_ids}
        self._link.send({"id": OPENING, "result": about})
        others = [
            threading.Thread(target=self._work, args=(side,), daemon=True) for _ in range(1, side.parallel)
        ]
        for thread in others:
            thread.start()
        self._work(side)
        for thread in others:
            thread.join()
        side.close()
        return 0

    def _work(self, side: EngineSide) -> None:
        while (frame := self._jobs.get()) is not None:
            self._run(side, frame)
            del frame  # an idle thread must not keep the last request's buffers alive
        self._jobs.put(None)  # for the next thread

    def _read(self) -> None:
        try:
            while True:
                frame = self._link.receive()
                op = frame["op"]
                if op == "cancel":
                    self._cancelled.add(frame["id"])
                elif op == "close":
                    self._jobs.put(None)
                elif op in ("events", "embed"):
                    self._jobs.put(frame)
                else:
                    self._pool.submit(self._call, frame)
        except (EOFError, OSError):
            os._exit(1)  # the server is gone, and nobody is left to be told
        except BaseException:  # noqa: BLE001 - an end that is seen
            traceback.print_exc()
            os._exit(1)

    def _progress(self, stage: str, done: int, total: int) -> None:
        self._link.send({"id": OPENING, "event": [stage, done, total]})

    def _run(self, side: EngineSide, frame: dict[str, Any]) -> None:
        number, given = frame["id"], unpack(frame["args"][0])

        def cancelled() -> bool:
            return number in self._cancelled

        try:
            if frame["op"] == "embed":
                self._link.send({"id": number, "event": pack(side.embed(given, cancelled))})
            else:
                for event in side.events(given, cancelled):
                    self._link.send({"id": number, "event": pack(event)})
            self._link.send({"id": number, "end": True})
        except Exception as error:  # noqa: BLE001 - told to who asked
            self._failed(number, error)
        finally:
            self._cancelled.discard(number)

    def _call(self, frame: dict[str, Any]) -> None:
        number, op = frame["id"], frame["op"]
        try:
            assert self._side is not None and op in CALLS | VOCABULARY_CALLS
            owner: Any = self._side if op in CALLS else self._side.tokenizer
            self._link.send({"id": number, "result": pack(getattr(owner, op)(*unpack(frame["args"])))})
        except Exception as error:  # noqa: BLE001 - told to who asked
            self._failed(number, error)

    def _failed(self, number: int, error: Exception) -> None:
        if not is_known(error):
            log.exception("a request failed")
        self._link.send({"id": number, "error": pack_error(error)})


def main(fd: int) -> None:
    """Serve on this end of the socket pair; does not return."""
    code = 1
    for name in HELD_BACK:
        signal.signal(name, lambda signum, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)
    try:
        link = Link(fd)
        opener, level = pickle.loads(link.receive_bytes())
        logging.basicConfig(format="dflash-serve: %(message)s", level=level)
        sys.setswitchinterval(SWITCH_SECONDS)
        code = EngineProcess(link).serve(opener)
    except (EOFError, OSError):
        pass  # the server is gone
    except BaseException:  # noqa: BLE001 - an end that is seen
        traceback.print_exc()
    # the threads of calls need not end first
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
