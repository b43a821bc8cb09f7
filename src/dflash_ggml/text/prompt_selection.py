"""Selection of the part of a long prompt that is prefilled, by scores of its units; lossy and only on request.

Speculative prefill (arXiv 2502.02789; arXiv 2603.02631 for spans across model families): a scorer ranks units of the long
user and tool messages by the question, and the target prefills the best within a budget, positions compacted. System
message, tools, markup, assistant messages, short messages and the end of the prompt are always kept. A message's
selection is made once: the recurrent state after it cannot be patched, and later turns extend the same prefix.
"""

from __future__ import annotations

import hashlib
import math
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from ..errors import DflashError
from .tokenizer import Tokenizer

Range = tuple[int, int]  # range of token positions

LEAST = 1024  # shortest message to select from, in tokens
HEAD, TAIL = 128, 512  # tokens kept at both ends of such a message
END = 1024  # tokens kept at the end of the prompt
UNIT = (64, 512)  # tokens of a unit, which ends with a line if possible
QUESTION = 128  # most tokens of the question
FROZEN = 4096  # messages whose selection is cached


class LexicalScorer:
    """BM25 of the question's words over the units (Robertson and Zaragoza, 2009, equation 3.15, with Lucene's idf, k1 = 1.5 and
    b = 0.75); a unit's score also applies to the next unit."""

    name = "lexical"
    # words of scripts with spaces, single characters of those without
    _WORD = re.compile(r"[^\W\u2e80-\uffff]+|[\u2e80-\uffff]")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def score(self, ids: Sequence[int], units: Sequence[Range], question: Range) -> np.ndarray:
        """A finite score per unit, higher is better. Args: ids of the whole prompt; the question's token range."""
        corpus = [Counter(self._words(ids[start:end])) for start, end in units]
        lengths = np.array([words.total() for words in corpus], np.float32)
        relative = lengths / max(lengths.mean(), 1.0)
        found = np.zeros(len(units), np.float32)
        for word, asked in Counter(self._words(ids[slice(*question)])).items():
            counts = np.array([words[word] for words in corpus], np.float32)
            holding = np.count_nonzero(counts)
            idf = math.log(1 + (len(units) - holding + 0.5) / (holding + 0.5))
            found += asked * idf * counts / (counts + 1.5 * (0.25 + 0.75 * relative))
        found[1:] = np.maximum(found[1:], found[:-1])  # the answer may follow the unit that names the subject
        return found

    def _words(self, ids: Sequence[int]) -> list[str]:
        return self._WORD.findall(self._tokenizer.decode(ids).lower())


@dataclass(frozen=True, slots=True)
class Choice:
    """A pending selection, until its units are scored.

    Attributes:
        scorer, keep: Scorer and share, under which the selection is cached.
        units: Token ranges to choose from, in order.
        question: The question's tokens, at most 128.
        budget: Tokens of units to keep.
        messages: The long messages, whose selections are cached.
    """

    scorer: str
    keep: float
    units: tuple[Range, ...]
    question: Range
    budget: int
    messages: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Selection:
    """The part of a prompt to prefill.

    Attributes:
        ids: The kept tokens, a subsequence of the prompt's; empty while the selection is pending.
        ranges: Their positions in the prompt, in order; while pending, those that are always kept.
        sent_n: Tokens of the whole prompt.
        score_ms: Time for selecting, wall milliseconds.
        whole: Reason why all of it is kept although less was requested; "" otherwise.
        choice: The pending selection of a scorer on the device, None if there is none.
    """

    ids: tuple[int, ...]
    ranges: tuple[Range, ...]
    sent_n: int
    score_ms: float
    whole: str = ""
    choice: Choice | None = None

    @property
    def kept_n(self) -> int:
        """Kept tokens; while pending, the maximum."""
        if self.choice is None:
            return len(self.ids)
        return size(self.ranges) + min(self.choice.budget, size(self.choice.units))


class PromptSelector:
    """Selects parts of prompts of one vocabulary, and caches the selection of each message; thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._frozen: OrderedDict[bytes, tuple[Range, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def select(
        self,
        scorer: LexicalScorer | str,
        text: str,
        ids: Sequence[int],
        keep: float,
        messages: Sequence[Mapping[str, Any]] | None = None,
    ) -> Selection:
        """The part of a prompt to prefill.

        Args:
            scorer: Ranks the units; or the name of a scorer on the device, which leaves the selection pending for `chosen`.
            text: The prompt as rendered.
            ids: Its tokens.
            keep: Share of its tokens to keep, protected ones included; above 0, at most 1.
            messages: The chat's messages as rendered; None for a completion, whose text is one message.

        Raises:
            DflashError: A score is not finite.
        """
        start, n = time.perf_counter(), len(ids)
        name = scorer if isinstance(scorer, str) else scorer.name

        def selection(ranges: Iterable[Range], whole: str = "") -> Selection:
            return _selection(ids, ranges, since(start), whole if keep < 1 else "")

        offsets = self._offsets(text, ids)
        if offsets is None:
            return selection([(0, n)], "its tokens do not spell its text")
        if messages is None:
            long, question = [(0, n)], (max(0, n - QUESTION), n)
        else:
            long, question = _contents(text, offsets, messages)
        long = [(a, b) for a, b in long if b - a >= LEAST]
        keys = self._keys(name, keep, ids, long)
        with self._lock:
            kept = {one: self._frozen.get(key) for one, key in zip(long, keys)}
        # candidates: the middles of new messages
        parts = {
            (a, b): (a + HEAD, min(b - TAIL, n - END)) for (a, b), known in kept.items() if known is None
        }
        parts = {one: (a, b) for one, (a, b) in parts.items() if b - a >= UNIT[0]}
        known = [one for one, ranges in kept.items() if ranges is not None]
        protected = n - size(parts.values()) - size(known)
        chosen = sum(size(kept[one] or ()) for one in known)
        budget, whole, chosen_from = math.ceil(keep * n), "", tuple[Range, ...]()
        if not long:
            whole = "no message is long enough"
        elif protected * 2 > budget:
            whole = "" if known else f"{protected:,} of {n:,} tokens are kept in any case"
        elif parts:
            chosen_from = tuple(unit for part in parts.values() for unit in _units(text, offsets, part))
        # kept independently of the scores
        for one, ranges in kept.items():
            if ranges is None and one in parts and chosen_from:
                a, b = parts[one]
                kept[one] = (one[0], a), (b, one[1])
            elif ranges is None:
                kept[one] = (one,)
        fixed = [*_gaps(long, n), *(r for ranges in kept.values() for r in ranges or ())]
        if not chosen_from:
            found = selection(fixed, whole)
            self._remember(keys, long, found.ranges)
            return found
        choice = Choice(name, keep, chosen_from, question, budget - protected - chosen, tuple(long))
        open_ = Selection((), tuple(merged(fixed)), n, since(start), choice=choice)
        if isinstance(scorer, str):
            return open_
        scores = scorer.score(ids, choice.units, choice.question)
        return self.chosen(ids, open_, scores, since(start) - open_.score_ms)

    def chosen(
        self, ids: Sequence[int], selection: Selection, scores: np.ndarray | None, score_ms: float
    ) -> Selection:
        """Make a pending selection.

        Args:
            scores: Score of each unit, higher is better; None: an arbitrary selection, not cached.
            score_ms: Time for scoring.

        Raises:
            DflashError: A score is not finite.
        """
        choice = selection.choice
        assert choice is not None
        values = np.zeros(len(choice.units)) if scores is None else np.asarray(scores, np.float32)
        if not np.isfinite(values).all():
            raise DflashError(f"prompt scorer {choice.scorer}: a score is not finite")
        best = best_units(choice.units, values, choice.budget)
        found = _selection(ids, [*selection.ranges, *best], selection.score_ms + score_ms)
        if scores is not None:
            keys = self._keys(choice.scorer, choice.keep, ids, choice.messages)
            self._remember(keys, choice.messages, found.ranges)
        return found

    def settled(self, ids: Sequence[int], selection: Selection) -> Selection | None:
        """Make a pending selection from the cache, if all of its messages' selections are there; else None."""
        choice = selection.choice
        assert choice is not None
        with self._lock:
            keys = self._keys(choice.scorer, choice.keep, ids, choice.messages)
            known = [self._frozen.get(key) for key in keys]
        if None in known:
            return None
        ranges = [*_gaps(choice.messages, len(ids)), *(r for ranges in known for r in ranges or ())]
        return _selection(ids, ranges, selection.score_ms)

    def _remember(self, keys: Sequence[bytes], messages: Sequence[Range], ranges: Sequence[Range]) -> None:
        """Cache the selection of each message."""
        with self._lock:
            for key, (a, b) in zip(keys, messages):
                kept = [(max(a, c), min(b, d)) for c, d in ranges if c < b and d > a]
                self._frozen[key] = tuple(kept)
                self._frozen.move_to_end(key)
            while len(self._frozen) > FROZEN:
                self._frozen.popitem(last=False)

    def _offsets(self, text: str, ids: Sequence[int]) -> np.ndarray | None:
        """Byte offset of each token in the text, and the text's length; None if the tokens do not spell it."""
        pieces = self._tokenizer.pieces(ids)
        if b"".join(pieces) != text.encode():
            return None
        return np.fromiter(accumulate(map(len, pieces), initial=0), np.int64, len(ids) + 1)

    def _keys(self, scorer: str, keep: float, ids: Sequence[int], messages: Iterable[Range]) -> list[bytes]:
        """Cache keys of selections: all tokens up to the message's end, scorer and share."""
        hashed, at, found = hashlib.blake2b(f"{scorer} {keep}".encode(), digest_size=16), 0, []
        for _, end in messages:
            hashed.update(np.asarray(ids[at:end], np.int64).tobytes())
            at = end
            found.append(hashed.digest())
        return found


def since(start: float) -> float:
    """Wall milliseconds since `time.perf_counter` was `start`."""
    return (time.perf_counter() - start) * 1e3


def _selection(ids: Sequence[int], ranges: Iterable[Range], score_ms: float, whole: str = "") -> Selection:
    found = tuple(merged(ranges))
    return Selection(tuple(i for a, b in found for i in ids[a:b]), found, len(ids), score_ms, whole)


def best_units(units: Sequence[Range], scores: np.ndarray, budget: int) -> list[Range]:
    """The units with the highest scores within a budget of tokens, earlier ones first at ties; skips units that do not fit."""
    found = []
    for i in sorted(range(len(units)), key=lambda i: (-scores[i], i)):
        size = units[i][1] - units[i][0]
        if size <= budget:
            budget -= size
            found.append(units[i])
    return sorted(found)


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Sorted ranges, adjacent ones merged, without empty ones."""
    found: list[Range] = []
    for a, b in sorted(ranges):
        if found and a <= found[-1][1]:
            found[-1] = (found[-1][0], max(b, found[-1][1]))
        elif a < b:
            found.append((a, b))
    return found


def size(ranges: Iterable[Range]) -> int:
    """Number of tokens in disjoint ranges."""
    return sum(b - a for a, b in ranges)


def _gaps(parts: Iterable[Range], n: int) -> Iterable[Range]:
    """The ranges between and around parts."""
    at = 0
    for a, b in parts:
        yield at, a
        at = b
    yield at, n


def _units(text: str, offsets: np.ndarray, part: Range) -> Iterable[Range]:
    """A part divided after line ends into units of `UNIT` tokens; the last may be shorter."""
    raw = text.encode()
    a, end = part
    for i in range(*part):
        if i + 1 - a == UNIT[1] or (i + 1 - a >= UNIT[0] and b"\n" in raw[offsets[i] : offsets[i + 1]]):
            yield a, i + 1
            a = i + 1
    if a < end:
        yield a, end


def _contents(
    text: str, offsets: np.ndarray, messages: Sequence[Mapping[str, Any]]
) -> tuple[list[Range], Range]:
    """Token ranges of long user and tool messages' contents, and of the question.

    A content changed by the template is not found, and so kept whole.
    """
    found: list[Range] = []
    at, n = 0, len(offsets) - 1
    for message in messages:
        content = str(message.get("content") or "").strip()
        start = text.find(content, at) if len(content) >= LEAST else -1  # a token has at least one character
        if start >= 0:
            at = start + len(content)
            if message["role"] in ("user", "tool"):
                found.append(_tokens(text, offsets, start, at))
    asked = [m for m in messages if m["role"] == "user"]
    content = str(asked[-1].get("content") or "").strip() if asked else ""
    start = text.rfind(content) if content else -1
    if start < 0:
        return found, (max(0, n - QUESTION), n)
    a, b = _tokens(text, offsets, start, start + len(content))
    return found, (max(a, b - QUESTION), b)


def _tokens(text: str, offsets: np.ndarray, start: int, end: int) -> Range:
    """The tokens within a range of characters."""
    first = len(text[:start].encode())
    last = first + len(text[start:end].encode())
    return int(np.searchsorted(offsets, first)), int(np.searchsorted(offsets, last, side="right")) - 1
