"""Several threads at one scheduler: faults in its rounds, calls from inside them, places that are borrowed between them."""

from __future__ import annotations

import sys
import threading
import time
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from dflash_ggml.errors import ConfigError, ContextOverflowError, DflashError
from dflash_ggml.session.answer import Answer
from dflash_ggml.session.embedding import embed
from dflash_ggml.session.hooks import Hooks
from dflash_ggml.session.session import Session, run_completion
from dflash_ggml.session.task import Task
from reference.fake_engine import FakeEngine
from reference.scheduled import GUARD_S, alone, config, events, read, request, session, together


def test_a_fault_in_a_round_ends_those_in_it_and_not_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    on = session(2)
    on.scheduler.start()
    with monkeypatch.context() as patch:
        patch.setattr(on.scheduler.rounds, "_read", lambda: 1 / 0)
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
        patch.setattr(on.scheduler.rounds, "_read", panics)
        with pytest.raises(DflashError, match="at once"):
            list(run_completion(on, request(1)))
    assert Answer.of(run_completion(on, request(1))).text == alone(request(1)).text
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


def driven_session(driven: bool) -> Any:
    """For two texts; driven: its rounds have a thread of their own."""
    on = session(2)
    if driven:
        on.scheduler.start()
    return on


@pytest.mark.parametrize("driven", [False, True])
def test_a_call_from_inside_a_step_is_refused(driven: bool) -> None:
    on = driven_session(driven)

    def meddle(step: Any) -> None:
        list(run_completion(on, request(2)))

    answers: list[Any] = [Answer()]
    run = run_completion(on, request(1), hooks=Hooks(on_step=meddle))
    reader = threading.Thread(target=read, args=(run, answers, 0), daemon=True)
    reader.start()
    reader.join(10)
    assert isinstance(answers[0], ConfigError) and "inside a step" in str(answers[0])
    on.close()


@pytest.mark.parametrize("driven", [False, True])
def test_closing_from_inside_a_step_is_refused(driven: bool) -> None:
    """It would wait for itself; and nobody would end the others."""
    on = driven_session(driven)
    asked = [request(1), request(2, max_tokens=60)]
    runs = [
        run_completion(on, asked[0], hooks=Hooks(on_step=lambda step: on.close())),
        run_completion(on, asked[1]),
    ]
    answers: list[Any] = [Answer(), Answer()]
    threads = [threading.Thread(target=read, args=(r, answers, i), daemon=True) for i, r in enumerate(runs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert isinstance(answers[0], ConfigError) and "inside a step" in str(answers[0])
    assert answers[1].text == alone(asked[1]).text
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
    on = driven_session(driven)
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
    while not any(task.is_written for task in on.scheduler.rounds.running):
        on.scheduler.round()
    assert on.scheduler._lends
    on.scheduler.rounds.pace.lent(1e9)
    embed(on, [72, 73, 74])  # once nobody writes any more
    assert not on.scheduler.rounds.running
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


def test_a_round_follows_where_a_borrower_found_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the rounds' thread waits for the borrower, who waits for a round."""
    on = session(3, n_ctx=600)
    on.scheduler.start()
    lent, changed, rounds = on.scheduler._lent, on.scheduler._changed, on.scheduler.rounds
    found: list[bool] = []

    def late(room: int) -> Any:
        """The first time when both texts run, and the rounds' thread waits."""
        if not found:
            if sum(task.is_written for task in rounds.running) < 2:
                on.scheduler._owed = True  # as where there are no rows
                return None
            until = time.monotonic() + 1
            while time.monotonic() < until:
                with changed:
                    if len(changed._waiters) > len(threads):  # type: ignore[attr-defined]
                        break
        seat = lent(room)
        found.append(seat is not None)
        return seat

    monkeypatch.setattr(on.scheduler, "_lent", late)
    answers, vectors = [Answer(), Answer()], list[Any]()
    runs = [
        run_completion(on, request(i, prompt="word " * 20, max_tokens=150, ignore_eos=True)) for i in range(2)
    ]
    threads = [threading.Thread(target=read, args=(run, answers, i)) for i, run in enumerate(runs)]
    borrower = threading.Thread(target=lambda: vectors.append(embed(on, [72] * 300)), daemon=True)
    with on.scheduler._driving:  # no round before all have come
        for thread in (*threads, borrower):
            thread.start()
        until = time.monotonic() + GUARD_S
        while (len(rounds.waiting) < 2 or not on.scheduler._borrowers) and time.monotonic() < until:
            time.sleep(1e-3)
    for thread in (borrower, *threads):
        thread.join(GUARD_S)
    assert len(vectors) == 1 and found[-1] and all(answer.finish is not None for answer in answers)
    on.close()


def test_an_embedding_waits_for_rows() -> None:
    """Two texts hold nearly all rows: a long text by itself is read once one of them has ended."""
    on = session(3, n_ctx=600)
    on.scheduler.start()
    answers = [Answer(), Answer()]
    runs = [
        run_completion(on, request(i, prompt="word " * 20, max_tokens=150, ignore_eos=True)) for i in range(2)
    ]
    threads = [threading.Thread(target=read, args=(run, answers, i)) for i, run in enumerate(runs)]
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


class Gpu:
    """A device that is waited for in every step, or never."""

    n_threads, is_gpu = 2, True

    def __init__(self) -> None:
        self.work: Any = None

    def before_waiting(self, work: Any) -> None:
        self.work = work

    def wait(self) -> None:
        if self.work is not None:
            work, self.work = self.work, None
            work()


@pytest.mark.parametrize("waits", [True, False])
def test_readers_are_woken_while_a_gpu_computes(monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    """Of a round after which texts are written on; nobody misses anything where it is not waited for."""
    on, gpu, log = session(2), Gpu(), list[str]()
    engine: Any = on.engine
    step, tell = engine.step, on.scheduler._tell

    def stepped(runs: Any) -> Any:
        log.append("step")
        if waits:
            gpu.wait()
        found = step(runs)
        log.append("done")
        return found

    def told() -> None:
        log.append("told")
        tell()

    monkeypatch.setattr(engine, "device", gpu)
    monkeypatch.setattr(engine, "step", stepped)
    monkeypatch.setattr(on.scheduler, "_tell", told)
    asked = [request(i, max_tokens=60, ignore_eos=True) for i in range(2)]
    expected = [alone(one).text for one in asked]
    on.scheduler.start()
    assert [answer.text for answer in together(on, asked)] == expected
    on.close()
    first, last = log.index("step"), len(log) - 1 - log[::-1].index("step")
    between = log[first + 1 : last]
    assert between.count("step") > 5
    # between two steps nobody is woken, but for the end of the shorter text
    assert sum(a == "done" and b == "told" for a, b in pairwise(between)) <= 1
    assert not waits or between.count("told") >= between.count("step") - 1


def test_no_event_is_lost_that_comes_while_others_are_taken() -> None:
    """Events are appended by who makes rounds, who has no lock of the reader's."""
    on, n = session(2), 1_000_000
    task = Task(on.prepare(request(1)), lambda seat: iter(()), None)  # type: ignore[arg-type, return-value]
    taken: list[Any] = []

    def write() -> None:
        for i in range(n):
            task.events.append(i)  # type: ignore[arg-type]
            if i % 100 == 0:
                on.scheduler._tell()
        with on.scheduler._changed:
            task.ended = True
            on.scheduler._changed.notify_all()

    writer = threading.Thread(target=write)
    on.scheduler._thread = writer  # the reader waits, and makes no rounds
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        writer.start()
        ended = False
        while not ended:
            batch, ended = on.scheduler._taken(task)
            taken += batch
            time.sleep(0.005)  # a slow one finds many
    finally:
        sys.setswitchinterval(before)
    writer.join(GUARD_S)
    assert taken == [*range(n)]
    on.close()


@pytest.mark.parametrize("how", ["close", "borrow"])
def test_what_is_done_with_a_borrowed_place_may_meet_the_scheduler(how: str) -> None:
    """A collector closes unread answers wherever it runs; and whoever asks for another place is told."""
    on, said = session(2), list[str]()
    run = run_completion(on, request(0, max_tokens=400, ignore_eos=True))
    next(run)

    def work(place: Any) -> None:
        if how == "close":
            run.close()
        else:
            with pytest.raises(ConfigError, match="inside"):
                on.scheduler.borrow(lambda other: None)
        said.append("done")

    caller = threading.Thread(target=on.scheduler.borrow, args=(work,), daemon=True)
    caller.start()
    caller.join(5)
    assert not caller.is_alive() and said == ["done"]
    on.scheduler.round()
    assert on.scheduler.rounds.counts["running"] == (how == "borrow")
    run.close()
    on.close()
