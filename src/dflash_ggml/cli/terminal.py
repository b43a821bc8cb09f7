"""Terminal input: echo off while an answer streams, and the history of earlier sessions."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

HISTORY = Path("~/.local/state/dflash-ggml/chat-history")
N_LINES = 2000  # lines kept in the file


class Keyboard:
    """While `quiet()`, typed input is not echoed, but kept for the next prompt.

    Ctrl-C does not discard it. No effect if standard input is not a terminal.
    """

    def __init__(self) -> None:
        self._before: list[Any] | None = None

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Context without echo, until its end or restore()."""
        if not sys.stdin.isatty():
            yield
            return
        import termios

        before = termios.tcgetattr(sys.stdin)
        quiet = [*before]
        quiet[3] = before[3] & ~termios.ECHO | termios.NOFLSH
        self._before = before
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, quiet)
        try:
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        """Restore the echo, also before the process exits."""
        if self._before is not None:
            import termios

            before, self._before = self._before, None
            with suppress(termios.error):  # the terminal was closed
                termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


@contextmanager
def line_history(file: Path | None, note: Callable[[str], None]) -> Iterator[None]:
    """Context with line editing and the history in `file`, to which this session's lines are appended.

    Args:
        note: Called with non-fatal errors.
    """
    if not sys.stdin.isatty():
        yield
        return
    import readline

    readline.set_history_length(N_LINES)
    if file is not None and file.exists():
        try:
            readline.read_history_file(file)
        except OSError as error:
            note(f"the history of lines is not read: {error}")
    n_before = readline.get_current_history_length()
    try:
        yield
    finally:
        if file is not None:
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))
                # append, since another session may have written meanwhile
                readline.append_history_file(readline.get_current_history_length() - n_before, file)
                with suppress(OSError):
                    file.chmod(0o600)
            except OSError as error:
                note(f"the history of lines is not kept: {error}")
