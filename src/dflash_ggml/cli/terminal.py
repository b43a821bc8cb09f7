"""The keyboard while an answer streams, and the lines typed in earlier sessions."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

HISTORY = Path("~/.local/state/dflash-ggml/chat-history")
N_LINES = 2000  # that the file keeps


class Keyboard:
    """While `quiet()`, what is typed is not shown: it stays with the terminal and is read at the next prompt.

    Ctrl-C does not throw those lines away. Nothing happens where standard input is no terminal.
    """

    def __init__(self) -> None:
        self._before: list[Any] | None = None

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Until the block ends, or restore()."""
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
        """What is typed is shown again; for a process that is about to end, too."""
        if self._before is not None:
            import termios

            before, self._before = self._before, None
            with suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


@contextmanager
def line_history(file: Path | None, note: Callable[[str], None]) -> Iterator[None]:
    """Line editing, with a history that goes on where `file` ended: this session's lines join it at the end.

    Args:
        note: Called with what cannot be read or written; never fatal.
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
                # another session may have written meanwhile: nothing of it is lost
                readline.append_history_file(readline.get_current_history_length() - n_before, file)
                with suppress(OSError):
                    file.chmod(0o600)
            except OSError as error:
                note(f"the history of lines is not kept: {error}")
