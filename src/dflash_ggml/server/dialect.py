"""Common parts of all API dialects: settings, API calls, encoders."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, get_args

from sse_starlette import ServerSentEvent

from ..decode.sampling import SamplingParams
from ..session.prompts import Prepared
from ..session.requests import ChatRequest, CompletionRequest, NamedTool, ToolChoice
from ..session.thinking import Effort
from .errors import ApiError
from .limits import Limits
from .notes import Notes
from .schema import Body, Speculation, parse

B = TypeVar("B", bound=Body)

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Settings:
    """One server's settings. `names` are the model's names, the first one is reported.

    Attributes:
        strict: Refuse every unsupported field, instead of naming it in a header.
        strict_model: Refuse other model names.
    """

    names: tuple[str, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    limits: Limits = field(default_factory=Limits)
    created: int = field(default_factory=lambda: int(time.time()))
    strict: bool = False
    strict_model: bool = False

    def model(self, asked: str | None) -> str:
        """The name to report: the requested one if it is ours, else the first. ApiError 404 under strict_model."""
        if asked in self.names or self.strict_model:
            return self.known(asked)
        return self.names[0]

    def known(self, asked: str | None) -> str:
        """As `model`, with ApiError 404 for any other name."""
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            known = ", ".join(repr(n) for n in self.names)
            raise ApiError(
                404, f"there is no model {asked!r:.200} here; available: {known}", "model", "model_not_found"
            )
        return asked


class Encoder(Protocol):
    """Renders one answer, as a stream of events or as one body."""

    def feed(self, event: Any) -> Iterator[bytes]:
        """The client's representation of one event."""
        ...

    def error(self, error: ApiError) -> Iterator[bytes]:
        """A failure in mid-stream."""
        ...

    def body(self) -> Any:
        """The whole answer, for a request without stream."""
        ...


@dataclass(frozen=True, slots=True)
class ApiCall:
    """One parsed HTTP request: the session's request, and the encoder of the answer.

    Attributes:
        more: Further prompts.
        n: Answers to each. The encoder gets the events of all answers, one after another.
        lines: Whether a stream consists of JSON lines, not server-sent events.
    """

    request: ChatRequest | CompletionRequest
    encoder: Encoder
    stream: bool
    # unsupported or only partly supported fields; sent as a header
    notes: Notes = field(default_factory=Notes)
    more: tuple[CompletionRequest, ...] = ()
    n: int = 1
    lines: bool = False


def opened(kind: type[B], data: Any, settings: Settings) -> tuple[B, Notes]:
    """The validated body, and notes on unsupported fields.

    Raises:
        ApiError: A field is wrong; the error names it.
    """
    notes = Notes(settings.strict)
    return parse(kind, data, notes), notes


def note_selection(prompts: Sequence[Prepared], notes: Notes) -> None:
    """Note how much of each prompt is prefilled, if a part of it was requested."""
    for found in (prompt.selection for prompt in prompts):
        if found is not None and found.whole:
            notes.say(f"prompt_keep: the whole prompt is prefilled, {found.whole}")
        elif found is not None:
            about = "about " if found.choice else ""
            kept, sent = f"{about}{found.kept_n:,}", found.sent_n
            notes.say(f"prompt compressed: {kept} of {sent:,} tokens are prefilled (lossy, on request)")


def dumps(value: Any) -> str:
    """Compact JSON, non-ASCII kept; NaN is an error rather than invalid JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def new_id(prefix: str) -> str:
    """A fresh object id such as "chatcmpl-3f…"."""
    return prefix + secrets.token_hex(12)


def data_event(value: Any, event: str | None = None) -> bytes:
    """One server-sent event; its data is JSON, or plain text."""
    return ServerSentEvent(value if isinstance(value, str) else dumps(value), event=event, sep="\n").encode()


def speculation(options: Speculation | None) -> dict[str, Any]:
    """The request arguments set by our own options."""
    names = ("mode", "budget", "prompt_keep", "prompt_scorer")
    return {} if options is None else {name: getattr(options, name) for name in names}


def chat_tool(
    name: str, description: str | None, parameters: dict[str, Any], strict: bool | None
) -> dict[str, Any]:
    """A tool definition in the shape of chat completions.

    Args:
        strict: Whether the model's calls must match `parameters`.
    """
    function: dict[str, Any] = {"name": name, "parameters": parameters}
    if description is not None:
        function["description"] = description
    if strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def text_format(given: Mapping[str, Any] | None, choice: ToolChoice) -> Mapping[str, Any] | None:
    """A response format; None for forced calls, which have no text to constrain."""
    return None if choice == "required" or isinstance(choice, NamedTool) else given


def thinking(effort: str | None, param: str, notes: Notes) -> dict[str, Any]:
    """The arguments of a ChatRequest for a reasoning effort; a note for an unknown one."""
    if effort is None or effort == "none":
        return {} if effort is None else {"enable_thinking": False}
    known = effort in get_args(Effort)
    if not known and effort not in ("default", "auto"):
        notes.weaken(param, f"{effort:.20} is not a known effort; thinking has no budget")
    return {"enable_thinking": True, "reasoning_effort": effort if known else None}
