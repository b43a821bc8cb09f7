"""Embeddings over HTTP: inputs to tokens, a job per vector, and the response shapes."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator

from ..errors import ConfigError, ContextOverflowError
from ..session.embedding import normalised
from .dialect import Settings, opened
from .errors import bad_request, from_exception
from .ignored_fields import QUIET_LABELS
from .limits import check_count
from .notes import Notes
from .openai_completions import prompt_list
from .runner import Runner
from .schema import Body, Positive, Texts, whole
from .series import Work

MAX_INPUTS = 2048
INPUTS_AT_ONCE = 16  # inputs of one request per job, so that other clients are not delayed

Vectors = list[NDArray[np.float32]]
# (vectors, tokens of all inputs) -> the answer's body
Render = Callable[[Vectors, int], Any]


class EmbeddingBody(Body):
    """The request to /v1/embeddings."""

    quiet = QUIET_LABELS
    model: str | None = None
    input: Texts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None


class LlamaBody(Body):
    """The request to llama.cpp's /embedding.

    Attributes:
        embd_normalize: 2 for length 1, -1 for unnormalised vectors.
    """

    quiet = QUIET_LABELS
    content: Texts | None = None
    input: Texts | None = None
    embd_normalize: Annotated[Literal[-1, 2], BeforeValidator(whole)] | None = None


class EmbeddingEncoder:
    """Collects the vectors of a request, cut to `size` numbers and normalised again. `render` makes the body."""

    def __init__(self, render: Render, size: int | None = None) -> None:
        self._render = render
        self._size = size
        self._vectors: Vectors = []
        self.n_tokens = 0

    def feed(self, event: Any) -> Iterator[Any]:
        """Take the next vector; nothing is streamed."""
        short = self._size is not None and self._size < len(event)
        self._vectors.append(normalised(event[: self._size]) if short else event)
        yield from ()

    def body(self) -> Any:
        """The whole answer."""
        return self._render(self._vectors, self.n_tokens)


@dataclass(frozen=True, slots=True)
class EmbeddingCall:
    """A request understood.

    Attributes:
        inputs: Each after its path in the request.
        truncate: Cut inputs that are too long, instead of refusing them.
    """

    inputs: tuple[tuple[str, Any], ...]
    encoder: EmbeddingEncoder
    notes: Notes = field(default_factory=Notes)
    truncate: bool = False
    normalise: bool = True


def read_call(data: dict[str, Any], settings: Settings, n_embd: int) -> EmbeddingCall:
    """Validate a request to /v1/embeddings.

    Raises:
        ApiError: A field is wrong; it names it.
    """
    body, notes = opened(EmbeddingBody, data, settings)
    model = settings.model(body.model)
    if body.dimensions is not None and body.dimensions > n_embd:
        message = f"dimensions: {body.dimensions} is above the model's {n_embd}"
        raise bad_request(message, "dimensions", "invalid_value")

    def render(vectors: Vectors, n_tokens: int) -> dict[str, Any]:
        data = [
            {"object": "embedding", "index": i, "embedding": _encoded(v, body.encoding_format)}
            for i, v in enumerate(vectors)
        ]
        usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
        return {"object": "list", "data": data, "model": model, "usage": usage}

    return EmbeddingCall(named(body.input, "input"), EmbeddingEncoder(render, body.dimensions), notes)


def read_llama_call(data: dict[str, Any], settings: Settings) -> EmbeddingCall:
    """Validate a request to /embedding.

    Raises:
        ApiError: A field is wrong; it names it.
    """
    body, notes = opened(LlamaBody, data, settings)
    name = "content" if body.input is None else "input"
    if (given := getattr(body, name)) is None:
        raise bad_request("content: this field is missing", "content", "missing_required_parameter")
    inputs = named(given, name)

    def render(vectors: Vectors, n_tokens: int) -> list[dict[str, Any]]:
        return [{"index": i, "embedding": [v.tolist()]} for i, v in enumerate(vectors)]

    return EmbeddingCall(inputs, EmbeddingEncoder(render), notes, normalise=body.embd_normalize != -1)


def named(given: str | Sequence[Any], param: str) -> tuple[tuple[str, Any], ...]:
    """The texts (or token lists) to embed, each with its path in the request.

    Raises:
        ApiError: There are too many.
    """
    inputs = prompt_list(given)
    check_count(inputs, MAX_INPUTS, param)
    if inputs[0] is given:
        return ((param, given),)
    return tuple((f"{param}[{i}]", text) for i, text in enumerate(inputs))


def _encoded(vector: NDArray[np.float32], form: str | None) -> str | list[float]:
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()


def tokens_of(runner: Runner, call: EmbeddingCall) -> list[tuple[int, ...]]:
    """The tokens of every input.

    Raises:
        ApiError: An input has none, or too many; it names it.
    """
    ids = []
    for where, text in call.inputs:
        try:
            ids.append(runner.text_tokens(text, truncate=call.truncate))
        except (ConfigError, ContextOverflowError) as error:
            failure = from_exception(error)
            message = f"{where}: {failure.message.removeprefix('prompt: ')}"
            raise replace(failure, message=message, param=where) from None
    call.encoder.n_tokens = sum(len(i) for i in ids)
    return ids


def works(ids: Sequence[Sequence[int]], normalise: bool) -> Iterator[Work]:
    """Jobs for the vectors of all inputs, several inputs each."""

    def of(some: Sequence[Sequence[int]]) -> Work:
        def run(runner: Runner, cancelled: Callable[[], bool]) -> Iterator[NDArray[np.float32]]:
            for tokens in some:
                vector = runner.embed(tokens, cancelled)
                yield normalised(vector) if normalise else vector
                if cancelled():
                    return

        return run

    return (of(ids[i : i + INPUTS_AT_ONCE]) for i in range(0, len(ids), INPUTS_AT_ONCE))
