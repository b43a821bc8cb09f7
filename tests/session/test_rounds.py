"""Generations side by side on the toy engine: the same texts as alone, whoever joins, leaves, fails or is parked."""

from __future__ import annotations

import random
import threading
from functools import partial
from typing import Any

import pytest

from dflash_ggml.decode.sampling import SamplingParams
from dflash_ggml.errors import ConfigError, ContextOverflowError, DeviceError, NoRoomError
from dflash_ggml.session import rounds
from dflash_ggml.session.answer import Answer
from dflash_ggml.session.events import Begin, Finish, Progress
from dflash_ggml.session.hooks import Hooks
from dflash_ggml.session.pace import Pace
from dflash_ggml.session.prefix_cache import common_prefix
from dflash_ggml.session.requests import ChatRequest, GrammarSpec
from dflash_ggml.session.session import completion_generation, run_chat, run_completion
from reference.fake_places import FakePlace
from reference.scheduled import alone, events, request, session, together


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
    rounds = on.scheduler.rounds
    assert rounds.counts == {"running": 0, "waiting": 0}
    assert parallel == 1 or rounds.tally.sequences > rounds.tally.passes
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
    assert not on.scheduler.rounds.running and not on.scheduler.rounds.waiting
    assert not any(seat.busy for seat in on.scheduler.seats.all)
    on.close()
    assert on.engine.places == []  # type: ignore[attr-defined]


def test_the_newest_is_parked_where_rows_run_out_and_goes_on_later() -> None:
    """Three texts that come to need more rows than there are: all end as they would alone."""
    on = session(3, n_ctx=600)
    asked = [request(i, prompt="word " * 20, max_tokens=300, ignore_eos=True) for i in range(3)]
    found = together(on, asked)
    assert [answer.text for answer in found] == [alone(one).text for one in asked]
    assert (
        0 < on.scheduler.rounds.tally.parkings <= 4
    )  # who is short takes the rows before they are gone again
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
    while not any(task.parked for task in on.scheduler.rounds.running):
        next(first)
    stop.set()
    assert next(event for event in second if isinstance(event, Finish)).reason == "cancelled"
    assert next(event for event in first if isinstance(event, Finish)).reason == "length"
    on.close()


def test_a_text_that_waits_for_rows_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those are had by a prompt that is still being read: it has no step in which it would ask."""
    on, stop = session(2, n_ctx=4096), threading.Event()
    asked = request(0, max_tokens=400, ignore_eos=True)
    writer = on.scheduler.submit(on.prepare(asked), partial(events, on, asked), stop.is_set)
    while not writer.is_written:
        on.scheduler.round()
    long = request(1, prompt="long " * 600)
    reader = on.scheduler.submit(on.prepare(long), partial(events, on, long))
    monkeypatch.setattr(on.engine, "step", lambda runs: [NoRoomError("no rows") for _ in runs])
    monkeypatch.setattr(on.scheduler.rounds, "_grows", lambda task: False)
    on.scheduler.round()
    assert writer.is_short and reader.is_reading
    stop.set()
    on.scheduler.round()
    assert writer.ended and writer.error is None and reader.is_reading
    answer = Answer.of(writer.events)
    assert answer.finish is not None and answer.finish.reason == "cancelled"
    assert sum(seat.busy for seat in on.scheduler.seats.all) == 1
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
    on.scheduler.rounds.pace.level = -1e9
    reader = on.scheduler.submit(on.prepare(asked[1]), partial(events, on, asked[1]))
    del engine.log[:]
    for _ in range(20):
        on.scheduler.round()
    assert {kind for kind, *_ in engine.log} == {"step"}  # nothing is owed to a reader
    on.scheduler.rounds.pace.level = 1e9
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


def test_a_prompt_that_has_been_read_does_not_wait_for_the_pace() -> None:
    """Its logits are there: it has its first token in the round of its last piece, however much is owed to those who write."""
    on = session(2)
    first, second = request(0, max_tokens=400, ignore_eos=True), request(1, prompt="hello")
    writer = on.scheduler.submit(on.prepare(first), partial(events, on, first))
    while not writer.is_written:
        on.scheduler.round()
    reader = on.scheduler.submit(on.prepare(second), partial(events, on, second))
    while reader.n_read < len(reader.ids):
        on.scheduler.rounds.pace.level = 1e-9  # for one piece
        on.scheduler.round()
    assert reader.is_written and writer.is_written
    on.close()


@pytest.mark.parametrize("valid", [True, False], ids=["with its logits", "without"])
def test_a_prompt_that_stands_there_whole_waits_only_if_something_is_read(valid: bool) -> None:
    """A seat has exactly the prompt: with the logits after it nothing is read, and nobody waits."""
    on = session(2)
    first = request(0, max_tokens=400, ignore_eos=True)
    writer = on.scheduler.submit(on.prepare(first), partial(events, on, first))
    while not writer.is_written:
        on.scheduler.round()
    ids = [72 + i % 20 for i in range(90)]
    seat = on.scheduler.seats.take(ids, 200)
    assert seat is not None
    seat.engine.prefill(ids)
    if valid:
        seat.evaluated()
    on.scheduler.seats.give_back(seat)
    on.scheduler.rounds.pace.level = -1e9
    asked = request(1, prompt=ids)
    task = on.scheduler.submit(on.prepare(asked), partial(events, on, asked))
    on.scheduler.round()
    assert task.seat is seat
    assert (task.is_written, task.n_left) == ((True, 0) if valid else (False, len(ids)))
    on.close()


def test_a_short_prompt_overtakes_a_long_one() -> None:
    on = session(3)
    asked = [request(1, prompt="long " * 60), request(2, prompt="hi")]
    long, short = (on.scheduler.submit(on.prepare(one), partial(events, on, one)) for one in asked)
    for _ in range(3):
        on.scheduler.round()
    assert short.run is not None and long.is_reading
    on.close()


def test_short_prompts_that_come_all_the_time_do_not_stop_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece a round, and a new short prompt in every one: each fourth piece is the long one's."""
    monkeypatch.setattr(rounds, "LONGEST", 0.0)
    on = session(3)
    engine: Any = on.engine
    asked = request(0, prompt="long " * 60)
    long = on.scheduler.submit(on.prepare(asked), partial(events, on, asked))
    on.scheduler.round()
    del engine.log[:]
    for i in range(200):
        short = request(0, prompt=f"{i} hi", max_tokens=1)
        on.scheduler.submit(on.prepare(short), partial(events, on, short))
        on.scheduler.round()
        if not long.is_reading:
            break
    of_long = [entry[2] > 6 for entry in engine.log if entry[0] == "read"]
    assert not long.is_reading and not long.ended
    assert 3 <= of_long.index(True) <= 4 and sum(of_long) <= 0.3 * len(of_long)
    on.close()


def prompts_on_used_seats() -> list[str]:
    """On a seat with another text, behind a prefix that is restored, on a seat that goes on."""
    shared = "one system prompt for all " * 20
    return ["a" * 10, "b" * 20, "Z" * 300, shared + "first", "Y" * 700, shared + "second", "X" * 90]


def test_the_pace_is_told_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first piece too, before which a seat has another text."""
    on = session(2, n_ctx=4096)
    engine: Any = on.engine
    told: list[int] = []
    monkeypatch.setattr(Pace, "read", lambda _, n, *rest: told.append(n))
    for prompt in prompts_on_used_seats():
        del engine.log[:], told[:]
        list(run_completion(on, request(0, prompt=prompt)))
        assert told == [entry[2] for entry in engine.log if entry[0] == "read"]
    on.close()


def test_what_is_left_of_a_prompt_is_known_before_it_is_read() -> None:
    on = session(2, n_ctx=4096)
    for prompt in prompts_on_used_seats():
        asked = request(0, prompt=prompt)
        task = on.scheduler.submit(on.prepare(asked), partial(events, on, asked))
        on.scheduler.rounds._admit()
        left = task.n_left
        while not task.ended:
            on.scheduler.round()
        begin = Answer.of(task.events).begin
        assert begin is not None and left == begin.prompt_n - begin.cached_n == task.n_read
    on.close()


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


def test_a_common_prefix_is_read_once_on_a_seat_that_had_a_longer_text() -> None:
    """What stands there before the first piece is no part of the prompt."""
    on = session(2, n_ctx=4096)
    engine: Any = on.engine
    for letter in "ab":
        list(run_completion(on, request(0, prompt=letter * 900)))
    text = "a long text about something " * 12
    asked = [request(i, prompt=text + f"question {i}?") for i in range(2)]
    tasks = [on.scheduler.submit(on.prepare(one), partial(events, on, one)) for one in asked]
    del engine.log[:]
    while not all(task.ended for task in tasks):
        on.scheduler.round()
    read = sum(entry[2] for entry in engine.log if entry[0] == "read")
    assert read <= len(tasks[0].ids) + 20
    on.close()


def test_a_common_prefix_is_kept_for_one_that_came_before_the_first_piece() -> None:
    """Two prompts that come at once, where a pass takes all of one: it ends where the other parts from it."""
    on = session(2, n_ctx=4096, n_batch=2048)
    text = "a long text about something " * 20
    asked = [request(i, prompt=text + f"{i}: a question of its own " * 3) for i in range(2)]
    tasks = [on.scheduler.submit(on.prepare(one), partial(events, on, one)) for one in asked]
    while not all(task.ended for task in tasks):
        on.scheduler.round()
    begin = Answer.of(tasks[1].events).begin
    assert begin is not None and begin.cached_n == common_prefix(tasks[0].ids, tasks[1].ids) > 300
    assert [Answer.of(task.events).text for task in tasks] == [alone(one).text for one in asked]
    on.close()


def pieces(ids: list[int]) -> list[int]:
    """In which a prompt is read by itself."""
    fresh = session(2, n_ctx=4096, n_batch=2048)
    engine: Any = fresh.engine
    list(run_completion(fresh, request(2, prompt=ids)))
    fresh.close()
    return [entry[2] for entry in engine.log if entry[0] == "read"]


def test_nothing_is_kept_for_a_prompt_that_was_given_up_before_its_first_piece() -> None:
    """Who comes next to its seat is read as if nobody had waited there."""
    on = session(2, n_ctx=4096, n_batch=2048)
    text = "a long text about something " * 20
    asked = [request(i, prompt=text + f"{i}: a question of its own " * 3) for i in range(2)]
    tasks = [on.scheduler.submit(on.prepare(one), partial(events, on, one)) for one in asked]
    on.scheduler.rounds._admit()
    assert tasks[0].seat is not None and tasks[1].seat is None
    seat = tasks[0].seat
    for task in tasks:
        on.scheduler.abandon(task)
    assert not seat.busy
    engine: Any = on.engine
    ids = [72 + i % 20 for i in range(600)]
    list(run_completion(on, request(2, prompt=ids)))
    assert [entry[1:] for entry in engine.log if entry[0] == "read"] == [
        (seat.engine, n) for n in pieces(ids)
    ]
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


def test_all_are_told_though_a_place_cannot_be_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a failed round; else whoever reads the others would wait for ever."""
    on = session(3)
    asked = [request(i) for i in range(4)]
    tasks = [on.scheduler.submit(on.prepare(one), partial(events, on, one)) for one in asked]
    on.scheduler.round()

    def fails(seat: Any) -> None:
        raise DeviceError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(on.scheduler.seats, "give_back", fails)
        on.scheduler.rounds.end_all(ConfigError("a round failed"))
    assert all(task.ended and isinstance(task.error, ConfigError) for task in tasks)
    assert on.scheduler.rounds.counts == {"running": 0, "waiting": 0}


def test_a_request_that_waits_can_be_cancelled() -> None:
    on, stop = session(1), threading.Event()
    asked = [request(i, max_tokens=200, ignore_eos=True) for i in range(2)]
    first, second = (
        on.scheduler.submit(on.prepare(one), partial(events, on, one), stops)
        for one, stops in zip(asked, (None, stop.is_set))
    )
    for _ in range(3):
        on.scheduler.round()
    assert on.scheduler.rounds.counts == {"running": 1, "waiting": 1}
    stop.set()
    on.scheduler.round()
    assert second.ended and not first.ended
    answer = Answer.of(second.events)
    assert answer.finish is not None and answer.finish.reason == "cancelled" and not answer.text
    on.close()


@pytest.mark.parametrize("pieces", [0, 1, 2])
@pytest.mark.parametrize("whole", [False, True], ids=["", "with logprobs of the prompt"])
def test_a_prompt_that_waits_for_its_turn_can_be_cancelled(pieces: int, whole: bool) -> None:
    """Before its first piece and between two, while those who write are owed all the time; nothing more is read of it."""
    on, stop = session(2, n_ctx=4096), threading.Event()
    engine: Any = on.engine
    writer = on.scheduler.submit(
        on.prepare(first := request(0, max_tokens=400, ignore_eos=True)), partial(events, on, first)
    )
    while not writer.is_written:
        on.scheduler.round()
    asked = on.prepare(request(1, prompt="long " * 100, prompt_logprobs=whole))
    pace = on.scheduler.rounds.pace
    task = on.scheduler.submit(
        asked,
        lambda seat: completion_generation(on, asked, seat, should_stop=stop.is_set).events(
            prompt_logprobs=whole
        ),
        stop.is_set,
    )
    pace.level = 1e9
    while pieces and sum(isinstance(event, Progress) for event in task.events) < pieces:
        on.scheduler.round()
    pace.level = -1e9
    on.scheduler.round()
    assert task.is_reading
    del engine.log[:]
    stop.set()
    on.scheduler.round()
    assert task.ended and task.error is None and {kind for kind, *_ in engine.log} == {"step"}
    answer = Answer.of(task.events)
    assert answer.finish is not None and answer.finish.reason == "cancelled" and not answer.text
    assert writer.is_written and sum(seat.busy for seat in on.scheduler.seats.all) == 1
    on.close()


def test_a_prompt_that_cannot_be_is_refused_alone() -> None:
    on = session(2, n_ctx=256)
    with pytest.raises(ContextOverflowError):
        list(run_completion(on, request(1, prompt="x" * 400)))
    with pytest.raises(ConfigError):
        list(run_completion(on, request(1, prompt=[99999])))
    with pytest.raises(ConfigError, match="use run_chat"):
        list(run_completion(on, on.prepare(ChatRequest(messages=[{"role": "user", "content": "x"}]))))
    assert not on.scheduler.rounds.running and not on.scheduler.rounds.waiting
    on.close()


def test_a_grammar_is_its_request_s_own() -> None:
    pytest.importorskip("llguidance")
    on = session(3)
    digits = GrammarSpec("regex", "[0-9]{5}")
    found = together(on, [request(0), request(1, grammar=digits), request(2)])
    assert found[1].text.isdigit() and len(found[1].text) == 5
    assert found[0].text == alone(request(0)).text and found[2].text == alone(request(2)).text
    on.close()


def test_progress_comes_before_the_first_word() -> None:
    on = session(2)
    kinds = [type(event) for event in run_completion(on, request(3))]
    assert kinds[0] is Begin and kinds[1] is Progress and kinds[-1] is Finish
    on.close()
