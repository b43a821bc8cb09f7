"""What goes between the server and its engine process: JSON objects in frames, over a socket pair of our own.

Two forms were weighed. Pickle is faster and needs no code, but whoever reads a pickle runs what it says, and the engine
process is the one that gives strangers' files and texts to native code: should one of them take it over, the server must
not follow. JSON by `session.wire` carries plain data only, and a frame that a dying process has cut is an error, no more.
One message is a pickle, the very first, from the server to the process that it has just started: what to open.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Mapping
from dataclasses import is_dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from ..errors import ConfigError, ContextOverflowError, DeviceError, DflashError, ModelFileError
from ..session import wire
from ..text.tokenizer import TooManyTokens
from .errors import ApiError

_ERRORS: dict[str, type[DflashError]] = {
    kind.__name__: kind for kind in (ConfigError, DeviceError, DflashError, ModelFileError)
}


class Link:
    """One end of the socket pair. Any thread may send, one receives."""

    def __init__(self, fd: int) -> None:
        self._connection = Connection(fd)
        self._sending = threading.Lock()

    def send_bytes(self, data: bytes) -> None:
        """Send one frame. Raises OSError when the other end is gone."""
        with self._sending:
            self._connection.send_bytes(data)

    def send(self, frame: Mapping[str, Any]) -> None:
        """Send one frame of JSON. Raises OSError when the other end is gone."""
        self.send_bytes(json.dumps(frame, separators=(",", ":")).encode())

    def receive_bytes(self) -> bytes:
        """The next frame. Raises EOFError or OSError when the other end is gone."""
        return self._connection.recv_bytes()

    def receive(self) -> dict[str, Any]:
        """The next frame of JSON. Raises as receive_bytes, and ValueError for one that is none."""
        frame = json.loads(self.receive_bytes())
        if not isinstance(frame, dict):
            raise ValueError("a frame is no object")
        return frame

    def wait(self, seconds: float) -> bool:
        """Whether a frame, or the end, is there within so long."""
        return self._connection.poll(seconds)

    def close(self) -> None:
        """Give the descriptor back."""
        self._connection.close()


def pack(value: Any) -> Any:
    """A request, event, vector, bytes, plain value, or a sequence of them as JSON."""
    if is_dataclass(value):
        return wire.to_dict(value)
    if isinstance(value, bytes):
        return {"type": "bytes", "data": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray):
        return {"type": "vector", "data": base64.b64encode(value.astype("<f4").tobytes()).decode()}
    if isinstance(value, (list, tuple)) and set(map(type, value)) <= {int}:
        return list(value)
    if isinstance(value, (list, tuple)):
        return [pack(item) for item in value]
    return value


def unpack(data: Any) -> Any:
    """What `pack` was given, tuples as lists. Raises ConfigError for what is nothing of ours."""
    if isinstance(data, list) and set(map(type, data)) <= {int}:
        return data
    if isinstance(data, list):
        return [unpack(item) for item in data]
    if not isinstance(data, dict):
        return data
    if data.get("type") == "bytes":
        return base64.b64decode(data["data"])
    if data.get("type") == "vector":
        return np.frombuffer(base64.b64decode(data["data"]), "<f4").astype(np.float32)
    return wire.from_dict(data)


def pack_error(error: BaseException) -> dict[str, Any]:
    """An exception as JSON: its kind, its message, and the numbers that its handlers look at."""
    names = [kind.__name__ for kind in type(error).__mro__]
    kind = next((name for name in names if name in _ERRORS), names[0])
    packed: dict[str, Any] = {"kind": kind, "message": str(error)}
    if isinstance(error, ContextOverflowError):
        packed |= {"kind": "ContextOverflowError", "n_prompt": error.n_prompt, "n_ctx": error.n_ctx}
    elif isinstance(error, TooManyTokens):
        packed |= {"kind": "TooManyTokens", "found": error.found}
    return packed


def is_known(error: BaseException) -> bool:
    """Whether it was raised on purpose, and is as good on the other side."""
    return isinstance(error, (DflashError, TooManyTokens))


def unpack_error(packed: Mapping[str, Any]) -> Exception:
    """The exception that `pack_error` was given; one that was not raised on purpose is a 500 that names its kind."""
    kind, message = packed["kind"], packed["message"]
    if kind == "ContextOverflowError":
        return ContextOverflowError(message, packed["n_prompt"], packed["n_ctx"])
    if kind == "TooManyTokens":
        return TooManyTokens(packed["found"])
    if kind in _ERRORS:
        return _ERRORS[kind](message)
    return ApiError(500, f"internal error: {kind} (the server's log has the details)", code="internal_error")
