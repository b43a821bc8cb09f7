"""`dflash-bench perplexity FILE`: how well the target predicts a text, in windows as llama.cpp's tool has them; K/V types beside
each other.

A window is `n` tokens from an empty context, beginning with BOS if the model uses one; the tokens of its second half but the
first are scored. An incomplete last window is left out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import numpy as np

from ..config import CacheType
from ..engine.slot import Slot
from ..errors import ConfigError
from .sections import Row, Section, columns

WINDOW = 512  # tokens, llama.cpp's default
_LOGITS_BYTES = 64 << 20  # logits of a pass on the device at once
COLUMNS = columns(
    "kv=K/V; perplexity=perplexity:4; error=±:4; change=% to the first:3; change_error=±:3; windows=windows:0; "
    "tokens=scored tokens:0; per_second=tokens/s:1"
)


@dataclass(slots=True)
class Score:
    """Negative log-probabilities of the scored tokens, in nats."""

    lost: list[float] = field(default_factory=list)
    windows: int = 0
    seconds: float = 0.0

    def add(self, logits: np.ndarray, token: int) -> None:
        """Score `token` by the logits before it, float32 [n_vocab]."""
        shifted = logits - logits.max()
        self.lost.append(math.log(float(np.exp(shifted).sum(dtype=np.float64))) - float(shifted[token]))

    def row(self, kv: str, first: Score | None, window: int) -> Row:
        """The row for the table; beside `first`, over the same tokens, with the error of their paired difference."""
        mean, error = _mean(self.lost)
        found = {"kv": kv, "perplexity": math.exp(mean), "windows": self.windows, "tokens": len(self.lost)}
        found["error"] = math.exp(mean) * error
        found["per_second"] = self.windows * window / self.seconds if self.seconds > 0 else None
        if first is not None:
            apart, error = _mean([a - b for a, b in zip(self.lost, first.lost)])
            found |= {"change": 100 * math.expm1(apart), "change_error": 100 * math.exp(apart) * error}
        return found


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error."""
    return float(np.mean(values)), float(np.std(values)) / math.sqrt(max(len(values) - 1, 1))


def kv_pairs(text: str) -> list[tuple[str, str]]:
    """K/V types from `f16,q8_0/q4_0`; one name is both. Raises ConfigError."""
    found = []
    for part in text.split(","):
        k, _, v = part.strip().partition("/")
        pair = (k, v or k)
        if not set(pair) <= set(get_args(CacheType)):
            raise ConfigError(f"--kv: {part.strip()} is not K/V of {', '.join(get_args(CacheType))}")
        found.append(pair)
    return found


def read_text(file: Path) -> str:
    """The text of a file. Raises ConfigError."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise ConfigError(f"perplexity: can't read {file}: {problem}") from None


def windows_of(ids: Sequence[int], window: int, limit: int | None) -> list[Sequence[int]]:
    """The first `limit` complete windows of a text. Raises ConfigError if there are none."""
    if window < 4:
        raise ConfigError(f"--window: {window} is below 4")
    found = [ids[at : at + window] for at in range(0, len(ids) - window + 1, window)]
    if not found:
        raise ConfigError(f"perplexity: the text has {len(ids)} tokens, a window takes {window} (--window)")
    return found[:limit]


def score(
    slot: Slot, windows: Sequence[Sequence[int]], begin: int | None, at: Callable[[int], None]
) -> Score:
    """Score windows of equal length. begin: the token in place of the first of each. at: called with how many are done; may
    raise."""
    found, window = Score(), len(windows[0])
    rows = max(1, min(256, _LOGITS_BYTES // (4 * slot.n_vocab)))
    # logits are used from the token `half` on, up to the one before the last
    half, last = window // 2, window - 1
    for done, text in enumerate(windows):
        at(done)
        began = time.perf_counter()
        ids = list(text) if begin is None else [begin, *text[1:]]
        slot.reset()
        slot.forget()
        slot.prefill(ids[:half])
        targets = iter(ids[half + 1 :])
        for first in range(half, last, rows):
            part = ids[first : min(first + rows, last)]
            slot.prefill(part, take_row=lambda logits: found.add(logits, next(targets)))  # noqa: B023 - used at once
        found.windows += 1
        found.seconds += time.perf_counter() - began
    at(len(windows))
    return found


def report(scores: Sequence[tuple[str, Score]], file: Path, window: int) -> Section:
    """A row per pair of K/V types."""
    first = scores[0][1]
    rows = [found.row(kv, first if i else None, window) for i, (kv, found) in enumerate(scores)]
    notes = [f"{file.name} in windows of {window} tokens, the second half of each scored."]
    return Section("perplexity", "Perplexity", COLUMNS, rows, notes)
