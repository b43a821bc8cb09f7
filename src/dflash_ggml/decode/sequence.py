"""A sequence under decoding, as plain data: everything that belongs to it and to no device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..config import Mode
from ..errors import ConfigError
from .sampling import Sampler

Finish = Literal["stop", "length", "cancelled"]


@dataclass(slots=True)
class Statistics:
    """Sums over the steps of a sequence since it was last empty. A pass is one run of the target in decoding."""

    passes: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0

    def took(self, tokens: tuple[int, ...], drafted: int, accepted: int) -> None:
        """Count a step."""
        self.passes += 1
        self.emitted += len(tokens)
        self.drafted += drafted
        self.accepted += accepted

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per target pass, the target's own included; 0.0 before the first."""
        return self.emitted / self.passes if self.passes else 0.0


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence: its tokens, the generation that goes on with them, and where the device keeps its state.

    A position counts tokens of the sequence and decides rotation; a cache row is where keys and values lie: the token at
    position p has row first_row + p.

    Attributes:
        tokens: Committed ids.
        pending: Emitted, not yet through the target.
        history: What the sampler has seen, emitted tokens included.
        logits: The target's logits after the last committed token, float32 [n_vocab], where a prefill left them.
        sampler: Chooses tokens from logits.
        mode, budget, chain_seed: How it is decoded; budget: the most drafted nodes of a step.
        limit: Tokens that may still be emitted.
        ends: Whether a token ends the generation; may add to `forced`.
        forced: Tokens that come next, whatever the logits say.
        lookup: Prompt lookup in its tokens, None where that is off.
        keep_logits: Whether steps hand logits out.
        finish: Why the generation ended, None while it goes on.
        first_row, end_row: Its cache rows; end_row None: to the end of the caches.
        state_index: Which recurrent state, and which part of the rings of windowed layers, is its own.
        unseen: Columns of the target's features, one for each of the last committed tokens that the draft has not taken in.
        inconsistent: A pass was broken off, so the state is inconsistent until it is reset.
        nonfinite_from: Position from which on its cache rows may hold NaN until they are cleared, None for none.
        undraftable: The draft gave NaN for this sequence, which is decoded plainly to its end.
        draft_nonfinite: What the draft holds of it is NaN and not cleared yet.
        isolated: It gave NaN in a batch and none alone, so it is stepped alone.
        notes: The policy's own state.
    """

    tokens: list[int] = field(default_factory=list)
    pending: int | None = None
    history: list[int] = field(default_factory=list)
    logits: NDArray[np.float32] | None = None
    sampler: Sampler | None = None
    mode: Mode = "plain"
    budget: int = 0
    chain_seed: bool = False
    limit: int = 0
    ends: Callable[[int], bool] = lambda token: False
    forced: list[int] = field(default_factory=list)
    lookup: Any = None
    keep_logits: bool = False
    finish: Finish | None = None
    first_row: int = 0
    end_row: int | None = None
    state_index: int = 0
    unseen: tuple[int, ...] = ()
    inconsistent: bool = False
    nonfinite_from: int | None = None
    undraftable: bool = False
    draft_nonfinite: bool = False
    isolated: bool = False
    notes: Any = None
    statistics: Statistics = field(default_factory=Statistics)

    @property
    def n_tokens(self) -> int:
        """Committed tokens; also the position at which a pass starts."""
        return len(self.tokens)

    def rows(self, n: int) -> range:
        """The cache rows of the next n positions."""
        start = self.first_row + len(self.tokens)
        return range(start, start + n)

    @property
    def cache_rows(self) -> slice:
        """Its cache rows."""
        return slice(self.first_row, self.end_row)

    def emit(self, token: int) -> bool:
        """Note a chosen token; True if the path ends with it: it is the last one, forced, or followed by a forced one."""
        was_forced = bool(self.forced)
        self.history.append(token)
        self.limit -= 1
        self.finish = "stop" if self.ends(token) else "length" if self.limit <= 0 else None
        if was_forced:
            del self.forced[0]
        return self.finish is not None or was_forced or bool(self.forced)

    def sample(self, logits: NDArray[np.float32]) -> int:
        """The forced token, or the sampler's.

        Raises:
            ConfigError: For an id that the vocabulary does not have.
        """
        if self.forced:
            return self.forced[0]
        assert self.sampler is not None
        token = int(self.sampler.sample(logits, self.history))
        if not 0 <= token < len(logits):
            raise ConfigError(
                f"the sampler gave token {token}, which is outside the vocabulary of {len(logits)}"
            )
        return token

    @property
    def is_greedy(self) -> bool:
        """Whether the target's argmax is all that it needs of a pass."""
        return self.sampler is not None and self.sampler.greedy and not (self.keep_logits or self.forced)

    def commit(self, path: tuple[int, ...], emitted: tuple[int, ...]) -> None:
        """Take in an accepted path: its nodes carry the pending token and all of `emitted` but the last, which is pending now."""
        assert self.pending is not None
        self.tokens += (self.pending, *emitted[:-1])
        self.pending, self.unseen = emitted[-1], path

    def clear(self) -> None:
        """Forget tokens and generation; its cache rows and state index stay, and whether it is inconsistent."""
        self.tokens.clear()
        self.history.clear()
        self.pending = self.logits = self.sampler = self.notes = None
        self.unseen, self.undraftable, self.statistics = (), False, Statistics()
