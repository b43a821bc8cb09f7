"""Where the commands start. Their modules take up to a second to import: Ctrl-C is answered from the first line on.

Nothing is imported before that which the interpreter does not have already, even `signal` would bring `enum` and more.
"""

from __future__ import annotations

import _signal
import os
import sys

INTERRUPTED = 130


def run() -> int:
    """`dflash-run`."""
    return start("cli.run")


def chat() -> int:
    """`dflash-chat`."""
    return start("cli.chat")


def serve() -> int:
    """`dflash-serve`."""
    return start("server.cli")


def bench() -> int:
    """`dflash-bench`."""
    return start("bench.cli")


def doctor() -> int:
    """`dflash-doctor`."""
    return start("cli.doctor")


def convert() -> int:
    """`dflash-convert`."""
    return start("cli.convert")


def train() -> int:
    """`dflash-train`."""
    return start("cli.train")


def start(module: str) -> int:
    """The exit code of `main` in this module of ours; 130 and not a word where Ctrl-C ends it.

    An import cannot be left cleanly: there Ctrl-C ends the process at once, and so it does when main has returned. A
    SIGINT that is ignored, as in a background job of a shell, stays ignored.
    """
    handler = _signal.getsignal(_signal.SIGINT)
    mine = handler is _signal.default_int_handler
    try:
        if mine:
            _signal.signal(_signal.SIGINT, _leave)
        name = f"dflash_ggml.{module}"
        __import__(name)
        main = sys.modules[name].main
        if mine:
            _signal.signal(_signal.SIGINT, handler)
        code = main()
    except KeyboardInterrupt:
        code = INTERRUPTED
    if mine:
        _flush()
        _signal.signal(_signal.SIGINT, _leave)
    return int(code)


def _leave(signum: int, frame: object) -> None:
    os._exit(INTERRUPTED)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue  # full, closed or none: the interpreter will say it
