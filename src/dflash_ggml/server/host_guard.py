"""Check of Host headers, against DNS rebinding by web pages."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import ConfigError
from .errors import ApiError


class HostGuard:
    """Middleware that refuses requests whose Host header is not allowed.

    Args:
        app: The application behind it.
        allowed: Names; "*.example.org" matches all subdomains, "*" any name.
        answer: Makes the response of an error.

    Raises:
        ConfigError: A name can be no host's.
    """

    def __init__(
        self, app: ASGIApp, allowed: Sequence[str], answer: Callable[[Request, ApiError], Response]
    ) -> None:
        self._app = app
        self._answer = answer
        self._names = {check_name(name) for name in allowed}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._lets_in(asked := Headers(scope=scope).get("host", "")):
            await self._app(scope, receive, send)
            return
        name = host_of(asked)
        advice = "name it in the header"
        if _is_name(name):
            advice = f"start it with --allowed-host {name}, or with an API key"
        error = ApiError(
            400, f"the host {name!r:.200} is not served here: {advice}", "Host", "host_not_allowed"
        )
        await self._answer(Request(scope), error)(scope, receive, send)

    def _lets_in(self, asked: str) -> bool:
        name = host_of(asked)
        above = name.split(".")
        wider = ("*." + ".".join(above[i:]) for i in range(1, len(above)))
        return bool({"*", name, *wider} & self._names)


def host_of(header: str) -> str:
    """The name or address in a Host header, in lower case, without port and brackets; "" without one."""
    name = header.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0]


def check_name(name: str) -> str:
    """Normalise a name of `--allowed-host` like `host_of`: without port, IPv6 without brackets.

    Raises:
        ConfigError: It can be no host's name.
    """
    plain = name.strip().lower()
    if not _is_ipv6(plain):
        plain = host_of(plain) if re.fullmatch(r"(\[[^\]]*\]|[^:\[]*)(:\d+)?", plain) else ""
    if plain != "*" and not _is_name(plain.removeprefix("*.")):
        raise ConfigError(
            f"--allowed-host: {name!r} is not a host name; such as llm.home, *.example.org or *"
        )
    return plain


def _is_name(plain: str) -> bool:
    """Whether this is a valid name or address for a Host header; a trailing dot is allowed."""
    if _is_ipv6(plain):
        return True
    return all(plain.removesuffix(".").split(".")) and not any(c in "*,/@:[]" or c.isspace() for c in plain)


def _is_ipv6(plain: str) -> bool:
    try:
        ipaddress.IPv6Address(plain)
    except ValueError:
        return False
    return True
