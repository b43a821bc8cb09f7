"""Tests of sockets that are bound before a model is loaded."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the server extra is not installed")

from dflash_ggml.errors import ConfigError
from dflash_ggml.server.listening import bare, in_url, listen

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


class Taken(socket.socket):
    """A port that is free on the first address is taken on the last, the first so many times."""

    times = 0

    def bind(self, address: Any) -> None:
        if address[0] == "127.0.0.2" and Taken.times:
            Taken.times -= 1
            raise OSError(errno.EADDRINUSE, "taken")
        if address[0] == "127.0.0.1":
            opened.append(self)
        super().bind(address)


opened: list[socket.socket] = []


@pytest.mark.parametrize("times", [1, 5])
def test_a_port_that_is_free_is_so_on_all_addresses(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: FOUND)
    monkeypatch.setattr(socket, "socket", Taken)
    opened.clear()
    Taken.times = times
    bound = listen("machine", 0)
    try:
        assert [one.getsockname()[0] for one in bound] == ["127.0.0.1", "127.0.0.2"]
        assert len({one.getsockname()[1] for one in bound}) == 1
        assert [one.fileno() for one in opened[:-1]] == [-1] * times and opened[-1] is bound[0]
    finally:
        for one in bound:
            one.close()


@pytest.mark.parametrize(
    ("port", "words"),
    [
        (0, "--port: none was free on all addresses of 'machine'"),
        (47981, "--port: 47981 of machine is taken"),
    ],
)
def test_a_port_that_is_free_nowhere(monkeypatch: pytest.MonkeyPatch, port: int, words: str) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: FOUND)
    monkeypatch.setattr(socket, "socket", Taken)
    opened.clear()
    Taken.times = 10**6
    with pytest.raises(ConfigError) as caught:
        listen("machine", port)
    assert str(caught.value).startswith(words)
    assert opened and all(one.fileno() == -1 for one in opened)


def test_an_address_keeps_the_network_it_is_meant_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """fe80::1%eth0 is one of the fourth interface; without that it cannot be listened on."""
    calls: list[Any] = []

    class Noted(socket.socket):
        """One of a machine that need not know IPv6."""

        def __init__(self, family: int, kind: int) -> None:
            super().__init__(socket.AF_INET, kind)

        def setsockopt(self, *option: Any) -> None: ...

        def bind(self, address: Any) -> None:
            calls.append(address)
            super().bind(("127.0.0.1", 0))

    found = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fe80::1", 8080, 0, 4))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)
    monkeypatch.setattr(socket, "socket", Noted)
    for one in listen("fe80::1%eth0", 8080):
        one.close()
    assert calls == [("fe80::1", 8080, 0, 4)]


@pytest.mark.parametrize(
    ("host", "there"),
    [("localhost", "localhost"), ("::1", "[::1]"), ("fe80::1%eth0", "[fe80::1%25eth0]")],
)
def test_a_host_in_a_url(host: str, there: str) -> None:
    assert in_url(host) == there
    assert bare(host) == host and (":" not in host or bare(f"[{host}]") == host)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EADDRINUSE, "--port: 8080 of 127.0.0.1 is taken by another program"),
        (errno.EACCES, "--port: 8080 is not allowed to this user"),
        (errno.ENOBUFS, "--port: 8080 of 127.0.0.1 can't be listened on: "),
        (errno.EADDRNOTAVAIL, "--host: '127.0.0.1' is not an address of this machine"),
    ],
)
def test_errors_are_reported(monkeypatch: pytest.MonkeyPatch, number: int, words: str) -> None:
    def refuse(self: Any, address: Any) -> None:
        raise OSError(number, "a reason")

    class Refused(socket.socket):
        bind = refuse

    monkeypatch.setattr(socket, "socket", Refused)
    with pytest.raises(ConfigError) as caught:
        listen("127.0.0.1", 8080)
    assert str(caught.value).startswith(words)
