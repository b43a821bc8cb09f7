"""What a request may cost before it reaches the engine: bytes, seconds, nesting, list lengths."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from .errors import ApiError, bad_request


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one server; every one of them answers with a clear error, none cuts in silence."""

    body_bytes: int = 8 << 20
    body_seconds: float = 30.0
    nesting: int = 64
    messages: int = 4096
    tools: int = 256
    stops: int = 16
    stop_chars: int = 256
    send_seconds: float = 60.0


async def read_body(request: Request, limits: Limits) -> bytes:
    """Read a request's body under the byte and time limits.

    Raises ApiError 413 (too large, also when only announced), 408 (not sent in time), and 400 when the client
    went away half way.
    """
    too_large = ApiError(413, f"the body is larger than {limits.body_bytes} bytes", code="request_too_large")
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limits.body_bytes:
        raise too_large
    chunks: list[bytes] = []
    size = 0

    async def drain() -> None:
        nonlocal size
        async for chunk in request.stream():
            size += len(chunk)
            if size > limits.body_bytes:
                raise too_large
            chunks.append(chunk)

    try:
        await asyncio.wait_for(drain(), limits.body_seconds)
    except (asyncio.TimeoutError, TimeoutError):
        raise ApiError(
            408, f"the body did not arrive within {limits.body_seconds:g} s", code="body_timeout"
        ) from None
    except ClientDisconnect:
        raise bad_request("the connection ended before the whole body was sent") from None
    return b"".join(chunks)


def parse_json(body: bytes, limits: Limits) -> dict[str, Any]:
    """Parse a body into a JSON object; ApiError 400 for all else, NaN, lone surrogates and deep nesting."""
    if not body:
        raise bad_request("the body is empty; a JSON object is expected")
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object", code="invalid_json")
    if exceeds_depth(value, limits.nesting):
        raise bad_request(f"the body is nested deeper than {limits.nesting} levels", code="nesting_too_deep")
    return value


def exceeds_depth(value: Any, limit: int) -> bool:
    """True when lists and objects in `value` nest more than `limit` levels; level by level, no recursion."""
    level = [value] if isinstance(value, (dict, list)) else []
    depth = 0
    while level:
        depth += 1
        if depth > limit:
            return True
        below: list[Any] = []
        for item in level:
            children = item.values() if isinstance(item, dict) else item
            below.extend(child for child in children if isinstance(child, (dict, list)))
        level = below
    return False


def check_count(items: Sequence[Any], most: int, param: str) -> None:
    """Raise ApiError 400 when a list of the request is longer than allowed."""
    if len(items) > most:
        raise bad_request(f"{len(items)} entries, at most {most} are allowed", param, "too_many_entries")


def check_stops(stops: Sequence[str], limits: Limits, param: str = "stop") -> tuple[str, ...]:
    """Validate stop strings: their number, their length, and that none is empty."""
    check_count(stops, limits.stops, param)
    for i, stop in enumerate(stops):
        if not stop:
            raise bad_request("a stop string must not be empty", f"{param}[{i}]")
        if len(stop) > limits.stop_chars:
            raise bad_request(
                f"a stop string may have at most {limits.stop_chars} characters", f"{param}[{i}]"
            )
    return tuple(stops)
