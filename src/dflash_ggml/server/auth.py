"""API keys: where one is required, and a comparison in constant time."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping, Sequence

from ..errors import ConfigError
from .errors import ApiError


def is_loopback(host: str) -> bool:
    """Whether `host` (name or address to listen on) is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def require_safe_bind(host: str, keys: Sequence[str]) -> None:
    """Raise ConfigError if the server would be reachable from other machines without an API key."""
    if not keys and not is_loopback(host):
        raise ConfigError(
            f"--host {host} can be reached from other machines: give --api-key KEY or --api-key-file FILE, "
            "or listen on 127.0.0.1"
        )


class KeyRing:
    """The accepted API keys; an empty ring admits everyone.

    Raises:
        ConfigError: A key is empty, or cannot be sent in a header.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        for key in keys:
            if not key or not key.isascii() or not key.isprintable() or key.strip() != key:
                raise ConfigError("an API key must be non-empty printable ASCII without surrounding spaces")
        # Digests have equal length, so that the comparison does not leak a key's length.
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def authorise(self, headers: Mapping[str, str]) -> str:
        """Return a short id of the key used ("" without keys); raise ApiError 401 for a missing or wrong key.

        Accepts `Authorization: Bearer KEY` (OpenAI) and `x-api-key: KEY` (Anthropic).
        """
        if not self._digests:
            return ""
        key = headers.get("x-api-key")
        if key is None:
            scheme, _, value = headers.get("authorization", "").partition(" ")
            key = value.strip() if scheme.lower() == "bearer" else None
        if key is None:
            raise ApiError(
                401, "no API key: send Authorization: Bearer KEY or x-api-key: KEY", code="missing_api_key"
            )
        digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            raise ApiError(401, "the API key is not valid", code="invalid_api_key")
        return str(matches.index(True))
