"""The server's sockets, bound before a model is loaded: a port in use fails at once."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from typing import Any

from ..errors import ConfigError

ATTEMPTS = 16  # attempts to find a port that is free on all addresses


def listen(host: str, port: int) -> list[socket.socket]:
    """Bind sockets, one per address of `host`, all on one port (0: a free one). No connection is accepted yet.

    Raises:
        ConfigError: The name is unknown, no address is this machine's, or the port is taken or not allowed.
    """
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise ConfigError(f"--host: cannot resolve {host!r}") from None
    addresses = list(dict.fromkeys((family, address) for family, *_, address in found))
    for _ in range(1 if port else ATTEMPTS):
        try:
            bound = _bind_all(addresses, port)
        except OSError as error:
            if port or error.errno != errno.EADDRINUSE:
                raise ConfigError(_why(error, host, port)) from None
            continue
        if not bound:
            raise ConfigError(
                f"--host: {host!r} is not an address of this machine; 127.0.0.1 and 0.0.0.0 always are"
            )
        return bound
    raise ConfigError(f"--port: none was free on all addresses of {host!r}; give one, or --host one address")


def _bind_all(addresses: Sequence[tuple[int, Any]], port: int) -> list[socket.socket]:
    """Bind a socket for each address of this machine, all on one port. Raises OSError."""
    bound: list[socket.socket] = []
    for family, address in addresses:
        try:
            # for IPv6 with flow info and scope id, which link-local addresses need
            bound.append(socket.create_server((address[0], port, *address[2:]), family=family))
        except OSError as error:
            # a name may also have addresses of a family that this machine lacks
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                for one in bound:
                    one.close()
                raise
            continue
        port = bound[0].getsockname()[1]
    return bound


def bare(host: str) -> str:
    """A name or address of `--host`, without the brackets of IPv6."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def in_url(host: str) -> str:
    """A name or address in URL form: IPv6 in brackets, with an RFC 6874 zone."""
    return "[{}]".format(host.replace("%", "%25")) if ":" in host else host


def _why(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"--port: {port} of {host} is taken by another program; give another, or 0 for one that is free"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"--port: {port} is not allowed to this user; give one above 1023"
    return f"--port: {port} of {host} can't be listened on: {error.strerror}"
