"""Programs on a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios


class Terminal:
    """A program on a pseudo-terminal, which is its controlling one: Ctrl-C can be typed. columns: width."""

    def __init__(self, *command: str, columns: int = 80) -> None:
        self.main, side = pty.openpty()
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.process = subprocess.Popen(
            command,
            stdin=side,
            stdout=side,
            stderr=side,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(side)
        self.seen = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.main)

    def more(self) -> None:
        """What is written next."""
        self.seen += os.read(self.main, 4096).decode("utf-8", "replace")

    def rest(self) -> str:
        """All that is written until the program ends."""
        while True:
            try:
                piece = os.read(self.main, 65536)
            except OSError:  # nobody has the other side open any more
                return self.seen
            self.seen += piece.decode("utf-8", "replace")

    def wait_for(self, text: str, poke: signal.Signals | None = None, without: str = "\0") -> None:
        """Read until `text` appears after what was waited for before, and nothing `without` before it.

        poke: sent each second until it does.

        A signal that comes after readline's prompt and before its wait for input is only seen at the next one.
        """
        for attempt in range(60):
            while (
                text not in self.seen
                and select.select([self.main], [], [], 0 if poke and not attempt else 1)[0]
            ):
                self.seen += os.read(self.main, 65536).decode("utf-8", "replace")
            if text in self.seen:
                break
            if poke is not None:
                self.process.send_signal(poke)
        assert text in self.seen, f"{text!r} did not come; seen: {self.seen!r}"
        before, _, self.seen = self.seen.partition(text)
        assert without not in before, before

    def type(self, text: str) -> None:
        os.write(self.main, text.encode())
