"""OpenAI's /v1/completions: validation into a CompletionRequest, events into `text_completion` objects."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any

from pydantic import Field
from sse_starlette import ServerSentEvent

from ..session.events import Finish, Progress, StepReport, TextDelta
from ..session.logprobs import completion_logprobs
from ..session.openai_parts import timings_dict, usage_dict
from ..session.requests import CompletionRequest
from .answer import Answer
from .dialect import ApiCall, Settings, data_event, new_id, openai_error, speculation
from .errors import ApiError, bad_request
from .limits import check_stops
from .openai_chat import StreamOptions
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


class CompletionEncoder:
    """Renders `text_completion` bodies and streams."""

    def __init__(self, model: str, *, echo: str, include_usage: bool, progress: bool) -> None:
        self.answer = Answer()
        self._head = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._echo = echo
        self._include_usage = include_usage
        self._progress = progress
        self._started = False
        self._clock = time.monotonic()

    def _chunk(self, text: str, reason: str | None = None, **extra: Any) -> ServerSentEvent:
        choice = {"text": text, "index": 0, "logprobs": extra.pop("logprobs", None), "finish_reason": reason}
        return data_event({**self._head, "choices": [choice], **extra})

    def feed(self, event: Any) -> Iterator[ServerSentEvent]:
        self.answer.feed(event)
        if not self._started:
            self._started = True
            if self._echo:
                yield self._chunk(self._echo)
        if isinstance(event, TextDelta):
            yield self._chunk(event.text, logprobs=completion_logprobs(event.logprobs or ()))
        elif isinstance(event, Progress) and self._progress and event.stage == "prefill":
            cached = self.answer.begin.cached_n if self.answer.begin else 0
            spent = int(1000 * (time.monotonic() - self._clock))
            progress = {"total": event.total, "cache": cached, "processed": event.done, "time_ms": spent}
            yield self._chunk("", prompt_progress=progress)
        elif isinstance(event, StepReport):
            yield self._chunk("", dflash={"step": asdict(event)})
        elif isinstance(event, Finish):
            usage, finish = self.answer.done()
            yield self._chunk("", finish.reason, timings=timings_dict(usage))
            if self._include_usage:
                yield data_event({**self._head, "choices": [], "usage": usage_dict(usage)})
            yield ServerSentEvent("[DONE]", sep="\n")

    def error(self, error: ApiError) -> Iterator[ServerSentEvent]:
        return openai_error(error)

    def body(self) -> dict[str, Any]:
        answer = self.answer
        usage, finish = answer.done()
        logprobs = completion_logprobs(answer.logprobs)
        text = self._echo + answer.text
        choice = {"text": text, "index": 0, "logprobs": logprobs, "finish_reason": finish.reason}
        body: dict[str, Any] = {**self._head, "choices": [choice]}
        body |= {"usage": usage_dict(usage), "timings": timings_dict(usage)}
        if answer.steps:
            body["dflash"] = {"steps": [asdict(s) for s in answer.steps]}
        return body
