"""Generations side by side on the toy engine: the same texts as alone, whoever joins, leaves, fails or is parked."""

from __future__ import annotations

import random
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import SamplingParams
from dflash_ggml.errors import ConfigError, ContextOverflowError, DeviceError, DflashError
from dflash_ggml.session.answer import Answer
from dflash_ggml.session.embedding import embed
from dflash_ggml.session.events import Begin, Finish, Progress
from dflash_ggml.session.hooks import Hooks
from dflash_ggml.session.requests import ChatRequest, CompletionRequest, GrammarSpec
from dflash_ggml.session.session import Session, completion_generation, run_chat, run_completion
from reference.fake_engine import FakeEngine
from reference.fake_places import FakePlace, FakePlaces

GUARD_S = 60


def config(n_ctx: int = 1024) -> EngineConfig:
    return EngineConfig(model=Path("toy.gguf"), n_ctx=n_ctx, n_batch=32)


def session(parallel: int = 4, n_ctx: int = 1024, **options: Any) -> Session:
    return Session(FakePlaces(config(n_ctx), parallel=parallel), side_by_side=True, **options)  # type: ignore[arg-type]


def request(i: int, **options: Any) -> CompletionRequest:
    """A prompt of its own, with sampling of its own."""
    sampling = SamplingParams(temperature=0 if i % 3 == 0 else 0.5 + 0.2 * (i % 4), seed=i)
    return CompletionRequest(
        **{
            "prompt": f"{i} text " * (3 + 5 * (i % 4)),
            "sampling": sampling,
            "max_tokens": 12 + 3 * (i % 5),
            **options,
        }
    )


def alone(asked: Any) -> Answer:
    run = run_chat if isinstance(asked, ChatRequest) else run_completion
    return Answer.of(run(Session(FakeEngine(config())), asked))  # type: ignore[arg-type]


def together(on: Session, asked: list[Any]) -> list[Any]:
    """The answers of requests, or what they raised, each read by a thread of its own."""
    runs = [run_completion(on, one) for one in asked]
    answers: list[Any] = [Answer() for _ in asked]
    threads = [threading.Thread(target=_read, args=(run, answers, i)) for i, run in enumerate(runs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GUARD_S)
        assert not thread.is_alive()
    return answers


def _read(run: Any, answers: list[Any], i: int) -> None:
    try:
        for event in run:
            answers[i].feed(event)
    except Exception as error:  # noqa: BLE001 - what a test looks at
        answers[i] = error


@pytest.mark.parametrize("driven", [False, True], ids=["by callers", "by a thread"])
@pytest.mark.parametrize("parallel", [1, 2, 4])
def test_each_text_is_what_it_would_be_alone(parallel: int, driven: bool) -> None:
    """Ten requests of different sampling, lengths, grammars and modes, on fewer places."""
    on = session(parallel)
    asked = [request(i) for i in range(7)]
    asked += [request(7, mode="plain"), request(8, logprobs=2), request(9, stop=("e",))]
    tasks = [on.scheduler.submit(on.prepare(one), partial(events, on, one)) for one in asked]
    if driven:
        on.scheduler.start()
    while not all(task.ended for task in tasks):
        if not driven:
            on.scheduler.round()
    for answer, one in zip([Answer.of(task.events) for task in tasks], asked):
        expected = alone(one)
        assert answer.text == expected.text and answer.finish == expected.finish
        assert answer.logprobs == expected.logprobs
    counts = on.scheduler
    assert counts.counts == {"running": 0, "waiting": 0}
    assert parallel == 1 or counts.sequences > counts.passes
    on.close()


@pytest.mark.parametrize("seed", range(6))
def test_random_arrivals_and_cancellations(seed: int) -> None:
    """Requests come and are given up at random; the others do not notice, and nothing is left behind."""
    rng = random.Random(seed)
    on = session(rng.choice([2, 3, 4]), n_ctx=512)
    asked = [request(i) for i in range(12)]
    waiting, reading = list(range(12)), dict[int, Any]()
    answers = {i: Answer() for i in range(12)}
    given_up = set()
    while waiting or reading:
        if waiting and (not reading or rng.random() < 0.4):
            i = waiting.pop(0)
            reading[i] = run_completion(on, asked[i])
        i = rng.choice(list(reading))
        if rng.random() < 0.04:
            reading.pop(i).close()
            given_up.add(i)
            continue
        event = next(reading[i], None)
        if event is None:
            del reading[i]
        else:
            answers[i].feed(event)
    for i in set(range(12)) - given_up:
        assert answers[i].text == alone(asked[i]).text
    assert not on.scheduler._running and not on.scheduler._waiting
    assert not any(seat.busy for seat in on.scheduler.seats.all)
    on.close()
    assert on.engine.places == []  # type: ignore[attr-defined]


def test_the_newest_is_parked_where_rows_run_out_and_goes_on_later() -> None:
    """Three texts that come to need more rows than there are: all end as they would alone."""
    on = session(3, n_ctx=600)
    asked = [request(i, prompt="word " * 20, max_tokens=300, ignore_eos=True) for i in range(3)]
    found = together(on, asked)
    assert [answer.text for answer in found] == [alone(one).text for one in asked]
    assert 0 < on.scheduler.parkings <= 4  # who is short takes the rows before they are gone again
    on.close()


@pytest.mark.parametrize("what", ["snapshot", "restore", "resume"])
def test_a_text_that_cannot_be_parked_ends_alone(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on = session(2, n_ctx=520)
    asked = [request(i, prompt="word " * 20, max_tokens=350, ignore_eos=True) for i in range(2)]
    tasks = [on.scheduler.submit(on.prepare(one), partial(events, on, one)) for one in asked]
    while not all(task.is_written for task in tasks):
        on.scheduler.round()

    def broken(*_: Any) -> None:
        raise DeviceError("no memory for a copy")

    with monkeypatch.context() as patch:
        patch.setattr(FakePlace, what, broken)
        while not all(task.ended for task in tasks):
            on.scheduler.round()
    assert isinstance(tasks[1].error, DeviceError)
    assert tasks[0].error is None and Answer.of(tasks[0].events).text == alone(asked[0]).text
    assert not any(seat.busy for seat in on.scheduler.seats.all)
    assert Answer.of(run_completion(on, asked[1])).text == alone(asked[1]).text
    on.close()


def test_a_text_may_have_the_whole_context() -> None:
    """No text ends for another's length: alone on the device it fills the context."""
    on = session(2, n_ctx=256)
    asked = [request(1, max_tokens=-1, ignore_eos=True), request(2, max_tokens=-1, ignore_eos=True)]
    found = together(on, asked)
    assert [a.finish.reason for a in found] == ["length", "length"]
    assert all(a.usage.prompt_n + a.usage.predicted_n >= 256 for a in found)
    on.close()


def test_a_parked_text_can_be_cancelled() -> None:
    on = session(2, n_ctx=520)
    stop = threading.Event()
    first = run_completion(on, request(0, prompt="word " * 20, max_tokens=400, ignore_eos=True))
    second = run_completion(
        on, request(1, prompt="other " * 20, max_tokens=400, ignore_eos=True), should_stop=stop.is_set
    )
    next(first), next(second)
    while not any(task.parked for task in on.scheduler._running):
        next(first)
    stop.set()
    assert next(event for event in second if isinstance(event, Finish)).reason == "cancelled"
    assert next(event for event in first if isinstance(event, Finish)).reason == "length"
    on.close()


# ---- prompts


def test_a_prompt_is_read_in_pieces_while_others_write() -> None:
    """Between two pieces of a long prompt the others step; once their time is used up, several times."""
    on = session(2)
    engine: Any = on.engine
    asked = [request(0, max_tokens=400, ignore_eos=True), request(1, prompt="long " * 100)]
    writer = on.scheduler.submit(on.prepare(asked[0]), partial(events, on, asked[0]))
    for _ in range(5):
        on.scheduler.round()
    assert writer.run is not None
    on.scheduler.pace.level = -1e9
    reader = on.scheduler.submit(on.prepare(asked[1]), partial(events, on, asked[1]))
    del engine.log[:]
    for _ in range(20):
        on.scheduler.round()
    assert {kind for kind, *_ in engine.log} == {"step"}  # nothing is owed to a reader
    on.scheduler.pace.level = 1e9
    for _ in range(200):
        on.scheduler.round()
        if reader.run is not None:
            break
    kinds = [kind for kind, *_ in engine.log]
    first, last = kinds.index("read"), len(kinds) - 1 - kinds[::-1].index("read")
    reads = kinds[first:last].count("read")
    assert reader.run is not None and writer.run is not None and reads > 2
    assert kinds[first:last].count("step") >= reads - 1
    on.close()


def test_a_short_prompt_overtakes_a_long_one() -> None:
    on = session(3)
    asked = [request(1, prompt="long " * 60), request(2, prompt="hi")]
    long, short = (on.scheduler.submit(on.prepare(one), partial(events, on, one)) for one in asked)
    for _ in range(3):
        on.scheduler.round()
    assert short.run is not None and long.is_reading
    on.close()


def events(on: Session, asked: CompletionRequest, seat: Any) -> Any:
    """What a task runs."""
    return completion_generation(on, on.prepare(asked), seat).events()


def test_a_common_prefix_is_read_once() -> None:
    """Eight questions about one text, which come together: the text is read by one of them."""
    on = session(4, n_ctx=4096)
    engine: Any = on.engine
    text = "a long text about something " * 20
    asked = [request(i, prompt=text + f"question {i}?") for i in range(8)]
    tasks = [on.scheduler.submit(on.prepare(one), partial(events, on, one)) for one in asked]
    while not all(task.ended for task in tasks):
        on.scheduler.round()
    found = [Answer.of(task.events) for task in tasks]
    assert [a.text for a in found] == [alone(one).text for one in asked]
    n = len(on.prepare(asked[0]).ids)
    read = sum(count for kind, _, *rest in engine.log if kind == "read" for count in rest)
    assert read <= n + 7 * 20
    assert sum(a.begin.cached_n > 0 for a in found) == 7
    on.close()


def test_the_next_turn_goes_on_where_its_text_stands() -> None:
    """Two conversations by turns on two places: each finds its own."""
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


def test_a_text_that_is_alone_has_the_first_lane() -> None:
    """Its passes are those of an engine with one text; what it takes the place of is kept."""
    on = session(3)
    engine: Any = on.engine
    talk = ChatRequest(
        messages=[{"role": "user", "content": "tell me more " * 9}],
        sampling=SamplingParams(temperature=0),
        max_tokens=8,
    )
    for asked in (talk, request(1), request(2)):
        run = run_chat if isinstance(asked, ChatRequest) else run_completion
        list(run(on, asked))
    assert {place.lane for kind, places, *_ in engine.log if kind == "step" for place in places} == {0}
    again = Answer.of(run_chat(on, talk))
    assert again.begin is not None and again.begin.cached_n > 0.5 * again.begin.prompt_n
    on.close()


# ---- what fails


def test_one_that_fails_ends_alone() -> None:
    """A sampler's processor that raises, in the middle."""
    on = session(3)
    calls = 0

    def bad(history: Any, scores: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 5:
            raise ZeroDivisionError("bad")
        return scores

    broken = run_completion(on, request(1), hooks=Hooks(logits_processor=(bad,)))
    others = [run_completion(on, request(i)) for i in (0, 2)]
    answers = [Answer(), Answer()]
    for answer, run in zip(answers, others):
        answer.feed(next(run))
    with pytest.raises(ZeroDivisionError):
        list(broken)
    for i, answer, run in zip((0, 2), answers, others):
        for event in run:
            answer.feed(event)
        assert answer.text == alone(request(i)).text
    assert Answer.of(run_completion(on, request(1))).text == alone(request(1)).text
    on.close()


def test_a_broken_pass_ends_all_that_were_in_it_and_nothing_else() -> None:
    on = session(3)
    runs = [run_completion(on, request(i, max_tokens=300, ignore_eos=True)) for i in (0, 1)]
    for run in runs:
        next(run)
    for _ in range(9):
        on.scheduler.round()
    on.engine.broken = DeviceError("the device is gone")  # type: ignore[attr-defined]
    for run in runs:
        with pytest.raises(DeviceError, match="is gone"):
            list(run)
    assert Answer.of(run_completion(on, request(2))).text == alone(request(2)).text
    on.close()


def test_a_fault_in_a_round_ends_those_in_it_and_not_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    on = session(2)
    on.scheduler.start()
    with monkeypatch.context() as patch:
        patch.setattr(on.scheduler, "_read", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            list(run_completion(on, request(1)))
    assert Answer.of(run_completion(on, request(1))).text == alone(request(1)).text
    on.close()


class Panic(BaseException):
    """What a library in another language raises."""


def test_a_panic_ends_those_in_the_round_and_not_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    on = session(2)
    on.scheduler.start()

    def panics() -> None:
        raise Panic("at once")

    with monkeypatch.context() as patch:
        patch.setattr(on.scheduler, "_read", panics)
        with pytest.raises(DflashError, match="at once"):
            list(run_completion(on, request(1)))
    assert Answer.of(run_completion(on, request(1))).text == alone(request(1)).text
    on.close()


def test_a_request_that_waits_can_be_cancelled() -> None:
    on, stop = session(1), threading.Event()
    asked = [request(i, max_tokens=200, ignore_eos=True) for i in range(2)]
    first, second = (
        on.scheduler.submit(on.prepare(one), partial(events, on, one), stops)
        for one, stops in zip(asked, (None, stop.is_set))
    )
    for _ in range(3):
        on.scheduler.round()
    assert on.scheduler.counts == {"running": 1, "waiting": 1}
    stop.set()
    on.scheduler.round()
    assert second.ended and not first.ended
    answer = Answer.of(second.events)
    assert answer.finish is not None and answer.finish.reason == "cancelled" and not answer.text
    on.close()


def test_requests_that_come_while_others_are_looked_at() -> None:
    """Many threads that queue and give up all the time."""
    on = session(2)
    on.scheduler.start()
    failed: list[Exception] = []

    def client(number: int) -> None:
        try:
            for i in range(20):
                run = run_completion(on, request(number, max_tokens=3))
                if i % 3:
                    list(run)
                else:
                    next(run)
                    run.close()
        except Exception as error:  # noqa: BLE001 - what a test looks at
            failed.append(error)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GUARD_S)
    assert not failed and not any(thread.is_alive() for thread in threads)
    on.close()


def test_a_prompt_that_cannot_be_is_refused_alone() -> None:
    on = session(2, n_ctx=256)
    with pytest.raises(ContextOverflowError):
        list(run_completion(on, request(1, prompt="x" * 400)))
    with pytest.raises(ConfigError):
        list(run_completion(on, request(1, prompt=[99999])))
    with pytest.raises(ConfigError, match="use run_chat"):
        list(run_completion(on, on.prepare(ChatRequest(messages=[{"role": "user", "content": "x"}]))))
    assert not on.scheduler._running and not on.scheduler._waiting
    on.close()


def test_a_grammar_is_its_request_s_own() -> None:
    pytest.importorskip("llguidance")
    on = session(3)
    digits = GrammarSpec("regex", "[0-9]{5}")
    found = together(on, [request(0), request(1, grammar=digits), request(2)])
    assert found[1].text.isdigit() and len(found[1].text) == 5
    assert found[0].text == alone(request(0)).text and found[2].text == alone(request(2)).text
    on.close()


def test_a_call_from_inside_a_step_is_refused() -> None:
    on = session(2)

    def meddle(step: Any) -> None:
        list(run_completion(on, request(2)))

    with pytest.raises(ConfigError, match="inside a step"):
        list(run_completion(on, request(1), hooks=Hooks(on_step=meddle)))
    on.close()


def test_closing_ends_what_runs() -> None:
    on = session(2)
    on.scheduler.start()
    run = run_completion(on, request(0, max_tokens=400, ignore_eos=True))
    next(run)
    on.close()
    with pytest.raises((DflashError, ConfigError)):
        list(run)
    with pytest.raises(ConfigError, match="closed"):
        list(run_completion(on, request(1)))


@pytest.mark.parametrize("driven", [False, True])
def test_embeddings_beside_texts(driven: bool) -> None:
    on = session(2)
    if driven:
        on.scheduler.start()
    run = run_completion(on, request(0, max_tokens=60))
    next(run)
    vector = embed(on, [72, 73, 74])
    assert vector.tolist() == embed(Session(FakeEngine(config())), [72, 73, 74]).tolist()  # type: ignore[arg-type]
    answer = Answer.of(run)
    assert alone(request(0, max_tokens=60)).text == answer.text
    on.close()


@pytest.mark.parametrize("driven", [False, True])
def test_embeddings_leave_running_texts_their_rounds(driven: bool) -> None:
    """Two clients that ask for embeddings all the time; one of them long ones."""
    on = session(3)
    scheduler, engine = on.scheduler, on.engine
    tasks = [
        scheduler.submit(on.prepare(one), partial(events, on, one))
        for one in (request(i, max_tokens=400, ignore_eos=True) for i in range(2))
    ]
    while not all(task.is_written for task in tasks):
        scheduler.round()
    steps: list[int] = []

    def work(place: Any) -> None:
        steps.append(len(engine.log))  # type: ignore[attr-defined]

    def client() -> None:
        for _ in range(8):
            scheduler.borrow(work)

    if driven:
        scheduler.start()
    threads = [threading.Thread(target=client) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GUARD_S)
        assert not thread.is_alive()
    beside = [n for n in steps if n < len(engine.log)]  # type: ignore[attr-defined]
    assert len(steps) == 16 and len(beside) > 1
    assert len(set(beside)) == len(beside)
    on.close()


def test_what_is_borrowed_waits_until_writers_have_had_their_time() -> None:
    on = session(2)
    run = run_completion(on, request(0, max_tokens=200, ignore_eos=True))
    next(run)
    while not any(task.is_written for task in on.scheduler._running):
        on.scheduler.round()
    assert on.scheduler._lends
    on.scheduler.pace.lent(1e9)
    embed(on, [72, 73, 74])  # once nobody writes any more
    assert not on.scheduler._running
    on.close()


def test_idle_seats_give_their_rows_to_an_embedding() -> None:
    on = session(2, n_ctx=600)
    runs = [run_completion(on, request(i, prompt="word " * 50, max_tokens=3)) for i in range(2)]
    for run in runs:
        next(run)
    for run in runs:
        list(run)
    assert sum(place.rows for place in on.engine.places) > 400  # type: ignore[attr-defined]
    expected = embed(Session(FakeEngine(config())), [72] * 500)  # type: ignore[arg-type]
    assert embed(on, [72] * 500).tolist() == expected.tolist()
    on.close()


def test_an_embedding_waits_for_rows() -> None:
    """Two texts hold nearly all rows: a long text by itself is read once one of them has ended."""
    on = session(3, n_ctx=600)
    on.scheduler.start()
    answers = [Answer(), Answer()]
    runs = [
        run_completion(on, request(i, prompt="word " * 20, max_tokens=150, ignore_eos=True)) for i in range(2)
    ]
    threads = [threading.Thread(target=_read, args=(run, answers, i)) for i, run in enumerate(runs)]
    for thread in threads:
        thread.start()
    vector = embed(on, [72] * 300)
    for thread in threads:
        thread.join(GUARD_S)
    assert vector.tolist() == embed(Session(FakeEngine(config())), [72] * 300).tolist()  # type: ignore[arg-type]
    assert all(answer.finish is not None for answer in answers)
    with pytest.raises(ContextOverflowError):
        embed(on, [72] * 700)
    on.close()


def test_progress_comes_before_the_first_word() -> None:
    on = session(2)
    kinds = [type(event) for event in run_completion(on, request(3))]
    assert kinds[0] is Begin and kinds[1] is Progress and kinds[-1] is Finish
    on.close()
