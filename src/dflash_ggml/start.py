"""Entry point of the commands. Their modules take up to a second to import: Ctrl-C is handled from the first line on.

Before that, only modules that the interpreter has already loaded are imported: even `signal` would bring `enum` and more.
"""

from __future__ import annotations

import _signal
import os
import sys

INTERRUPTED = 130
_COMPILED = ("dflash_ggml.decode.native", "dflash_ggml.ggml.bindings")


def run() -> int:
    """`dflash-run`."""
    return start("cli.run", "dflash-run")


def chat() -> int:
    """`dflash-chat`."""
    return start("cli.chat", "dflash-chat")


def serve() -> int:
    """`dflash-serve`."""
    return start("server.cli", "dflash-serve")


def bench() -> int:
    """`dflash-bench`."""
    return start("bench.cli", "dflash-bench")


def doctor() -> int:
    """`dflash-doctor`."""
    return start("cli.doctor", "dflash-doctor")


def convert() -> int:
    """`dflash-convert`."""
    return start("cli.convert", "dflash-convert")


def train() -> int:
    """`dflash-train`."""
    return start("train.cli", "dflash-train")


def start(module: str, command: str) -> int:
    """Run `main` of a module; returns its exit code, or silently 130 for Ctrl-C.

    An import cannot be interrupted cleanly: there, and after main has returned, Ctrl-C ends the process at once. An ignored
    SIGINT, as in a shell's background job, stays ignored. If the compiled binding does not load: 1, and one line.
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
    except ImportError as error:
        if not (error.name or "").startswith(_COMPILED):
            raise
        print(f"{command}: {' '.join(str(error).split())}", file=sys.stderr)
        code = 1
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
            continue  # full, closed or missing: reported by the interpreter
