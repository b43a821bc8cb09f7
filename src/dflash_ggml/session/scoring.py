"""Scoring of a prompt by a model, in chunks between decode steps, to select the part to prefill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import ContextOverflowError
from ..text.prompt_selection import QUESTION, Choice, Range
from ..text.tokenizer import Tokenizer
from .events import Progress
from .generation import Generation
from .prompts import Prepared, Prompts

if TYPE_CHECKING:
    from ..engine.engine import Engine


@dataclass(frozen=True, slots=True)
class ScoredText:
    """Input of a scorer: all tokens up to the question's end; if units follow the question, up to the last unit, then the
    question again.

    Attributes:
        ids: In the scorer's vocabulary.
        window: The last tokens: the question.
        units: The range of each unit in ids.
    """

    ids: list[int]
    window: int
    units: list[Range]

    @classmethod
    def of(
        cls, ids: Sequence[int], choice: Choice, target: Tokenizer, scorer: Tokenizer | None
    ) -> ScoredText:
        """The tokens of a prompt, in the scorer's vocabulary: tokenised unit by unit, so that no token spans two units."""
        a, b = choice.question
        end = choice.units[-1][1]
        end = max(a, end)
        if scorer is None:
            return cls([*ids[:end], *ids[a:b]], b - a, list(choice.units))

        def encoded(part: Range) -> list[int]:
            # a unit may end within a character
            spelt = b"".join(target.pieces(ids[slice(*part)])).decode("utf-8", "ignore")
            return scorer.encode(spelt)

        found: list[int] = []
        units: list[Range] = []
        at = 0
        for unit in choice.units:
            found += encoded((at, unit[0]))
            start = len(found)
            found += encoded(unit)
            units.append((start, len(found)))
            at = unit[1]
        asked = encoded((a, b))[-QUESTION:]
        return cls([*found, *encoded((at, end)), *asked], len(asked), units)

    def scores(self, masses: NDArray[np.float32]) -> NDArray[np.float32]:
        """The mean mass of each unit's tokens, 0 for one that has none."""
        total = np.concatenate([[0.0], np.cumsum(masses, dtype=np.float64)])
        a, b = np.array(self.units).T
        return ((total[b] - total[a]) / np.maximum(b - a, 1)).astype(np.float32)


class Scoring(Generation):
    """Selection of a prompt's part by a scorer model: a generation without slot and sequence; the result is in `prepared`.

    Attributes:
        remaining: Tokens left to score. The scorer holds one prompt at a time.

    Raises:
        ContextOverflowError: The prompt exceeds the scorer's limit.
    """

    is_scoring = True

    def __init__(
        self, engine: Engine, prompts: Prompts, prepared: Prepared, should_stop: Callable[[], bool] | None
    ) -> None:
        assert engine.scorer is not None and prepared.choice is not None
        self._engine, self._scorer, self._prompts, self.prepared = engine, engine.scorer, prompts, prepared
        tokenizer = self._scorer.tokenizer
        self._text = ScoredText.of(prepared.ids, prepared.choice, engine.tokenizer, tokenizer)
        n, limit = len(self._text.ids), self._scorer.limit
        if n > limit:
            raise ContextOverflowError(
                f"Requested tokens ({n}) exceed the prompt scorer's limit of {limit} (prompt_scorer: lexical has no limit)",
                n,
                limit,
            )
        super().__init__(self._text.ids, {"max_tokens": 0}, should_stop=should_stop)
        self._has_begun, self._total, self._ms = False, n, 0.0

    @property
    def is_prefilling(self) -> bool:
        """Whether scoring has begun."""
        return self._has_begun and not self.ended

    def start(self) -> None:
        """Begin scoring; nothing remains if another request made the same selection meanwhile."""
        self._has_begun = True
        self.lap()
        if (settled := self._prompts.settled(self.prepared)) is not None:
            self.prepared, self.remaining = settled, 0
            return
        with self._engine.held():
            known = self._scorer.begin(self._text.ids, self._text.window)
        self.remaining = self._total = len(self._text.ids) - known

    def advance(self, most: int | None) -> None:
        """Score a chunk of at most so many tokens; after the last one the selection is made."""
        with self._engine.held():
            self.remaining = self._scorer.advance(most)
            masses = None if self.remaining else self._scorer.masses()
        self._ms += self.lap()
        self.events.append(Progress("score", self._total - self.remaining, self._total))
        if masses is not None:
            self.prepared = self._prompts.chosen(self.prepared, self._text.scores(masses), self._ms)

    def finish(self, cancelled: bool = False) -> None:
        """Make the selection without scores if there is none yet, so that the request can end."""
        if self.prepared.choice is not None:  # the request ends anyway, so the selection need not be good
            self.prepared = self._prompts.chosen(self.prepared, None, self._ms)
