"""Handling of standard streams that are closed or cannot be written. Independent of the engine, for `dflash-doctor`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


def can_write(command: str) -> bool:
    """Replace closed standard streams by the null device; False, with a message, if the command's output would be lost."""
    is_lost = sys.stdout is None
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - open until the end
    if is_lost:
        print(f"{command}: standard output is closed; redirect it to a file or to /dev/null", file=sys.stderr)
    return not is_lost


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
