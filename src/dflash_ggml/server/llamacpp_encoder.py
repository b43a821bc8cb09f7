"""Encoders of answers to llama.cpp's /completion and /infill."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..decode.sampling_params import OPTIONS, SamplingParams
from ..session.events import Finish, TextDelta, TokenLogprob
from ..session.logprobs import chat_logprob
from ..session.openai_parts import timings_dict
from ..session.requests import CompletionRequest
from .answers import AnswersEncoder
from .dialect import data_event


@dataclass(kw_only=True)
class LlamaEncoder(AnswersEncoder):
    """Encoder of several answers, one after another, prompt by prompt.

    Attributes:
        request: The first request, whose options all share.
        tokens: Include token ids.
        timings: Include timings in every chunk.
        fields: Paths of the fields to return, empty for all.
    """

    request: CompletionRequest
    stream: bool
    tokens: bool
    timings: bool
    fields: Sequence[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._first: float | None = None  # time of the answer's first text

    def feed(self, event: Any) -> Iterator[bytes]:
        """The client's representation of one event; the event is added to `answer` first."""
        self.answer.feed(event)
        if (prefilling := self._prefilling(event)) is not None:
            yield self._chunk("", (), **prefilling)
        elif isinstance(event, TextDelta):
            self._first = self._first or time.monotonic()
            yield self._chunk(event.text, event.logprobs or ())
        elif isinstance(event, Finish):
            if self.stream:
                yield data_event({**self._whole(self._at), "content": "", "tokens": []})
            if self._at + 1 < len(self.answers):
                self._at, self._first, self._clock = self._at + 1, None, time.monotonic()

    def body(self) -> Any:
        """The whole answer, a list if there are several."""
        whole = [self._shown(self._whole(i)) for i in range(len(self.answers))]
        return whole[0] if len(whole) == 1 else whole

    def _chunk(self, text: str, entries: Sequence[TokenLogprob], **extra: Any) -> bytes:
        begin = self.answer.begin
        n = len(self.answer.logprobs)
        chunk = {
            "index": self._at,
            "content": text,
            "tokens": [entry.token for entry in entries],
            "stop": False,
            "id_slot": 0,
            "tokens_predicted": n,
            "tokens_evaluated": begin.prompt_n if begin else 0,
            **extra,
        }
        if self.request.logprobs and entries:
            chunk["completion_probabilities"] = [_probability(entry) for entry in entries]
        if self.timings and begin is not None and self._first is not None:
            predicted = 1000 * (time.monotonic() - self._first)
            chunk["timings"] = {
                "cache_n": begin.cached_n,
                "prompt_n": begin.prompt_n - begin.cached_n,
                "prompt_ms": round(1000 * (self._first - self._clock), 3),
                "predicted_n": n,
                "predicted_ms": round(predicted, 3),
                "predicted_per_second": round(1000 * n / predicted, 2) if predicted > 0 else 0.0,
            }
        return data_event(chunk)

    def _whole(self, i: int) -> dict[str, Any]:
        answer = self.answers[i]
        usage, finish = answer.done()
        word = finish.stop_string
        kind = "word" if word is not None else {"length": "limit", "stop": "eos"}.get(finish.reason, "none")
        whole = {
            "index": i,
            "content": answer.text,
            "tokens": [entry.token for entry in answer.logprobs] if self.tokens else [],
            "id_slot": 0,
            "stop": True,
            "model": self.model,
            "tokens_predicted": usage.predicted_n,
            "tokens_evaluated": usage.prompt_n,
            "generation_settings": self._settings(),
            "prompt": self._prompts[i // self.n],
            "has_new_line": "\n" in answer.text,
            "truncated": False,
            "stop_type": kind,
            "stopping_word": word or "",
            "tokens_cached": usage.prompt_n + usage.predicted_n,
            "timings": timings_dict(usage),
        }
        if self.request.logprobs and not self.stream:
            whole["completion_probabilities"] = [_probability(entry) for entry in answer.logprobs]
        return whole

    def _settings(self) -> dict[str, Any]:
        request = self.request
        return {
            **sampling_settings(request.sampling, request.max_tokens),
            "n_probs": request.logprobs or 0,
            "stop": list(request.stop),
            "stream": self.stream,
            "grammar": request.grammar.text if request.grammar is not None else "",
        }

    def _shown(self, whole: dict[str, Any]) -> dict[str, Any]:
        """The requested fields; "a/b" is field b of a."""
        if not self.fields:
            return whole
        shown: dict[str, Any] = {}
        for path in self.fields:
            value: Any = whole
            for key in path.split("/"):
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None:
                shown[path] = value
        return shown


def sampling_settings(sampling: SamplingParams, max_tokens: int | None) -> dict[str, Any]:
    """The sampler's options and the limit of an answer in tokens, by llama.cpp's names too."""
    own = {name: getattr(sampling, name) for name in OPTIONS if name != "logit_bias"}
    limit = -1 if max_tokens is None else max_tokens
    named = {"repeat_last_n": sampling.penalty_last_n, "mirostat": sampling.mirostat_mode}
    return {**own, **named, "n_predict": limit, "max_tokens": limit}


def _probability(entry: TokenLogprob) -> dict[str, Any]:
    """A chat's entry, with the tokens' ids."""
    plain = chat_logprob(entry)
    top = [{"id": t.token, **shown} for t, shown in zip(entry.top, plain["top_logprobs"])]
    return {"id": entry.token, **plain, "top_logprobs": top}
