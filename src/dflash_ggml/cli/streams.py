"""Handling of standard streams that are closed or cannot be written. Independent of the engine, for `dflash-doctor`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


def replace_closed_streams() -> set[str]:
    """Replace every closed standard stream by the null device; returns their names."""
    closed = set()
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            closed.add(name)
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - open until the end
    return closed


def can_write(command: str) -> bool:
    """As replace_closed_streams; False, with a message, if the command's output would be lost."""
    if "stdout" not in replace_closed_streams():
        return True
    print(f"{command}: standard output is closed; redirect it to a file or to /dev/null", file=sys.stderr)
    return False


@contextlib.contextmanager
def named(stream: str = "standard output") -> Iterator[None]:
    """Add the stream's name to an OSError that lacks one."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = stream
        raise


def end_output(command: str, error: OSError) -> int:
    """The exit code for an output error on standard output or a file (see `named`).

    0 if the reader closed the pipe, else 1 and a message.
    """
    with contextlib.suppress(ValueError):  # not a file
        # avoid a second error when the interpreter flushes stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return 0
    what = f"{error.filename}: " if error.filename else ""
    print(f"{command}: {what}{error.strerror or error}", file=sys.stderr)
    return 1


def write_out(text: str, errors: str = "strict") -> None:
    """Write text to stdout as UTF-8, unbuffered."""
    with named():
        sys.stdout.buffer.write(text.encode(errors=errors))
        sys.stdout.buffer.flush()
