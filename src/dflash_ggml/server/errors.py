"""One error type for all endpoints, rendered in the format that each API's official client parses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError, ContextOverflowError, DeviceError, DflashError

_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_supported_error",
    503: "service_unavailable",
}
_ANTHROPIC_TYPES = {**_OPENAI_TYPES, 500: "api_error", 503: "overloaded_error"}


@dataclass(slots=True)
class ApiError(Exception):
    """A failure with an HTTP status.

    Attributes:
        param: The field at fault (JSON path).
        code: OpenAI's error code.
        extra: Further members of OpenAI's error object.
        anthropic: The message for Anthropic's clients, if it differs.
        retry_after: Seconds, for a Retry-After header.
        retry: Whether repeating the same request can succeed; the official clients repeat 408/409/429/5xx on their own
            unless a header forbids it.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None
    retry: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    anthropic: str | None = None

    def __str__(self) -> str:
        return self.message

    def named(self) -> str:
        """The message with the field at fault in front, for bodies without a field for it."""
        if not self.param or self.message.startswith(self.param):
            return self.message
        return f"{self.param}: {self.message}"

    def headers(self) -> dict[str, str]:
        """Response headers for the clients' retry logic."""
        headers = {"x-should-retry": "true" if self.retry else "false"}
        if self.retry_after is not None:
            headers["retry-after"] = str(self.retry_after)
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def shutting_down() -> ApiError:
    """The error of requests that arrive after SIGTERM."""
    return ApiError(503, "the server is shutting down", code="shutting_down", retry_after=5, retry=True)


def openai_body(error: ApiError) -> dict[str, Any]:
    """The OpenAI error object: {"error": {message, type, param, code}}."""
    kind = _OPENAI_TYPES.get(error.status, "invalid_request_error")
    body = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return {"error": body | error.extra}


def anthropic_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """The Anthropic error object: {"type": "error", "error": {type, message}, "request_id"}."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error")
    message = error.anthropic or error.named()
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def is_anthropic(path: str) -> bool:
    """Whether the path is Anthropic's."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def is_ollama(path: str) -> bool:
    """Whether the path is Ollama's, whose clients expect {"error": message}."""
    return path.startswith("/api/")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request itself is wrong."""
    return ApiError(400, message, param, code)


def context_overflow(message: str, n_prompt: int | None = None, n_ctx: int | None = None) -> ApiError:
    """400 for a prompt that does not fit, with the texts and fields by which clients recognise that they must shorten it.

    llama.cpp's clients check the type and the two numbers, OpenAI's the code, Anthropic's the message.
    """
    extra: dict[str, Any] = {"type": "exceed_context_size_error"}
    known = n_prompt is not None and n_ctx is not None
    if known:
        extra |= {"n_prompt_tokens": n_prompt, "n_ctx": n_ctx}
        message = f"{message}: the maximum context length is {n_ctx} tokens"
    return ApiError(
        400,
        message,
        code="context_length_exceeded",
        extra=extra,
        anthropic=f"prompt is too long: {n_prompt} tokens > {n_ctx} maximum" if known else None,
    )


class EngineLost(DflashError):
    """The engine process has ended, as described in the message."""


def from_exception(error: BaseException) -> ApiError:
    """An exception of the engine side as an ApiError; unexpected ones become a plain 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextOverflowError):
        return context_overflow(str(error), error.n_prompt, error.n_ctx)
    if isinstance(error, ConfigError):
        # these messages begin with the field at fault, "messages[2].role: ..."
        field, colon, _ = str(error).partition(":")
        return ApiError(400, str(error), field if colon and " " not in field else None, "invalid_value")
    if isinstance(error, EngineLost):
        # the request may have crashed the engine: clients should not retry automatically
        text = f"{error} while it had this request; it is started again"
        return ApiError(500, text, code="engine_lost")
    if isinstance(error, DeviceError):
        return ApiError(500, str(error), code="device_error")
    if isinstance(error, DflashError):
        return ApiError(500, str(error), code="engine_error")
    return ApiError(
        500,
        f"internal error: {type(error).__name__} (the server's log has the details)",
        code="internal_error",
    )
