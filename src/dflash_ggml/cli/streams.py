"""Standard streams that the caller closed or that cannot be written. No engine is needed here: `dflash-doctor` starts without."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


def replace_closed_streams() -> set[str]:
    """Stand the null device in for every standard stream that the caller closed, and name those."""
    closed = set()
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            closed.add(name)
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - it stands for a stream, until the end
    return closed


def can_write(command: str) -> bool:
    """As replace_closed_streams; False, with a line about it, where what the command writes would be lost."""
    if "stdout" not in replace_closed_streams():
        return True
    print(f"{command}: standard output is closed; redirect it to a file or to /dev/null", file=sys.stderr)
    return False


@contextlib.contextmanager
def named(stream: str = "standard output") -> Iterator[None]:
    """Add the stream's name to an OSError, which has none of its own."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = stream
        raise


def end_output(command: str, error: OSError) -> int:
    """The exit code when standard output or a file, which the error names (`named`), or anything else broke.

    0 where the reader of the output has seen enough, else 1 and a line about it.
    """
    with contextlib.suppress(ValueError):  # no file behind it
        # keep the interpreter from complaining again when it flushes stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return 0
    what = f"{error.filename}: " if error.filename else ""
    print(f"{command}: {what}{error.strerror or error}", file=sys.stderr)
    return 1


def write_out(text: str, errors: str = "strict") -> None:
    """Text to stdout as UTF-8, at once."""
    with named():
        sys.stdout.buffer.write(text.encode(errors=errors))
        sys.stdout.buffer.flush()
