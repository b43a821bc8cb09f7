"""Sockets that are bound before a model is loaded."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the server extra is not installed")

from dflash_ggml.errors import ConfigError
from dflash_ggml.server.listening import listen

FOUND = [
    (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
    (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),  # twice in some hosts files
    (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0)),  # of no machine
    (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.2", 0)),
]


def test_all_addresses_of_a_name_that_are_here_get_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: FOUND)
    bound = listen("machine", 0)
    try:
        names = [one.getsockname() for one in bound]
        assert [name[0] for name in names] == ["127.0.0.1", "127.0.0.2"]
        assert names[0][1] == names[1][1] > 0
    finally:
        for one in bound:
            one.close()


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EADDRINUSE, "--port: 8080 of 127.0.0.1 is taken by another program"),
        (errno.EACCES, "--port: 8080 is not allowed to this user"),
        (errno.ENOBUFS, "--port: 8080 of 127.0.0.1 can't be listened on: "),
        (errno.EADDRNOTAVAIL, "--host: '127.0.0.1' is no address of this machine"),
    ],
)
def test_what_is_wrong_is_said(monkeypatch: pytest.MonkeyPatch, number: int, words: str) -> None:
    def refuse(self: Any, address: Any) -> None:
        raise OSError(number, "a reason")

    class Refused(socket.socket):
        bind = refuse

    monkeypatch.setattr(socket, "socket", Refused)
    with pytest.raises(ConfigError) as told:
        listen("127.0.0.1", 8080)
    assert str(told.value).startswith(words)
