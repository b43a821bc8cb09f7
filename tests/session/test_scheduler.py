"""Tests of the scheduler on the toy engine: batched sequences equal solo runs, and each joins, leaves or fails by itself."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from dflash_ggml.decode.sampling import SamplingParams
from dflash_ggml.errors import ConfigError, ContextOverflowError, DeviceError, NoRoomError
from dflash_ggml.session.answer import Answer
from dflash_ggml.session.events import Begin, Finish, Progress
from dflash_ggml.session.hooks import Hooks
from dflash_ggml.session.prefix_cache import common_prefix
from dflash_ggml.session.requests import ChatRequest, GrammarSpec
from dflash_ggml.session.session import run_chat, run_completion
from reference.fake_engine import FakeSlot
from reference.scheduled import alone, batched, request, session, submitted

ENDLESS: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}


class FixedBudget:
    """Between two steps one chunk of the first prompt, while `is_open`, or none; records what was prefilled."""

    def __init__(self, is_open: bool = True) -> None:
        self.is_open, self._is_spent, self.chunks = is_open, False, list[int]()

    def choose(self, prompts: Sequence[Any], n_decoding: int, now: float) -> tuple[int, int] | None:
        if n_decoding and (self._is_spent or not self.is_open):
            return None
        self._is_spent = True
        return 0, 16

    def prefilled(
        self, tokens: int, seconds: float, decoding: bool, is_warm: bool, is_scoring: bool = False
    ) -> None:
        self.chunks.append(tokens)

    def decoded(self, seconds: float, n: int) -> None:
        self._is_spent = False

    def debit(self, seconds: float) -> None:
        pass


def decoding(on: Any, **options: Any) -> Any:
    """A generation that decodes."""
    (found,) = submitted(on, request(0, **ENDLESS), **options)
    while not found.is_decoding:
        on.scheduler.iterate()
    return found


def counts(on: Any) -> dict[str, int]:
    """Number of running and of waiting generations (for a slot, or preempted)."""
    running, waiting = on.scheduler.running, on.scheduler.waiting
    preempted = sum(generation.preempted is not None for generation in running)
    return {"running": len(running) - preempted, "waiting": len(waiting) + preempted}


def prefilled(on: Any) -> list[int]:
    """Tokens of all chunks so far."""
    return [entry[2] for entry in on.engine.log if entry[0] == "read"]


def reason(generation: Any) -> str:
    finish = Answer.of(generation.events).finish
    assert finish is not None
    return finish.reason


@pytest.mark.parametrize("has_thread", [False, True], ids=["by callers", "by a thread"])
@pytest.mark.parametrize("parallel", [1, 2, 4])
def test_each_sequence_is_what_it_would_be_alone(parallel: int, has_thread: bool) -> None:
    """Ten requests of different sampling, lengths, grammars and modes, on fewer slots."""
    on = session(parallel)
    requests = [request(i) for i in range(7)]
    requests += [request(7, mode="plain"), request(8, logprobs=2), request(9, stop=("e",))]
    found = submitted(on, *requests)
    if has_thread:
        on.scheduler.start()
    answers = [Answer.of(on.scheduler.events(one)) for one in found]
    for answer, one in zip(answers, requests):
        expected = alone(one)
        assert answer.text == expected.text and answer.finish == expected.finish
        assert answer.logprobs == expected.logprobs
    assert counts(on) == {"running": 0, "waiting": 0}
    assert parallel == 1 or on.scheduler.tally.sequences > on.scheduler.tally.passes
    on.close()


@pytest.mark.parametrize("seed", range(6))
def test_random_arrivals_and_cancellations(seed: int) -> None:
    """Requests come and are given up at random; the others are not affected, and nothing is left behind."""
    rng = random.Random(seed)
    on = session(rng.choice([2, 3, 4]), n_ctx=512)
    requests = [request(i) for i in range(12)]
    waiting, found, given_up = list(range(12)), dict[int, Any](), set[int]()
    while waiting or on.scheduler.is_busy:
        if waiting and (not on.scheduler.is_busy or rng.random() < 0.4):
            i = waiting.pop(0)
            (found[i],) = submitted(on, requests[i])
        running = [i for i, one in found.items() if not one.ended]
        if running and rng.random() < 0.08:
            given_up.add(i := rng.choice(running))
            on.scheduler.abandon(found[i])
        on.scheduler.iterate()
    assert given_up
    for i in set(range(12)) - given_up:
        assert Answer.of(found[i].events).text == alone(requests[i]).text
    assert not any(slot.busy for slot in on.slots.all)
    on.close()
    assert on.engine.slots == []


# ---- cache rows


def test_sequences_have_a_step_between_two_slots_whose_rows_are_copied() -> None:
    """Five prompts come at once for slots that hold others, beside a sequence that decodes."""
    on = session(6, n_ctx=6000)
    asked = [request(i, prompt=f"{i} " + "word " * 120, max_tokens=5) for i in range(12)]
    batched(on, asked[:6])
    decoding(on)
    found = submitted(on, *asked[6:11])
    most = 0
    while not all(one.ended for one in found):
        before, waiting = on.slots.copies, counts(on)["waiting"]
        on.scheduler.iterate()
        if on.slots.copies > before:
            admitted = waiting - counts(on)["waiting"]
            most = max(most, admitted)
    assert most == 1
    on.close()


def test_the_newest_is_preempted_where_rows_run_out_and_goes_on_later() -> None:
    """Three sequences that come to need more rows than there are: all end as they would alone."""
    on = session(3, n_ctx=600)
    requests = [request(i, prompt="word " * 20, max_tokens=300, ignore_eos=True) for i in range(3)]
    assert [answer.text for answer in batched(on, requests)] == [alone(one).text for one in requests]
    assert 0 < on.scheduler.tally.preemptions <= 4  # rows are taken before their owners come back
    on.close()


@pytest.mark.parametrize("what", ["snapshot", "restore", "resume"])
def test_a_sequence_that_cannot_be_preempted_ends_alone(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on = session(2, n_ctx=520)
    requests = [request(i, prompt="word " * 20, max_tokens=350, ignore_eos=True) for i in range(2)]
    found = submitted(on, *requests)
    while not all(one.is_decoding for one in found):
        on.scheduler.iterate()

    def broken(*_: Any) -> None:
        raise DeviceError("no memory for a copy")

    with monkeypatch.context() as patch:
        patch.setattr(FakeSlot, what, broken)
        while on.scheduler.is_busy:
            on.scheduler.iterate()
    assert isinstance(found[1].error, DeviceError)
    assert found[0].error is None and Answer.of(found[0].events).text == alone(requests[0]).text
    assert not any(slot.busy for slot in on.slots.all)
    assert Answer.of(run_completion(on, requests[1])).text == alone(requests[1]).text
    on.close()


def test_a_sequence_may_have_the_whole_context() -> None:
    """No sequence ends for another's length."""
    on = session(2, n_ctx=256)
    requests = [request(i, max_tokens=-1, ignore_eos=True) for i in (1, 2)]
    found = batched(on, requests)
    assert [a.finish.reason for a in found] == ["length", "length"]
    assert all(a.usage.prompt_n + a.usage.predicted_n >= 256 for a in found)
    on.close()


def test_a_preempted_sequence_can_be_cancelled() -> None:
    on, stop = session(2, n_ctx=560), threading.Event()
    requests = [request(i, prompt=f"{i}word " * 20, max_tokens=400, ignore_eos=True) for i in range(2)]
    (first,) = submitted(on, requests[0])
    (second,) = submitted(on, requests[1], should_stop=stop.is_set)
    while second.preempted is None:
        on.scheduler.iterate()
    assert counts(on) == {"running": 1, "waiting": 1}
    stop.set()
    while on.scheduler.is_busy:
        on.scheduler.iterate()
    assert (reason(second), reason(first)) == ("cancelled", "length")
    on.close()


def test_a_sequence_that_is_short_of_rows_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that is being prefilled has them."""
    on, stop = session(2, n_ctx=4096), threading.Event()
    first = decoding(on, should_stop=stop.is_set)
    on.scheduler.budget = FixedBudget(is_open=False)  # type: ignore[assignment]
    (second,) = submitted(on, request(1, prompt="long " * 600))
    monkeypatch.setattr(on.engine, "step", lambda runs: [NoRoomError("no rows") for _ in runs])
    monkeypatch.setattr(on.scheduler, "_grow", lambda generation: False)
    on.scheduler.iterate()
    assert first.lacks_rows and second.is_prefilling
    stop.set()
    on.scheduler.iterate()
    assert first.ended and first.error is None and reason(first) == "cancelled"
    assert second.is_prefilling and sum(slot.busy for slot in on.slots.all) == 1
    on.close()


# ---- prompts


def test_a_prompt_is_prefilled_in_chunks_between_steps() -> None:
    on = session(2)
    engine: Any = on.engine
    first, budget = decoding(on), FixedBudget(is_open=False)
    on.scheduler.budget = budget  # type: ignore[assignment]
    (second,) = submitted(on, request(1, prompt="long " * 100))
    del engine.log[:]
    for _ in range(5):
        on.scheduler.iterate()
    assert {kind for kind, *_ in engine.log} == {"step"}
    budget.is_open = True
    while second.is_prefilling:
        on.scheduler.iterate()
    kinds = [kind for kind, *_ in engine.log]
    begin = kinds.index("read")
    assert first.is_decoding and kinds[begin:].count("read") > 10
    assert kinds[begin:] == ["read", "step"] * (len(kinds[begin:]) // 2)
    assert sum(budget.chunks) == sum(prefilled(on)) == len(second.ids)
    on.close()


@pytest.mark.parametrize("has_logits", [True, False], ids=["with its logits", "without"])
def test_a_slot_that_has_the_whole_prompt(has_logits: bool) -> None:
    """With the logits nothing is prefilled, and there is nothing to wait for."""
    on = session(2)
    decoding(on)
    ids = [72 + i % 20 for i in range(90)]
    slot = on.slots.take(ids, 200)
    assert slot is not None
    slot.load(ids)
    slot._has_logits = has_logits
    slot.release()
    on.scheduler.budget = FixedBudget(is_open=False)  # type: ignore[assignment]
    (found,) = submitted(on, request(1, prompt=ids))
    on.scheduler.iterate()
    assert found.slot is slot and found.is_decoding is has_logits
    assert (found.remaining > 0) is not has_logits
    on.close()


def test_the_budget_chooses_the_prompt() -> None:
    """A short one that came later may be first."""
    on = session(3)
    decoding(on)
    budget = FixedBudget()
    budget.choose = lambda prompts, *_: (len(prompts) - 1, 16) if len(prompts) > 1 else None  # type: ignore[method-assign, assignment]
    on.scheduler.budget = budget  # type: ignore[assignment]
    long, short = submitted(on, request(1, prompt="long " * 60), request(2, prompt="hi"))
    for _ in range(3):
        on.scheduler.iterate()
    assert short.is_decoding and long.remaining == len(long.ids)
    on.close()


def prompts_on_used_slots() -> list[str]:
    """On a slot with another sequence, behind a restored prefix, on a slot that continues."""
    shared = "one system prompt for all " * 20
    return ["a" * 10, "b" * 20, "Z" * 300, shared + "first", "Y" * 700, shared + "second", "X" * 90]


def test_the_budget_receives_what_was_prefilled() -> None:
    on, budget = session(2, n_ctx=4096), FixedBudget()
    on.scheduler.budget = budget  # type: ignore[assignment]
    for prompt in prompts_on_used_slots():
        prompted = request(0, prompt=prompt)
        del on.engine.log[:], budget.chunks[:]  # type: ignore[attr-defined]
        (found,) = submitted(on, prompted)
        on.scheduler._admit()
        remaining = found.remaining
        while not found.ended:
            on.scheduler.iterate()
        begin = Answer.of(found.events).begin
        assert budget.chunks == prefilled(on)
        assert begin is not None and remaining == begin.prompt_n - begin.cached_n == sum(budget.chunks)
    on.close()


def test_a_common_prefix_is_prefilled_once() -> None:
    """Eight questions about one document, which arrive together."""
    on = session(4, n_ctx=4096)
    text = "a long text about something " * 20
    requests = [request(i, prompt=text + f"question {i}?") for i in range(8)]
    found = batched(on, requests)
    assert [a.text for a in found] == [alone(one).text for one in requests]
    assert sum(prefilled(on)) <= len(on.prepare(requests[0]).ids) + 7 * 20
    assert sum(a.begin.cached_n > 0 for a in found) == 7
    on.close()


def test_a_common_prefix_is_prefilled_once_on_a_slot_that_had_a_longer_sequence() -> None:
    on = session(2, n_ctx=4096)
    for letter in "ab":
        list(run_completion(on, request(0, prompt=letter * 900)))
    text = "a long text about something " * 12
    requests = [request(i, prompt=text + f"question {i}?") for i in range(2)]
    del on.engine.log[:]  # type: ignore[attr-defined]
    batched(on, requests)
    assert sum(prefilled(on)) <= len(on.prepare(requests[0]).ids) + 20
    on.close()


def test_a_common_prefix_is_kept_for_one_that_came_before_the_first_chunk() -> None:
    """Two prompts that come at once, where a pass takes all of one: it ends where the other parts from it."""
    on = session(2, n_ctx=4096, n_batch=2048)
    text = "a long text about something " * 20
    requests = [request(i, prompt=text + f"{i}: a question of its own " * 3) for i in range(2)]
    found = batched(on, requests)
    ids = [on.prepare(one).ids for one in requests]
    assert found[1].begin.cached_n == common_prefix(*ids) > 300
    assert [answer.text for answer in found] == [alone(one).text for one in requests]
    on.close()


def test_nothing_is_kept_for_a_prompt_that_was_given_up_before_its_first_chunk() -> None:
    """The next prompt on its slot is prefilled as if none had waited there."""
    ids = [72 + i % 20 for i in range(600)]
    fresh, on = (session(2, n_ctx=4096, n_batch=2048) for _ in range(2))
    list(run_completion(fresh, request(2, prompt=ids)))
    text = "a long text about something " * 20
    requests = [request(i, prompt=text + f"{i}: a question of its own " * 3) for i in range(2)]
    found = submitted(on, *requests)
    on.scheduler._admit()
    slot = found[0].slot
    assert slot is not None and found[1].slot is None
    for generation in found:
        on.scheduler.abandon(generation)
    assert not slot.busy
    list(run_completion(on, request(2, prompt=ids)))
    assert prefilled(on) == prefilled(fresh)
    assert {entry[1] for entry in on.engine.log if entry[0] == "read"} == {slot.slot}  # type: ignore[attr-defined]
    on.close()


def test_the_next_turn_continues_in_its_slot() -> None:
    """Two alternating conversations on two slots: each finds its own."""
    on = session(2)
    talks = [[{"role": "user", "content": f"{i} tell me more " * 6}] for i in range(2)]
    for turn in range(3):
        for talk in talks:
            asked = ChatRequest(messages=talk, sampling=SamplingParams(temperature=0), max_tokens=8)
            answer = Answer.of(run_chat(on, asked))
            assert answer.begin is not None
            assert turn == 0 or answer.begin.cached_n > 0.6 * answer.begin.prompt_n
            talk += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "and then?"}]
    on.close()


def test_a_lone_sequence_has_the_first_state() -> None:
    """Its passes are those of an engine with one slot; what it takes the slot of is kept."""
    on = session(3)
    engine: Any = on.engine
    talk = ChatRequest(
        messages=[{"role": "user", "content": "tell me more " * 9}],
        sampling=SamplingParams(temperature=0),
        max_tokens=8,
    )
    for one in (talk, request(1), request(2)):
        run = run_chat if isinstance(one, ChatRequest) else run_completion
        list(run(on, one))
    assert {slot.state_index for kind, slots, *_ in engine.log if kind == "step" for slot in slots} == {0}
    again = Answer.of(run_chat(on, talk))
    assert again.begin is not None and again.begin.cached_n > 0.5 * again.begin.prompt_n
    on.close()


# ---- what fails, and what is cancelled


def test_one_that_fails_ends_alone() -> None:
    """A sampler's processor that raises, in the middle."""
    on, calls = session(3), list[int]()

    def bad(history: Any, scores: Any) -> Any:
        calls.append(1)
        if len(calls) > 5:
            raise ZeroDivisionError("bad")
        return scores

    (broken,) = submitted(on, request(1), hooks=Hooks(logits_processor=(bad,)))
    others = submitted(on, request(0), request(2))
    while on.scheduler.is_busy:
        on.scheduler.iterate()
    assert isinstance(broken.error, ZeroDivisionError)
    for i, other in zip((0, 2), others):
        assert Answer.of(other.events).text == alone(request(i)).text
    assert Answer.of(run_completion(on, request(1))).text == alone(request(1)).text
    on.close()


def test_a_broken_pass_ends_all_that_were_in_it_and_nothing_else() -> None:
    on = session(3)
    found = submitted(on, *(request(i, max_tokens=300, ignore_eos=True) for i in (0, 1)))
    while not all(one.is_decoding for one in found):
        on.scheduler.iterate()
    on.engine.broken = DeviceError("the device is gone")  # type: ignore[attr-defined]
    on.scheduler.iterate()
    assert all(isinstance(one.error, DeviceError) for one in found)
    assert Answer.of(run_completion(on, request(2))).text == alone(request(2)).text
    on.close()


def test_an_interrupt_ends_what_was_in_work_and_leaves_usable_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    on = session(2)
    found = submitted(on, *(request(i, **ENDLESS) for i in range(2)))
    while not all(one.is_decoding for one in found):
        on.scheduler.iterate()
    slots = [slot.slot for slot in on.slots.all]

    def interrupted(runs: Any) -> Any:
        for slot in slots:
            slot._inconsistent = True  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(on.engine, "step", interrupted)
        on.scheduler.iterate()
    assert all(one.error is not None for one in found)
    assert [a.text for a in batched(on, [request(i) for i in range(2)])] == [
        alone(request(i)).text for i in range(2)
    ]
    on.close()


def test_a_request_that_waits_can_be_cancelled() -> None:
    on, stop = session(1), threading.Event()
    (first,) = submitted(on, request(0, **ENDLESS))
    (second,) = submitted(on, request(1, **ENDLESS), should_stop=stop.is_set)
    for _ in range(3):
        on.scheduler.iterate()
    assert counts(on) == {"running": 1, "waiting": 1}
    stop.set()
    on.scheduler.iterate()
    assert second.ended and not first.ended
    answer = Answer.of(second.events)
    assert answer.finish is not None and answer.finish.reason == "cancelled" and not answer.text
    on.close()


@pytest.mark.parametrize("chunks", [0, 1, 2])
@pytest.mark.parametrize("whole", [False, True], ids=["", "with logprobs of the prompt"])
def test_a_prompt_that_waits_for_its_next_chunk_can_be_cancelled(chunks: int, whole: bool) -> None:
    on, stop = session(2, n_ctx=4096), threading.Event()
    first, budget = decoding(on), FixedBudget(is_open=chunks > 0)
    on.scheduler.budget = budget  # type: ignore[assignment]
    prompted = request(1, prompt="long " * 100, prompt_logprobs=whole)
    (second,) = submitted(on, prompted, should_stop=stop.is_set)
    while sum(isinstance(event, Progress) for event in second.events) < chunks or second.slot is None:
        on.scheduler.iterate()
    budget.is_open = False
    del on.engine.log[:]  # type: ignore[attr-defined]
    stop.set()
    on.scheduler.iterate()
    assert second.ended and second.error is None and not prefilled(on)
    answer = Answer.of(second.events)
    assert answer.finish is not None and answer.finish.reason == "cancelled" and not answer.text
    assert first.is_decoding and sum(slot.busy for slot in on.slots.all) == 1
    on.close()


def test_a_prompt_that_cannot_be_is_refused_alone() -> None:
    on = session(2, n_ctx=256)
    with pytest.raises(ContextOverflowError):
        list(run_completion(on, request(1, prompt="x" * 400)))
    with pytest.raises(ConfigError):
        list(run_completion(on, request(1, prompt=[99999])))
    with pytest.raises(ConfigError, match="use run_chat"):
        list(run_completion(on, on.prepare(ChatRequest(messages=[{"role": "user", "content": "x"}]))))
    assert not on.scheduler.is_busy
    on.close()


def test_a_grammar_is_its_request_s_own() -> None:
    pytest.importorskip("llguidance")
    on = session(3)
    digits = GrammarSpec("regex", "[0-9]{5}")
    found = batched(on, [request(0), request(1, grammar=digits), request(2)])
    assert found[1].text.isdigit() and len(found[1].text) == 5
    assert found[0].text == alone(request(0)).text and found[2].text == alone(request(2)).text
    on.close()


def test_progress_comes_before_the_first_word() -> None:
    on = session(2)
    kinds = [type(event) for event in run_completion(on, request(3))]
    assert kinds[0] is Begin and kinds[1] is Progress and kinds[-1] is Finish
    on.close()
