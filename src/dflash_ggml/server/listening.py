"""The server's sockets, bound before a model is loaded: a port that is taken is said at once."""

from __future__ import annotations

import errno
import socket

from ..errors import ConfigError


def listen(host: str, port: int) -> list[socket.socket]:
    """Bound sockets, one per address of `host`, all of one port (0: one that is free). Nobody is let in yet.

    Raises ConfigError where the name is unknown, no address is this machine's, or the port is taken or not allowed.
    """
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise ConfigError(f"--host: {host!r} is the name of no machine") from None
    bound: list[socket.socket] = []
    for family, _, _, _, address in dict.fromkeys(found):
        try:
            bound.append(_bind(family, str(address[0]), port))
        except OSError as error:
            # a name may have an address of a kind that this machine lacks, beside one that it has
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                for one in bound:
                    one.close()
                raise ConfigError(_why(error, host, port)) from None
            continue
        port = bound[0].getsockname()[1]
    if not bound:
        raise ConfigError(f"--host: {host!r} is no address of this machine; 127.0.0.1 and 0.0.0.0 always are")
    return bound


def _bind(family: int, address: str, port: int) -> socket.socket:
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        one.bind((address, port))
    except OSError:
        one.close()
        raise
    return one


def _why(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"--port: {port} of {host} is taken by another program; give another, or 0 for one that is free"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"--port: {port} is not allowed to this user; give one above 1023"
    return f"--port: {port} of {host} can't be listened on: {error.strerror}"
