"""Tests of prompt selection: protected parts, budgets, units, caching, and invalid fields."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_ggml.errors import DflashError
from dflash_ggml.files.gguf import GGUFFile
from dflash_ggml.text import prompt_selection as ps
from dflash_ggml.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(demo_target: Path) -> Tokenizer:
    with GGUFFile(demo_target) as file:
        return Tokenizer.from_gguf(file)


class Scored:
    """Scores that a test makes; counts what it is asked for."""

    name = "a test's"

    def __init__(self, seed: int = 0) -> None:
        self.rng, self.calls = np.random.default_rng(seed), list[list[ps.Range]]()

    def score(self, ids: Sequence[int], units: Sequence[ps.Range], question: ps.Range) -> np.ndarray:
        self.calls.append(list(units))
        return self.rng.random(len(units))


WORDS = [
    "amber",
    "basin",
    "cedar",
    "delta",
    "ember",
    "fjord",
    "grove",
    "haven",
    "islet",
    "jetty",
    "knoll",
    "ledge",
]


def prose(rng: random.Random, lines: int) -> str:
    return "".join(" ".join(rng.choice(WORDS) for _ in range(9)) + "\n" for _ in range(lines))


def chat(*messages: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in messages]


def render(messages: list[dict[str, Any]]) -> str:
    body = "".join(f"<|im_start|>{m['role']}\n{m['content'].strip()}<|im_end|>\n" for m in messages)
    return body + "<|im_start|>assistant\n"


class Selector:
    """A selector with its scorer."""

    def __init__(self, tokenizer: Tokenizer, scorer: ps.Scorer) -> None:
        self._selector, self._scorer = ps.PromptSelector(tokenizer), scorer

    def select(self, *args: Any) -> ps.Selection:
        return self._selector.select(self._scorer, *args)


def select(
    tokenizer: Tokenizer, selector: Selector, messages: list[dict[str, Any]], keep: float
) -> tuple[list[int], str, ps.Selection]:
    text = render(messages)
    ids = tokenizer.encode(text)
    return ids, text, selector.select(text, ids, keep, messages)


def conversation(rng: random.Random, lines: int = 500) -> list[dict[str, Any]]:
    return chat(
        ("system", "You answer in one word. " + prose(rng, 3)),
        ("user", "Read this.\n" + prose(rng, lines)),
        ("assistant", "Read."),
        ("user", "Which word follows the lantern?"),
    )


@settings(deadline=None, max_examples=25, database=None)
@given(
    seed=st.integers(0, 10_000),
    keep=st.sampled_from([0.05, 0.1, 0.3, 0.5, 0.99, 1.0]),
    lines=st.integers(1, 400),
)
def test_a_subsequence_within_the_budget_with_all_that_is_protected(
    tokenizer: Tokenizer, seed: int, keep: float, lines: int
) -> None:
    rng = random.Random(seed)
    messages = conversation(rng, lines)
    ids, text, found = select(tokenizer, Selector(tokenizer, Scored(seed)), messages, keep)
    n = len(ids)
    assert list(found.ids) == [i for a, b in found.ranges for i in ids[a:b]]
    assert all(a < b for a, b in found.ranges) and found.sent_n == n
    assert all(b < c for (_, b), (c, _) in zip(found.ranges, found.ranges[1:]))
    if found.whole or keep == 1:
        assert list(found.ids) == ids
    else:
        assert len(found.ids) <= math.ceil(keep * n)
        assert found.ranges[-1][1] == n and n - found.ranges[-1][0] >= ps.END
    kept = tokenizer.decode(found.ids, special=True)
    assert kept.startswith(text[: text.index("Read this.")])  # the system message and its markup
    assert kept.endswith(text[text.rindex("<|im_start|>assistant\nRead.") :])
    again = Selector(tokenizer, Scored(seed)).select(text, ids, keep, messages)
    assert (again.ids, again.ranges) == (found.ids, found.ranges)
    # the same where the device scores: a pending selection has an upper bound
    selector = ps.PromptSelector(tokenizer)
    left = selector.select(Scored.name, text, ids, keep, messages)
    if left.choice is None:
        assert (left.ids, left.whole) == (found.ids, found.whole)
        return
    assert selector.settled(ids, left) is None and len(found.ids) <= left.kept_n <= math.ceil(keep * n)
    hasty = selector.chosen(ids, left, None, 0.0)  # of a request that was cancelled
    assert len(hasty.ids) <= left.kept_n and selector.settled(ids, left) is None
    scores = Scored(seed).score(ids, left.choice.units, left.choice.question)
    late = selector.chosen(ids, left, scores, 7.0)
    assert (late.ids, late.ranges, late.score_ms) == (found.ids, found.ranges, left.score_ms + 7.0)
    settled = selector.settled(ids, left)
    assert settled is not None and (settled.ids, settled.ranges) == (found.ids, found.ranges)


def test_what_the_question_names_is_kept(tokenizer: Tokenizer) -> None:
    rng = random.Random(5)
    lines = prose(rng, 900).splitlines(keepends=True)
    lines[412:412] = ["The lantern is followed by the walrus.\n"]
    messages = chat(("user", "".join(lines)), ("assistant", "Read."), ("user", "What follows the lantern?"))
    selector = Selector(tokenizer, ps.LexicalScorer(tokenizer))
    ids, _, found = select(tokenizer, selector, messages, 0.3)
    assert len(found.ids) <= math.ceil(0.3 * len(ids)) and not found.whole
    assert "followed by the walrus" in tokenizer.decode(found.ids)


def test_prompts_of_short_messages_are_read_whole(tokenizer: Tokenizer) -> None:
    """A lexical filter of another engine deleted the middle of every prompt of 2,300 tokens."""
    rng = random.Random(1)
    messages = [
        m for i in range(12) for m in chat(("user", f"{i} " + prose(rng, 12)), ("assistant", prose(rng, 12)))
    ][:-1]
    ids, _, found = select(tokenizer, Selector(tokenizer, Scored()), messages, 0.1)
    assert list(found.ids) == ids and found.whole == "no message is long enough"


def test_assistants_and_system_messages_are_never_cut(tokenizer: Tokenizer) -> None:
    rng = random.Random(2)
    long = [prose(rng, n) for n in (90, 700, 90)]
    messages = chat(("system", long[0]), ("user", long[1]), ("assistant", long[2]), ("user", "Go on."))
    ids, _, found = select(tokenizer, Selector(tokenizer, Scored()), messages, 0.9)
    kept = tokenizer.decode(found.ids)
    assert len(found.ids) < len(ids) and long[0].strip() in kept and long[2].strip() in kept


def test_where_too_much_is_protected_all_is_read(tokenizer: Tokenizer) -> None:
    messages = conversation(random.Random(3), 400)
    ids, _, found = select(tokenizer, Selector(tokenizer, Scored()), messages, 0.05)
    assert list(found.ids) == ids and "in any case" in found.whole


def test_a_selection_is_made_once(tokenizer: Tokenizer) -> None:
    """Later turns extend the same prefix, whatever they ask; another share or scorer selects anew."""
    rng, scorer = random.Random(4), Scored()
    selector = Selector(tokenizer, scorer)
    messages = conversation(rng, 1500)
    _, _, first = select(tokenizer, selector, messages, 0.25)
    messages += chat(("assistant", "walrus"), ("user", "And before? " + prose(rng, 300)))
    _, _, second = select(tokenizer, selector, messages, 0.25)
    end = len(first.ids) - len(tokenizer.encode("<|im_start|>assistant\n"))
    assert second.ids[:end] == first.ids[:end] and len(scorer.calls) == 2
    assert all(a >= first.ranges[-1][0] for a, _ in scorer.calls[1])  # the new message alone
    select(tokenizer, selector, messages, 0.3)
    assert len(scorer.calls) == 3


def test_units_end_at_line_ends(tokenizer: Tokenizer) -> None:
    scorer = Scored()
    ids, _, _ = select(tokenizer, Selector(tokenizer, scorer), conversation(random.Random(6), 900), 0.5)
    units = scorer.calls[0]
    assert all(64 <= b - a <= 512 for a, b in units[:-1])
    assert all(tokenizer.decode(ids[a:b]).endswith("\n") for a, b in units[:-1])
    one_line = chat(("user", "amber " * 4000), ("user", "Which?"))
    select(tokenizer, Selector(tokenizer, scorer), one_line, 0.7)
    assert max(b - a for a, b in scorer.calls[1]) == 512


def test_the_question_is_the_last_users_text(tokenizer: Tokenizer) -> None:
    """Another engine's queries lay on the template's suffix."""
    queries: list[str] = []

    class Spy(Scored):
        def score(self, ids: Sequence[int], units: Sequence[ps.Range], question: ps.Range) -> np.ndarray:
            queries.append(tokenizer.decode(ids[slice(*question)]))
            return super().score(ids, units, question)

    messages = conversation(random.Random(7), 900)
    select(tokenizer, Selector(tokenizer, Spy()), messages, 0.5)
    assert queries == [messages[-1]["content"]]


def test_a_score_that_is_no_number_is_an_error(tokenizer: Tokenizer) -> None:
    class Broken(Scored):
        def score(self, ids: Sequence[int], units: Sequence[ps.Range], question: ps.Range) -> np.ndarray:
            return np.full(len(units), np.nan)

    with pytest.raises(DflashError, match="not finite"):
        select(tokenizer, Selector(tokenizer, Broken()), conversation(random.Random(8), 900), 0.5)


def test_a_completion_is_one_message(tokenizer: Tokenizer) -> None:
    text = prose(random.Random(9), 900)
    ids = tokenizer.encode(text)
    found = Selector(tokenizer, Scored()).select(text, ids, 0.5)
    assert len(found.ids) <= math.ceil(0.5 * len(ids))
    assert found.ids[: ps.HEAD] == tuple(ids[: ps.HEAD]) and found.ids[-ps.END :] == tuple(ids[-ps.END :])


def test_best_units_are_by_score_then_position_and_skip_what_does_not_fit() -> None:
    units = [(0, 100), (100, 150), (150, 200), (200, 260)]
    assert ps.best_units(units, np.array([1.0, 2, 2, 3]), 110) == [(100, 150), (200, 260)]
    assert ps.best_units(units, np.array([9.0, 2, 2, 3]), 99) == [(200, 260)]
    assert ps.best_units(units, np.array([0.0, 0, 0, 0]), 260) == units


def test_the_lexical_scorer_is_bm25(tokenizer: Tokenizer) -> None:
    """Against the formula, a document at a time; a unit inherits the score of the one before it."""
    rng = random.Random(3)
    texts = [" ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 30))) + "\n" for _ in range(12)]
    texts.append("who has seen the amber basin of the fjord, the amber one?")
    parts = [tokenizer.encode(text) for text in texts]
    ends = np.cumsum([len(part) for part in parts])
    spans = list(zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True))
    found = ps.LexicalScorer(tokenizer).score([i for part in parts for i in part], spans[:-1], spans[-1])
    documents = [text.split() for text in texts[:-1]]
    mean = sum(map(len, documents)) / len(documents)
    expected = []
    for document in documents:
        score = 0.0
        for word in ("amber", "basin", "fjord", "amber"):
            holding = sum(word in other for other in documents)
            n = document.count(word)
            idf = math.log(1 + (len(documents) - holding + 0.5) / (holding + 0.5))
            score += idf * n / (n + 1.5 * (1 - 0.75 + 0.75 * len(document) / mean))
        expected.append(score)
    inherited = [max(pair) for pair in zip(expected, [0.0, *expected[:-1]], strict=True)]
    np.testing.assert_allclose(found, inherited, rtol=1e-4)
