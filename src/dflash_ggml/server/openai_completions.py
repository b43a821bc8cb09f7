"""OpenAI's /v1/completions: validation into CompletionRequests, events into `text_completion` objects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..session.answer import Answer
from ..session.events import PromptLogprobs, TextDelta
from ..session.logprobs import completion_logprobs
from ..session.requests import CompletionRequest
from ..text.grammar_spec import response_format_spec
from .choices import best, check_choices
from .dialect import ApiCall, Settings, opened, speculation
from .openai_chat import GeneratingBody
from .openai_encoder import OpenAIEncoder
from .schema import Alternatives, Texts, Whole


class CompletionBody(GeneratingBody):
    """The request."""

    prompt: Texts
    suffix: str | None = None
    best_of: Whole | None = None
    echo: bool | None = None
    logprobs: Alternatives | None = None


def read_call(data: dict[str, Any], settings: Settings) -> ApiCall:
    """Validate a request body.

    Raises:
        ApiError: A field is wrong; it names it.
    """
    body, notes = opened(CompletionBody, data, settings)
    model = settings.model(body.model)
    shown = body.shown(notes)
    prompts = prompt_list(body.prompt)
    n = check_choices(body.n, len(prompts))
    candidates = n
    if body.best_of is not None and body.best_of > n:
        candidates = check_choices(body.best_of, len(prompts), "best_of")
    if candidates > n and body.stream:
        candidates = n
        notes.ignore("best_of", "in a stream")
    # 16 is OpenAI's default
    limit = settings.max_tokens or 16 if body.max_tokens is None else body.max_tokens
    response_format, grammar = body.constraint()
    options: dict[str, Any] = {
        "suffix": body.suffix or None,
        "grammar": grammar or response_format_spec(response_format),
        "max_tokens": None if limit < 0 else limit,
        # candidates are ranked by their log-probabilities
        "logprobs": 0 if body.logprobs is None and candidates > n else body.logprobs,
        "prompt_logprobs": bool(body.echo) and body.logprobs is not None,
        "return_steps": bool(body.dflash and body.dflash.return_steps),
        **body.arguments(settings.sampling, settings.limits),
        **speculation(body.dflash),
    }
    first, *more = (CompletionRequest(prompt=prompt, **options) for prompt in prompts)
    encoder = CompletionEncoder(
        model,
        echo=bool(body.echo),
        best_of=candidates,
        logprobs=body.logprobs is not None,
        prompts=len(prompts),
        n=n,
        **shown,
    )
    return ApiCall(first, encoder, bool(body.stream), notes, tuple(more), candidates)


def prompt_list(prompt: str | Sequence[Any]) -> list[str | list[int]]:
    """The prompts of a request: a text, the tokens of one, or a list of both."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]  # type: ignore[list-item]
    return list(prompt)


@dataclass(kw_only=True)
class CompletionEncoder(OpenAIEncoder):
    """Renders `text_completion` bodies and streams.

    Attributes:
        echo: Put the prompt before each answer.
        best_of: Answers per prompt, of which the body has the n best.
    """

    id_prefix = "cmpl-"
    names = ("text_completion", "text_completion")

    echo: bool
    best_of: int = 1

    def __post_init__(self) -> None:
        self._shown, self.n = self.n, max(self.n, self.best_of)
        super().__post_init__()

    def _choice(self, content: Any, reason: str | None, logprobs: Any) -> dict[str, Any]:
        return {"text": content or "", "index": 0, "logprobs": logprobs, "finish_reason": reason}

    def feed(self, event: Any) -> Iterator[bytes]:
        """What the client sees of one event."""
        answer = self.answer
        answer.feed(event)
        # with log-probabilities the prompt is sent when they are known
        if self.echo and not self._started and (not self.logprobs or isinstance(event, PromptLogprobs)):
            self._started = True
            logprobs = completion_logprobs(answer.prompt)
            yield self._chunk(self._prompts[self._at // self.n], logprobs=logprobs)
        if isinstance(event, TextDelta):
            yield self._chunk(event.text, logprobs=completion_logprobs(event.logprobs or ()))
        else:
            yield from self._rest(event)

    def _chosen(self) -> list[Answer]:
        groups = (self.answers[i : i + self.n] for i in range(0, len(self.answers), self.n))
        return [a for group in groups for a in (best(group, self._shown) if self._shown < self.n else group)]

    def _whole(self, answer: Answer) -> dict[str, Any]:
        at = next(i for i, other in enumerate(self.answers) if other is answer)
        text = self._prompts[at // self.n] + answer.text if self.echo else answer.text
        entries = [*answer.prompt, *answer.logprobs] if self.logprobs else []
        return {"text": text, "logprobs": completion_logprobs(entries, asked=self.logprobs)}
