"""Common rendering of OpenAI's chat and text completions: heads, progress, steps, the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, ClassVar

from ..session.answer import Answer
from ..session.events import Finish, StepReport, Usage
from ..session.openai_parts import timings_dict, usage_dict, usage_timings
from .answers import AnswersEncoder
from .choices import total
from .dialect import data_event, new_id

FINGERPRINT = f"dflash-ggml-{metadata.version('dflash-ggml')}"


@dataclass(kw_only=True)
class OpenAIEncoder(AnswersEncoder):
    """Base of the encoders; `content` of a chunk is a delta, or a text.

    Attributes:
        id_prefix: Prefix of the objects' ids.
        names: `object` of a stream's chunks and of a body.
        logprobs: Whether they were requested.
    """

    id_prefix: ClassVar[str]
    names: ClassVar[tuple[str, str]]

    include_usage: bool
    logprobs: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._started = False  # whether the answer has ended
        head = {"id": new_id(self.id_prefix), "created": int(time.time()), "model": self.model}
        self._head = {**head, "system_fingerprint": FINGERPRINT}

    def _choice(self, content: Any, reason: str | None, logprobs: Any) -> dict[str, Any]:
        """One choice of a chunk; content None: empty."""
        raise NotImplementedError

    def _whole(self, answer: Answer) -> dict[str, Any]:
        """A choice of the body for an answer."""
        raise NotImplementedError

    def _chunk(
        self, content: Any = None, reason: str | None = None, logprobs: Any = None, **extra: Any
    ) -> bytes:
        choices = [self._choice(content, reason, logprobs) | {"index": self._at}]
        return data_event({**self._head, "object": self.names[0], "choices": choices, **extra})

    def _rest(self, event: Any) -> Iterator[bytes]:
        """Render events that both kinds have in common."""
        if (prefilling := self._prefilling(event)) is not None:
            yield self._chunk(**prefilling)
        elif isinstance(event, StepReport):
            yield self._chunk(dflash={"step": asdict(event)})
        elif isinstance(event, Finish):
            usage, finish = self.answer.done()
            yield self._chunk(reason=finish.reason, timings=timings_dict(usage))
            if self._at + 1 < len(self.answers):
                self._at, self._started = self._at + 1, False
                return
            if self.include_usage:
                head = {**self._head, "object": self.names[0]}
                yield data_event({**head, "choices": [], "usage": _usage_object(self._usage())})
            yield data_event("[DONE]")

    def _usage(self) -> Usage:
        return total([answer.done()[0] for answer in self.answers], self.n)

    def _chosen(self) -> list[Answer]:
        """The answers in the body, in order."""
        return self.answers

    def body(self) -> dict[str, Any]:
        """The whole object."""
        body: dict[str, Any] = {**self._head, "object": self.names[1]}
        body["choices"] = [
            {"index": i, **self._whole(answer), "finish_reason": answer.done()[1].reason}
            for i, answer in enumerate(self._chosen())
        ]
        usage = self._usage()
        body |= {"usage": _usage_object(usage), "timings": timings_dict(usage)}
        if steps := [step for answer in self.answers for step in answer.steps]:
            body["dflash"] = {"steps": [asdict(step) for step in steps]}
        return body


def _usage_object(usage: Usage) -> dict[str, Any]:
    return {**usage_dict(usage), "timings": usage_timings(usage)}
