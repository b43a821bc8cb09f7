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
        self.main, self._side = pty.openpty()
        side = self._side
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.process = subprocess.Popen(
            command,
            stdin=side,
            stdout=side,
            stderr=side,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self.seen = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()
        for end in (self.main, self._side):
            os.close(end)

    def echoes(self) -> bool:
        """Whether what is typed is shown."""
        return bool(termios.tcgetattr(self._side)[3] & termios.ECHO)

    def more(self) -> None:
        """What is written next, however long it takes."""
        assert select.select([self.main], [], [], 120)[0], f"nothing more came; seen: {self.seen!r}"
        self.seen += os.read(self.main, 4096).decode("utf-8", "replace")

    def rest(self) -> str:
        """All that is written until the program has ended."""
        while self.process.poll() is None or select.select([self.main], [], [], 0)[0]:
            if select.select([self.main], [], [], 0.1)[0]:
                self.more()
        return self.seen

    def wait_for(self, text: str, poke: signal.Signals | None = None, without: str = "\0") -> None:
        """Read until `text` appears behind what was waited for before, with no `without` between; send `poke` each second.

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
