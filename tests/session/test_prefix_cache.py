"""Cached prefixes: the same output with and without, only what is new is prefilled, and memory stays in its budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_ggml.decode.sampling import SamplingParams
from dflash_ggml.session.events import Begin, Finish, TextDelta
from dflash_ggml.session.prefix_cache import INTERVAL, MIN_GAP, PrefixCache, common_prefix
from dflash_ggml.session.requests import ChatRequest, CompletionRequest
from dflash_ggml.session.session import Session, run_chat, run_completion
from reference.fake_engine import FakeEngine

GREEDY = SamplingParams(temperature=0)


@dataclass(frozen=True)
class Saved:
    tokens: tuple[int, ...]
    nbytes: int = 100
    rows: object | None = None


def always(_: object) -> bool:
    return True


def test_budget_and_least_recently_used() -> None:
    cache = PrefixCache(250)
    assert cache.put(Saved((1,))) and cache.put(Saved((2,))) and not cache.put(Saved((9,), 251))
    assert cache.best([1, 5], 1, always) == Saved((1,))
    cache.put(Saved((3,)))  # (2,) is the oldest in use
    assert cache.nbytes == 200 and cache.best([2, 5], 2, always) is None
    cache.put(Saved((3,), 150))  # replaced, not counted twice
    assert cache.nbytes == 250 and len(cache) == 2
    cache.clear()
    assert cache.nbytes == 0 and len(cache) == 0


def test_longest_usable_prefix_within_the_limit() -> None:
    cache = PrefixCache(10_000)
    for tokens in [(1,), (1, 2), (1, 2, 3), (1, 9), (256,)]:
        cache.put(Saved(tokens))
    assert cache.best([1, 2, 3, 4], 4, always).tokens == (1, 2, 3)
    assert cache.best([1, 2, 3, 4], 2, always).tokens == (1, 2)
    assert cache.best([1, 2, 3, 4], 4, lambda s: len(s.tokens) < 3).tokens == (1, 2)
    assert cache.best([0, 1], 2, always) is None
    cache.sweep(lambda s: len(s.tokens) == 1)
    assert len(cache) == 2


def test_where_snapshots_are_taken() -> None:
    cache = PrefixCache(1)
    ids = list(range(3 * INTERVAL))
    boundaries = [0, 100, 2000, 2010, INTERVAL + 5, 3 * INTERVAL - 40]
    points = cache.plan(ids, 0, boundaries)
    assert {100, INTERVAL, 2 * INTERVAL, 3 * INTERVAL - 40} <= set(points)
    assert 2000 not in points and 2010 not in points
    assert all(0 < p < len(ids) for p in points) and points == sorted(points)
    assert min(b - a for a, b in pairwise(points)) >= MIN_GAP
    assert cache.plan(ids, len(ids) - 1, boundaries) == []
    assert PrefixCache(0).plan(ids, 0, boundaries) == []


def test_a_parting_point_is_learnt() -> None:
    cache = PrefixCache(1)
    shared = list(range(200))
    cache.plan(shared + [1] * 100, 0, ())
    assert 200 in cache.plan(shared + [2] * 100, 0, ())


def test_common_prefix() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4, 5]) == 2 and common_prefix([], [1]) == 0


def speak(session: Session, messages: Sequence[dict[str, str]]) -> tuple[str, Begin]:
    events = list(run_chat(session, ChatRequest(messages=messages, sampling=GREEDY, max_tokens=40)))
    assert isinstance(events[-1], Finish)
    return "".join(e.text for e in events if isinstance(e, TextDelta)), next(
        e for e in events if isinstance(e, Begin)
    )


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_second_turn_prefills_only_what_is_new() -> None:
    engine = FakeEngine()
    session = Session(engine)
    engine.replies = ["fine thanks", "again"]
    system = {"role": "system", "content": "be brief " * 12}
    answer, begin = speak(session, [system, user("how are you " * 8)])
    assert begin.cached_n == 0 and answer == "fine thanks"
    before = engine.n_prefilled
    _, begin = speak(session, [system, user("how are you " * 8), assistant(answer), user("and now?")])
    # the live state already holds the answer; its end tag and the new message remain
    assert begin.cached_n > 200 and engine.n_prefilled - before < 45
    assert engine.n_prefilled - before == begin.prompt_n - begin.cached_n


def test_a_template_that_drops_the_thinking_joins_at_the_last_boundary() -> None:
    engine = FakeEngine()
    session = Session(engine)
    engine.replies = ["<think>long thoughts</think>\n\nfine", "x"]
    answer, first = speak(session, [user("how are you " * 8)])
    assert answer == "fine"
    _, begin = speak(session, [user("how are you " * 8), assistant(answer), user("and now?")])
    # everything up to the assistant's header of the first turn
    assert first.prompt_n - 12 <= begin.cached_n < first.prompt_n


def test_conversations_that_take_turns_keep_their_prefixes() -> None:
    engine = FakeEngine()
    session = Session(engine)
    long_a, long_b = [user("alpha " * 30)], [user("beta " * 40)]
    speak(session, long_a)
    speak(session, long_b)
    long_c = [user("gamma " * 25)]
    for messages in (long_a, long_b, long_a, long_c, long_a, long_b, long_c):
        _, begin = speak(session, messages)
        assert messages is long_c or begin.prompt_n - begin.cached_n <= 12
    assert begin.prompt_n - begin.cached_n <= 12


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.booleans()),
        min_size=2,
        max_size=10,
    ),
    st.sampled_from([0, 1500, 5000, 1 << 20]),
)
def test_same_output_with_and_without_cache(plan: list[tuple[str, int, bool]], budget: int) -> None:
    """Random interleavings of growing, cut and regenerated conversations and bare prompts."""
    cached, plain = Session(FakeEngine(), cache_bytes=budget), Session(FakeEngine(), cache_bytes=0)
    logs: dict[str, list[dict[str, str]]] = {}
    for name, keep, chat in plan:
        if chat:
            log = logs.setdefault(name, [])
            del log[2 * keep :]
            log.append(user(f"{name} says something of some length, number {len(log)}"))
            answer, begin = speak(cached, log)
            plain.scheduler.borrow(lambda slot: slot.reset())
            assert speak(plain, log)[0] == answer
            assert begin.cached_n <= begin.prompt_n
            log.append(assistant(answer))
        else:
            request = CompletionRequest(prompt=name * (20 + 30 * keep), sampling=GREEDY, max_tokens=7)
            plain.scheduler.borrow(lambda slot: slot.reset())
            texts = [
                [e.text for e in run_completion(s, request) if isinstance(e, TextDelta)]
                for s in (cached, plain)
            ]
            assert "".join(texts[0]) == "".join(texts[1])
        assert cached.slots.cache.nbytes <= budget


def test_the_same_prompt_again_costs_one_token() -> None:
    engine = FakeEngine()
    session = Session(engine)
    request = CompletionRequest(prompt="x" * 100, sampling=GREEDY, max_tokens=5)
    for expected in (0, 99, 99):
        begin = next(e for e in list(run_completion(session, request)) if isinstance(e, Begin))
        assert begin.cached_n == expected


def test_hits_and_misses_are_counted() -> None:
    session = Session(FakeEngine())
    request = CompletionRequest(prompt="x" * 100, sampling=GREEDY, max_tokens=5)
    for _ in range(3):
        list(run_completion(session, request))
    assert (session.slots.cache.hits, session.slots.cache.misses) == (2, 1)


@pytest.mark.parametrize("budget", [0, 10])
def test_a_budget_too_small_for_any_snapshot_is_no_error(budget: int) -> None:
    session = Session(FakeEngine(), cache_bytes=budget)
    speak(session, [user("hello there " * 20)])
    assert len(session.slots.cache) == 0
