"""Base of the encoders that render several answers to several prompts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from ..session.answer import Answer
from ..session.events import Progress
from ..session.prompts import Prepared
from .dialect import data_event
from .errors import ApiError, openai_body


@dataclass
class AnswersEncoder:
    """Base encoder: receives answers one after another, prompt by prompt.

    Attributes:
        model: the name to report.
        progress: whether a stream reports prefilling.
        prompts: how many there are.
        n: answers to each prompt.
    """

    model: str
    _: KW_ONLY
    progress: bool
    prompts: int = 1
    n: int = 1

    def __post_init__(self) -> None:
        self.answers = [Answer() for _ in range(self.prompts * self.n)]
        self._at = 0  # the current answer
        self._prompts = [""] * self.prompts
        self._clock = time.monotonic()

    def prepared(self, prompts: Sequence[Prepared]) -> None:
        """Take the texts of the prompts."""
        self._prompts = [prompt.text for prompt in prompts]

    @property
    def answer(self) -> Answer:
        """The current answer; at the end the last one."""
        return self.answers[self._at]

    def error(self, error: ApiError) -> Iterator[bytes]:
        """A failure in mid-stream."""
        yield data_event(openai_body(error))

    def _prefilling(self, event: Any) -> dict[str, Any] | None:
        """Prefill progress for a chunk; None for other events, or if not requested."""
        if not (isinstance(event, Progress) and self.progress and event.stage == "prefill"):
            return None
        cached = self.answer.begin.cached_n if self.answer.begin else 0
        spent = int(1000 * (time.monotonic() - self._clock))
        counts = {"total": event.total, "cache": cached, "processed": event.done, "time_ms": spent}
        return {"prompt_progress": counts}
