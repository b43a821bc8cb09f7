"""Messages between the server and its engine process: calls, answered by items and a result or failure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Union, get_args

from msgspec import Struct

from .. import errors
from ..session.events import Event
from ..session.prompts import Prepared
from ..session.requests import ChatRequest, CompletionRequest
from ..text.chat_parser import ReasoningMode
from ..text.prompt_selection import Selection
from ..text.tokenizer import TooManyTokens
from .errors import ApiError, EngineLost
from .pipe import convert

_NAMED: dict[str, Any] = {kind.__name__: kind for kind in (*get_args(Event), ChatRequest, CompletionRequest)}
_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (*vars(errors).values(), EngineLost, TooManyTokens)
    if isinstance(kind, type)
}

# a `Prepared` without its request, which the server has
Prompt = tuple[str, tuple[int, ...], tuple[int, ...], int, ReasoningMode, Selection | None]


def prompt_of(prepared: Prepared) -> Prompt:
    """The arguments of `Prepared` after the request."""
    p = prepared
    return p.text, p.ids, p.boundaries, p.first_answer, p.reasoning, p.selection


class Named(Struct, array_like=True):
    """A request or event with its type's name, since msgspec does not distinguish dataclasses in a union."""

    kind: str
    data: Any

    @classmethod
    def of(cls, value: Any) -> Named:
        """Wrap a request or event for sending."""
        return cls(type(value).__name__, value)

    def value(self) -> Any:
        """The wrapped request or event.

        Raises:
            ValueError: Fields do not match.
            KeyError: The type is unknown.
        """
        return convert(self.data, _NAMED[self.kind])


# methods of a Runner or its tokenizer with the types of their results; `events` and `embed` are jobs
RESULTS: dict[str, Any] = {
    "prepare": Prompt,
    "count": int,
    "render": str,
    "text_tokens": tuple[int, ...],
    "load": dict[str, float],
    "id_of": int | None,
    "encode": list[int],
    "pieces": list[bytes],
    "decode_bytes": bytes,
}


class Call(Struct, tag=True):
    """A call of a method of the Runner or its tokenizer; the first call is `open`, with the class and fields of an opener."""

    id: int
    method: str
    args: Sequence[Any]
    options: dict[str, Any] = {}


class Cancel(Struct, tag=True):
    """Cancel a call: end it at its next step."""

    id: int


class Close(Struct, tag=True):
    """End after the running calls."""


Order = Union[Call, Cancel, Close]


class Item(Struct, tag=True):
    """One of several results: an event, or a stage of loading."""

    id: int
    value: Any


class Result(Struct, tag=True):
    """The last result of a successful call."""

    id: int
    value: Any


class Failed(Struct, tag=True):
    """A call's exception: its kind, its message, and the numbers that handlers need."""

    id: int
    kind: str
    message: str
    numbers: dict[str, int | None]

    @classmethod
    def of(cls, id: int, error: BaseException) -> Failed:
        """The message for an exception: the nearest kind that both sides know."""
        names = [kind.__name__ for kind in type(error).__mro__]
        kind = next((name for name in names if name in _ERRORS), names[0])
        numbers = {name: value for name, value in vars(error).items() if isinstance(value, int | None)}
        return cls(id, kind, str(error), numbers)

    @property
    def is_expected(self) -> bool:
        """Whether it is one of the package's own errors."""
        return self.kind in _ERRORS

    def error(self) -> Exception:
        """The exception; an unexpected one is a 500 that names its kind only."""
        if not self.is_expected:
            message = f"internal error: {self.kind} (the server's log has the details)"
            return ApiError(500, message, code="internal_error")
        kind = _ERRORS[self.kind]
        error = kind.__new__(kind, self.message)
        vars(error).update(self.numbers)
        return error


Answer = Union[Item, Result, Failed]


class About(Struct):
    """The result of `open`; see Runner for the fields."""

    info: dict[str, Any]
    metadata: dict[str, Any]
    vocabulary: dict[str, Any]
    skills: list[str]
    n_ctx: int
    parallel: int
    n_vocab: int
    bos_ids: list[int]
