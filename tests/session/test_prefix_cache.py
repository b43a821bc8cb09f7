"""Tests of cached prefixes: the same output with and without, only what is new is prefilled, and memory stays in its budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import SamplingParams
from dflash_ggml.session.events import Begin, Finish, TextDelta
from dflash_ggml.session.prefix_cache import INTERVAL, MIN_GAP, PrefixCache, common_prefix
from dflash_ggml.session.requests import ChatRequest, CompletionRequest
from dflash_ggml.session.session import Session, run_chat, run_completion
from reference.fake_engine import FakeEngine

GREEDY = SamplingParams(temperature=0)


@dataclass(frozen=True, eq=False)
class Rows:
    n_tokens: int
    nbytes: int = 1000


@dataclass(frozen=True)
class Saved:
    tokens: tuple[int, ...]
    state_nbytes: int = 100
    rows: tuple[Rows, ...] | None = None

    @property
    def nbytes(self) -> int:
        return self.state_nbytes + sum(block.nbytes for block in self.rows or ())


def always(_: object) -> bool:
    return True


def lengths(cache: PrefixCache, ids: Sequence[int]) -> list[int]:
    """Of the snapshots that hold a prefix of these tokens."""
    return [
        n for n in range(1, len(ids) + 1) if (best := cache.longest(ids, n, always)) and len(best.tokens) == n
    ]


def test_budget_and_least_recently_used() -> None:
    cache = PrefixCache(250)
    assert cache.put(Saved((1,))) and cache.put(Saved((2,))) and not cache.put(Saved((9,), 251))
    assert cache.put(Saved((3,)))  # one of equal value is evicted
    assert cache.nbytes == 200 and cache.best([1, 5], 1, always) is None
    assert cache.best([2, 5], 1, always) == Saved((2,))
    cache.put(Saved((4,)))  # (3,) is the oldest in use
    assert cache.best([3, 5], 1, always) is None and cache.best([2, 5], 1, always) is not None
    cache.put(Saved((4,), 150))  # replaced, not counted twice
    assert cache.nbytes == 250 and len(cache) == 2
    cache.clear()
    assert cache.nbytes == 0 and len(cache) == 0


def test_what_saves_least_goes_first() -> None:
    ids = range(1, 400)
    cache = PrefixCache(400)
    for n in (100, 110, 300, 320):
        assert cache.put(Saved(tuple(ids[:n])))
    cache.put(Saved(tuple(ids[:340])))
    assert lengths(cache, ids) == [100, 300, 320, 340], "110 saved ten tokens over 100"
    cache.put(Saved(tuple(ids[:350])))
    assert lengths(cache, ids) == [100, 300, 340, 350], "whoever goes on does so from the last"
    cache.put(Saved((0,) * 5, 100))
    assert lengths(cache, ids) == [100, 300, 350] or cache.longest((0,) * 5, 5, always) is None


def test_old_snapshots_go_in_the_end() -> None:
    cache = PrefixCache(300)
    cache.put(Saved(tuple(range(1000))))
    for i in range(1, 60):
        cache.put(Saved((i,) * 300))
    assert cache.longest(range(1000), 1000, always) is None
    assert cache.longest((59,) * 300, 300, always) is not None


def test_rows_that_snapshots_share_count_once() -> None:
    cache, ids = PrefixCache(10_000), tuple(range(30))
    first, second, third = Rows(10), Rows(10), Rows(10)
    cache.put(Saved(ids, 100, (first, second, third)))
    cache.put(Saved(ids[:15], 100, (first, second)))
    assert cache.nbytes == 3200
    # whole blocks of what is shared; of the last one some rows will do where nothing follows
    assert cache.rows(ids[:25]) == (first, second, third)
    assert cache.rows((*ids[:25], 99)) == (first, second)
    assert cache.rows(ids[:20]) == (first, second) and cache.rows((99,)) == ()
    cache.sweep(lambda snapshot: len(snapshot.tokens) == 15)
    assert cache.nbytes == 2100
    cache.sweep(lambda snapshot: False)
    assert cache.nbytes == 0


def test_rows_that_are_on_the_device_go_before_any_snapshot() -> None:
    cache = PrefixCache(2300, on_device=lambda snapshot: snapshot.tokens[0] == 1)
    for name in (1, 2):
        cache.put(Saved((name,) * 10, 100, (Rows(10),)))
    assert cache.nbytes == 2200
    cache.put(Saved((3,) * 10, 100, (Rows(10),)))
    assert cache.nbytes == 2300 and len(cache) == 3
    assert cache.without_rows((1,) * 10) == [Saved((1,) * 10)] and not cache.without_rows((2,) * 10)


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
    boundaries = [0, 100, 3000, 3010, INTERVAL + 5, 3 * INTERVAL - 40]
    points = cache.plan(ids, 0, boundaries)
    # the message that begins nearest to so many tokens: an edit begins there
    assert {100, INTERVAL + 5, 2 * INTERVAL, 3 * INTERVAL - 40} <= set(points)
    assert not {3000, 3010, INTERVAL} & set(points)
    assert PrefixCache(1).plan(ids, 0, [0, 100]) == [100, INTERVAL, 2 * INTERVAL]
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


def test_alternating_conversations_keep_their_prefixes() -> None:
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
            plain.scheduler.run_on_slot(lambda slot: slot.reset())
            assert speak(plain, log)[0] == answer
            assert begin.cached_n <= begin.prompt_n
            log.append(assistant(answer))
        else:
            request = CompletionRequest(prompt=name * (20 + 30 * keep), sampling=GREEDY, max_tokens=7)
            plain.scheduler.run_on_slot(lambda slot: slot.reset())
            texts = [
                [e.text for e in run_completion(s, request) if isinstance(e, TextDelta)]
                for s in (cached, plain)
            ]
            assert "".join(texts[0]) == "".join(texts[1])
        assert cached.slots.cache.nbytes <= budget


def test_the_same_prompt_again_costs_one_small_pass() -> None:
    engine = FakeEngine()
    session = Session(engine)
    request = CompletionRequest(prompt="x" * 100, sampling=GREEDY, max_tokens=5)
    for expected in (0, 96, 96):
        begin = next(e for e in list(run_completion(session, request)) if isinstance(e, Begin))
        assert begin.cached_n == expected


@pytest.mark.parametrize("budget", [0, 10])
def test_a_budget_too_small_for_any_snapshot_is_no_error(budget: int) -> None:
    session = Session(FakeEngine(), cache_bytes=budget)
    speak(session, [user("hello there " * 20)])
    assert len(session.slots.cache) == 0


# ---- agents' conversations


def talk(name: str, n: int, shared: str = "") -> list[dict[str, str]]:
    """A conversation of n messages of 400 tokens or so behind a system prompt."""
    roles = [user, assistant]
    messages = [roles[i % 2](f"{name} {i}: " + f"{name}{i} and so on, " * 20) for i in range(n)]
    return [{"role": "system", "content": shared or name * 300}, *messages]


def long_session(parallel: int = 1, rows: int = 20_000, **options: Any) -> tuple[FakeEngine, Session]:
    engine = FakeEngine(EngineConfig(model=Path("toy.gguf"), n_ctx=rows, n_batch=256), parallel=parallel)
    return engine, Session(engine, **options)


@pytest.mark.parametrize("parallel", [1, 2])
def test_a_conversation_continues_from_its_answer_after_others_ran(parallel: int) -> None:
    """With one slot the answer comes back from memory, with two each conversation keeps its own."""
    engine, session = long_session(parallel)
    shared = "you are an agent " * 40
    replies = {name: f"{name} answers" + " at length" * 40 for name in "ab"}
    begins: dict[str, Begin] = {}
    for name in "ab":
        engine.replies = [replies[name]]
        prompt = talk(name, 3, shared)
        ChatRequest(messages=prompt)
        events = list(run_chat(session, ChatRequest(messages=prompt, sampling=GREEDY, max_tokens=400)))
        begins[name] = next(e for e in events if isinstance(e, Begin))
    assert begins["b"].cached_n > 560, "the system prompt is shared"
    for name in "ab":
        again = [*talk(name, 3, shared), assistant(replies[name]), user("go on")]
        engine.replies = ["done"]
        _, begin = speak(session, again)
        assert begin.prompt_n - begin.cached_n < 40, name
    assert parallel == 1 or engine.n_restored == 1  # the system prompt, for the second


def test_an_edit_of_the_history_goes_back_to_the_message_before_it() -> None:
    engine, session = long_session()
    for n in (1, 3, 5, 7):
        speak(session, talk("a", n))
    speak(session, talk("b", 3))  # all marks survive another conversation in the slot
    edited = talk("a", 7)
    edited[4] = user("something else " * 10)
    same = session.prepare(ChatRequest(messages=edited[:4])).boundaries[4]
    _, begin = speak(session, edited)
    assert same - 40 <= begin.cached_n <= same + 40
    assert engine.n_prefilled


def test_thoughts_that_a_template_drops_cost_no_more_than_the_turn() -> None:
    """A tool loop with thoughts, then a question: the loop is shown without them from its first answer on."""
    engine, session = long_session()
    engine.tokenizer = session.tokenizer
    first = [{"role": "system", "content": "s " * 400}, user("do it " * 30)]
    engine.replies = ["<think>hm hm hm</think>\n\nfirst", "<think>so so</think>\n\nsecond"]
    speak(session, first)
    speak(session, talk("b", 3))
    start = session.prepare(ChatRequest(messages=first)).first_answer
    engine.replies = ["x"]
    _, begin = speak(session, [*first, assistant("first"), user("and?")])
    assert start - 1 <= begin.cached_n <= start + 2


def test_where_the_first_answer_begins() -> None:
    session = Session(FakeEngine())
    messages = [user("one"), user("two"), assistant("three"), user("four")]
    opened = session.prepare(ChatRequest(messages=messages[:2]))
    whole = session.prepare(ChatRequest(messages=messages))
    assert opened.first_answer == opened.boundaries[2] == whole.first_answer == whole.boundaries[2]
    assert session.prepare(CompletionRequest(prompt="one")).first_answer == 0


def test_memory_of_four_alternating_conversations() -> None:
    """Rows are kept once, and the states that matter outlive the others."""
    sizes = (40_000, 10)
    engine = FakeEngine(EngineConfig(model=Path("toy.gguf"), n_ctx=8192, n_batch=256), sizes=sizes)
    longest = len(Session(engine).prepare(ChatRequest(messages=talk("a", 9))).ids)
    session = Session(engine, cache_bytes=4 * longest * sizes[1] + 14 * sizes[0])
    best = cached = 0
    for n in (1, 3, 5, 7, 9):
        for name in "abcd":
            _, begin = speak(session, talk(name, n))
            if n > 1:
                best += len(session.prepare(ChatRequest(messages=talk(name, n - 2))).ids)
                cached += min(begin.cached_n, best)
    assert cached > 0.97 * best
    assert session.slots.cache.nbytes <= session.slots.cache.budget


# ---- rows that are about to be overwritten


def test_room_for_the_rows_of_a_snapshot() -> None:
    ids = tuple(range(100))
    cache = PrefixCache(1300)
    shared = Rows(20, 200)
    for saved in (Saved((7,) * 10, 300), Saved(ids[:20], 100, (shared,)), Saved(ids)):
        assert cache.put(saved)
    assert cache.make_room(Saved(ids), 10) and cache.nbytes == 400, (
        "the other conversation goes, shared rows stay"
    )
    assert not cache.make_room(Saved(ids), 13) and not cache.make_room(Saved((1,)), 1)
    assert cache.nbytes == 400


@pytest.mark.parametrize("budget", [10_000, 40_000, 100_000])
def test_rows_are_copied_once_and_only_if_they_fit(budget: int) -> None:
    """A prompt of 3,000 tokens, of 30,000 bytes, in a slot that another one needs."""
    engine, session = long_session(cache_bytes=budget)
    requests = [CompletionRequest(prompt=name * 3000, sampling=GREEDY, max_tokens=5) for name in "ab"]
    for request in requests:
        list(run_completion(session, request))
    (begin,) = [e for e in run_completion(session, requests[0]) if isinstance(e, Begin)]
    assert engine.n_saved == (0 if budget == 10_000 else 2 * 2992)
    assert begin.cached_n == (0 if budget == 10_000 else 2992)
    assert session.slots.cache.nbytes <= budget
