"""What the four API dialects have in common: settings in, an API call with its encoder out."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sse_starlette import ServerSentEvent

from ..decode.sampling import SamplingParams
from ..session.answer import Answer
from ..session.requests import ChatRequest, CompletionRequest, NamedTool, ToolChoice
from .errors import ApiError, bad_request
from .limits import Limits
from .schema import Speculation

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Settings:
    """One server's settings. `names` are the model names it answers to, the first one is reported."""

    names: tuple[str, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    limits: Limits = field(default_factory=Limits)
    created: int = field(default_factory=lambda: int(time.time()))

    def model(self, asked: str | None) -> str:
        """The name to report; raises ApiError 404 when `asked` is none of ours."""
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            known = ", ".join(repr(n) for n in self.names)
            raise ApiError(
                404, f"there is no model {asked!r} here; available: {known}", "model", "model_not_found"
            )
        return asked


class Encoder(Protocol):
    """Renders one answer, as a stream of events or as one body."""

    answer: Answer

    def feed(self, event: Any) -> Iterator[ServerSentEvent]:
        """What the client sees of one event; the event is added to `answer` first."""
        ...

    def error(self, error: ApiError) -> Iterator[ServerSentEvent]:
        """A failure in mid-stream."""
        ...

    def body(self) -> dict[str, Any]:
        """The whole answer, for a request without stream."""
        ...


@dataclass(frozen=True, slots=True)
class ApiCall:
    """One HTTP request understood: what it asks of the session, and who renders the answer."""

    request: ChatRequest | CompletionRequest
    encoder: Encoder
    stream: bool
    notes: tuple[str, ...] = ()  # what was understood in a weaker sense than asked; sent as a header


def dumps(value: Any) -> str:
    """Compact JSON, non-ASCII kept; NaN is an error rather than invalid JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def new_id(prefix: str) -> str:
    """A fresh object id such as "chatcmpl-3f…"."""
    return prefix + secrets.token_hex(12)


def data_event(value: Any, event: str | None = None) -> ServerSentEvent:
    """One server-sent event with JSON data."""
    return ServerSentEvent(dumps(value), event=event, sep="\n")


def speculation(options: Speculation | None) -> dict[str, Any]:
    """The request arguments that our own options set."""
    return {} if options is None else {"mode": options.mode, "budget": options.budget}


def chat_tool(
    name: str, description: str | None, parameters: dict[str, Any], strict: bool | None
) -> dict[str, Any]:
    """A tool definition in the shape of chat completions; strict: the model's calls are held to `parameters`."""
    function: dict[str, Any] = {"name": name, "parameters": parameters}
    if description is not None:
        function["description"] = description
    if strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def tool_choice(word: str | None, named: str | None, names: Sequence[str], param: str) -> ToolChoice:
    """A request's choice among its tools; word: the dialect's own, named: the one tool, which wins.

    Raises ApiError naming `param` for a tool that is not there.
    """
    if named is not None:
        if named not in names:
            raise bad_request(f"{param}: {named!r} is not among the tools", param)
        return NamedTool(named)
    if word in ("required", "any"):
        if not names:
            raise bad_request(f"tool_choice: {word!r} without tools", "tool_choice")
        return "required"
    return "none" if word == "none" else "auto"


def merge_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the system messages that a conversation begins with: templates allow one, APIs send several."""
    head: list[str] = []
    for message in messages:
        if message["role"] not in ("system", "developer"):
            break
        head.append(message["content"])
    if len(head) < 2:
        return messages
    return [{"role": "system", "content": "\n\n".join(head)}, *messages[len(head) :]]


def thinking(effort: str | None, param: str) -> tuple[bool | None, tuple[str, ...]]:
    """Reasoning effort as a switch, and a note when a level was asked for: models here know on and off only."""
    if effort is None:
        return None, ()
    if effort == "none":
        return False, ()
    return True, (f"{param}={effort} turned thinking on; the model has no levels of it",)
