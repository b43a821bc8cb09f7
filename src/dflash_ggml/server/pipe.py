"""Pipe to a child process: typed messages, as JSON.

Never pickle: the child processes handle untrusted files and texts in native code, and unpickling runs code. msgspec
checks received messages, Python's `json` writes them: requests may contain integers beyond 64 bits, which MessagePack
lacks, and biases and log-probabilities may be infinite, which strict JSON lacks.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

import msgspec

# terminals and service managers send these to all processes of a group
HELD_BACK = (signal.SIGINT, signal.SIGTERM)
# CUDA does not survive a fork, so start a fresh interpreter, with our path and without the current folder
_START = (
    "import sys; from importlib import import_module; module, fd = sys.argv[1:3]; sys.path[:] = sys.argv[3:]; "
    "import_module(module).main(int(fd))"
)


def convert(data: Any, kind: Any) -> Any:
    """Convert JSON values to a type, or to one of a union.

    Raises:
        ValueError: They do not match.
    """
    return msgspec.convert(data, kind, str_keys=True, dec_hook=lambda wanted, value: wanted(value))


class Pipe:
    """One end of the pipe. Any thread may send, one thread receives."""

    def __init__(self, end: Connection | int) -> None:
        self._connection = Connection(end) if isinstance(end, int) else end
        self._sending = threading.Lock()

    def send(self, message: Any) -> None:
        """Send a message.

        Raises:
            OSError: The other end is gone.
            TypeError: The message is not plain data.
        """
        plain = msgspec.to_builtins(message, str_keys=True, enc_hook=os.fspath)
        data = json.dumps(plain, separators=(",", ":")).encode()
        with self._sending:
            self._connection.send_bytes(data)

    def receive(self, kind: Any) -> Any:
        """The next message, of this type.

        Raises:
            EOFError, OSError: The other end is gone.
            ValueError: The message has another type.
        """
        return convert(json.loads(self._connection.recv_bytes()), kind)

    def wait(self, seconds: float) -> bool:
        """Wait at most so long for a message or the end; returns whether there is one."""
        return self._connection.poll(seconds)

    def close(self) -> None:
        """Free the descriptor."""
        self._connection.close()


def spawn(module: str, **options: Any) -> tuple[subprocess.Popen[bytes], Pipe]:
    """Start a fresh interpreter that calls the module's `main` with the descriptor of the pipe's other end.

    SIGINT and SIGTERM stay blocked there until it unblocks them; it ends when the pipe is closed, which the kernel does
    whenever this process ends.

    Raises:
        OSError: The process cannot be started.
    """
    ours, theirs = multiprocessing.Pipe()
    command = [sys.executable, "-c", _START, module, str(theirs.fileno()), *sys.path]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], **options)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
    return process, Pipe(ours)
