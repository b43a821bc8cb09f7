"""OpenAI's /v1/completions: validation into a CompletionRequest, events into `text_completion` objects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field
from sse_starlette import ServerSentEvent

from ..session.events import TextDelta
from ..session.logprobs import completion_logprobs
from ..session.requests import CompletionRequest
from .dialect import ApiCall, Settings, speculation
from .errors import bad_request
from .limits import check_stops
from .openai_chat import StreamOptions
from .openai_encoder import OpenAIEncoder
from .schema import Count, Options, Positive, ResponseFormat, SamplingFields, gbnf, parse, unsupported

Token = Annotated[int, Field(ge=0)]


class CompletionBody(SamplingFields):
    """The request."""

    model: str | None = None
    prompt: str | list[str] | list[Token] | list[list[Token]]
    suffix: str | None = None
    max_tokens: Positive | None = None
    n: int | None = None
    best_of: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    logprobs: Annotated[Count, Field(le=20)] | None = None
    user: str | None = None  # a label of the caller's own
    grammar: str | None = None
    response_format: ResponseFormat | None = None
    return_progress: bool | None = None
    dflash: Options | None = None


def read_call(data: dict[str, Any], settings: Settings) -> ApiCall:
    """Validate a request body; raises ApiError naming the field."""
    body = parse(CompletionBody, data)
    model = settings.model(body.model)
    for name in ("n", "best_of"):
        if getattr(body, name) not in (None, 1):
            raise unsupported(name, "only one choice per request is supported")
    if body.response_format is not None and body.response_format.type != "text":
        raise unsupported("response_format", "only for chat completions; use grammar here")
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options: only allowed with stream", "stream_options")
    prompt = _one_prompt(body.prompt)
    if body.echo and (body.logprobs is not None or not isinstance(prompt, str)):
        raise unsupported("echo", "only for a text prompt without logprobs")
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or ()
    request = CompletionRequest(
        prompt=prompt,
        suffix=body.suffix or None,
        grammar=gbnf(body.grammar),
        sampling=body.sampling(settings.sampling),
        # OpenAI's own default; chat requests have none
        max_tokens=body.max_tokens or settings.max_tokens or 16,
        stop=check_stops(stops, settings.limits),
        logprobs=body.logprobs,
        return_steps=bool(body.dflash and body.dflash.return_steps),
        **speculation(body.dflash),
    )
    options = body.stream_options
    encoder = CompletionEncoder(
        model,
        echo=str(prompt) if body.echo else "",
        include_usage=bool(options and options.include_usage),
        progress=bool(body.return_progress),
        logprobs=body.logprobs is not None,
    )
    return ApiCall(request, encoder, bool(body.stream))


def _one_prompt(prompt: str | list[Any]) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    if prompt and isinstance(prompt[0], int):
        return prompt
    if len(prompt) != 1:
        raise unsupported("prompt", f"one prompt per request is supported, not {len(prompt)}")
    return prompt[0]


class CompletionEncoder(OpenAIEncoder):
    """Renders `text_completion` bodies and streams. echo: text to put before the answer's."""

    id_prefix = "cmpl-"
    names = ("text_completion", "text_completion")
    _started = False

    def __init__(self, model: str, *, echo: str, **options: bool) -> None:
        super().__init__(model, **options)
        self._echo = echo

    def _choice(self, content: Any, reason: str | None, logprobs: Any) -> dict[str, Any]:
        return {"text": content or "", "index": 0, "logprobs": logprobs, "finish_reason": reason}

    def feed(self, event: Any) -> Iterator[ServerSentEvent]:
        self.answer.feed(event)
        if not self._started:
            self._started = True
            if self._echo:
                yield self._chunk(self._echo)
        if isinstance(event, TextDelta):
            yield self._chunk(event.text, logprobs=completion_logprobs(event.logprobs or ()))
        else:
            yield from self._rest(event)

    def body(self) -> dict[str, Any]:
        answer = self.answer
        logprobs = completion_logprobs(answer.logprobs, asked=self._logprobs)
        return self._body(text=self._echo + answer.text, logprobs=logprobs)
