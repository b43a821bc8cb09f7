"""Tests of several threads at one scheduler: abandoned streams, calls from inside steps, errors, tasks on slots, closing."""

from __future__ import annotations

import sys
import threading
import time
from itertools import count, pairwise
from typing import Any

import pytest

from dflash_ggml.errors import ConfigError, ContextOverflowError, DflashError
from dflash_ggml.session.answer import Answer
from dflash_ggml.session.embedding import embed
from dflash_ggml.session.generation import Generation
from dflash_ggml.session.hooks import Hooks
from dflash_ggml.session.session import Session, run_completion
from reference.fake_engine import BUFFERS, FakeEngine
from reference.scheduled import GUARD_S, alone, batched, config, read, request, session, submitted

ENDLESS: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}


def opened(parallel: int = 2, has_thread: bool = True, **options: Any) -> Session:
    on = session(parallel, **options)
    if has_thread:
        on.scheduler.start()
    return on


def in_threads(*calls: Any, guard: float = GUARD_S) -> None:
    """Run calls, each in a thread of its own."""
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(guard)
        assert not thread.is_alive(), "a call hangs"


def embedded(ids: list[int]) -> Any:
    """What an embedding is without others."""
    return embed(Session(FakeEngine(config())), ids).tolist()  # type: ignore[arg-type]


# ---- callers that drive


def test_a_thread_that_calls_again_cuts_off_the_stream_that_it_left() -> None:
    on = session(2)
    for call in (
        lambda: list(run_completion(on, request(2))),
        lambda: on.scheduler.run_on_slot(lambda slot: None),
    ):
        stream = run_completion(on, request(1, **ENDLESS))
        next(stream), next(stream)
        call()
        with pytest.raises(DflashError, match="cut off"):
            next(stream)
        assert not on.scheduler.is_busy
    on.close()


def test_another_thread_waits_for_a_stream_that_is_left_open() -> None:
    """It does not advance meanwhile; it ends with its reader's thread."""
    on = session(1)
    stream = run_completion(on, request(1, **ENDLESS))
    order, holds, end = list[str](), threading.Event(), threading.Event()

    def hold() -> None:
        next(stream)
        holds.set()
        end.wait(GUARD_S)
        order.append("holder ends")

    def wait() -> None:
        assert Answer.of(run_completion(on, request(2))).text == alone(request(2)).text
        order.append("waiter runs")

    holder, waiter = (threading.Thread(target=f, daemon=True) for f in (hold, wait))
    holder.start()
    assert holds.wait(GUARD_S)
    waiter.start()
    while not on.scheduler.waiting:
        time.sleep(1e-3)
    steps = len(on.engine.log)  # type: ignore[attr-defined]
    end.set()
    waiter.join(GUARD_S)
    assert order == ["holder ends", "waiter runs"]
    assert on.engine.log[steps][0] == "read"  # type: ignore[attr-defined]
    with pytest.raises(DflashError, match="cut off"):
        next(stream)
    on.close()


def test_an_iteration_without_work_wakes_none() -> None:
    """Two threads that wait for an open stream would wake each other for ever."""
    on = session(1)
    stream = run_completion(on, request(1, **ENDLESS))
    next(stream)
    in_threads(lambda: submitted(on, request(2)))
    version = on.scheduler._version
    assert on.scheduler.iterate() is False and on.scheduler._version == version
    stream.close()
    assert on.scheduler.iterate() is True
    on.close()


def test_threads_that_alternate_as_driver() -> None:
    """Each reads its own answer, on fewer slots than threads."""
    on, answers = session(2), [Answer() for _ in range(5)]
    requests = [request(i) for i in range(5)]
    runs = [run_completion(on, one) for one in requests]
    in_threads(*(lambda i=i, run=run: read(run, answers, i) for i, run in enumerate(runs)))
    assert [answer.text for answer in answers] == [alone(one).text for one in requests]
    on.close()


def test_a_stream_that_is_closed_frees_its_slot() -> None:
    on = session(1)
    stream = run_completion(on, request(1, **ENDLESS))
    next(stream)
    stream.close()
    assert not on.scheduler.is_busy and not any(slot.busy for slot in on.slots.all)
    on.close()


@pytest.mark.parametrize("has_thread", [False, True])
def test_a_call_from_inside_a_step_is_refused(has_thread: bool) -> None:
    on, refused = opened(2, has_thread), list[str]()

    def meddle(step: Any) -> None:
        for call in (
            lambda: list(run_completion(on, request(2))),
            lambda: on.scheduler.run_on_slot(lambda slot: None),
            on.close,
        ):
            with pytest.raises(ConfigError, match="inside a step"):
                call()
            refused.append("said")

    requests = [request(1), request(2, max_tokens=60)]
    answers: list[Any] = [Answer(), Answer()]
    runs = [
        run_completion(on, one, hooks=hooks) for one, hooks in zip(requests, (Hooks(on_step=meddle), Hooks()))
    ]
    in_threads(*(lambda i=i, run=run: read(run, answers, i) for i, run in enumerate(runs)), guard=10)
    assert [answer.text for answer in answers] == [alone(one).text for one in requests] and len(refused) > 3
    on.close()


# ---- a thread that drives


class Panic(BaseException):
    """What a library in another language raises."""


@pytest.mark.parametrize("error", [ZeroDivisionError("at once"), Panic("at once")])
def test_a_fault_in_an_iteration_ends_those_in_it_and_not_the_thread(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    on = opened()

    def fails(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(on.scheduler, "_prefill", fails)
        with pytest.raises((ZeroDivisionError, DflashError), match="at once"):
            list(run_completion(on, request(1)))
    assert Answer.of(run_completion(on, request(1))).text == alone(request(1)).text
    on.close()


def test_requests_that_come_and_go_all_the_time() -> None:
    on, failed = opened(), list[Exception]()

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

    in_threads(*(lambda number=number: client(number) for number in range(8)))
    assert not failed
    on.close()


def test_closing_ends_what_runs() -> None:
    on, steps = opened(), count()

    def hold(step: Any) -> None:
        """Let the second step last until the session is being closed, so that the answer cannot end before."""
        until = time.monotonic() + GUARD_S
        while next(steps) and not on.scheduler._closed and time.monotonic() < until:
            time.sleep(0.001)

    run = run_completion(on, request(0, **ENDLESS), hooks=Hooks(on_step=hold))
    next(run)
    on.close()
    with pytest.raises((DflashError, ConfigError)):
        list(run)
    with pytest.raises(ConfigError, match="closed"):
        list(run_completion(on, request(1)))


class Gpu:
    """A device that is waited for in every step, or never."""

    n_threads, is_gpu, buffers = 2, True, BUFFERS

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
    """After an iteration that another step follows; no event is missed where the GPU is not waited for."""
    on, gpu, log = session(2), Gpu(), list[str]()
    engine: Any = on.engine
    step, tell = engine.step, on.scheduler._notify

    def stepped(runs: Any) -> Any:
        log.append("step")
        if waits:
            gpu.wait()
        found = step(runs)
        log.append("done")
        return found

    def reported() -> None:
        log.append("told")
        tell()

    monkeypatch.setattr(engine, "device", gpu)
    monkeypatch.setattr(engine, "step", stepped)
    monkeypatch.setattr(on.scheduler, "_notify", reported)
    requests = [request(i, max_tokens=60, ignore_eos=True) for i in range(2)]
    found = submitted(on, *requests)
    on.scheduler.start()
    answers = [Answer.of(on.scheduler.events(one)) for one in found]
    assert [answer.text for answer in answers] == [alone(one).text for one in requests]
    on.close()
    first, last = log.index("step"), len(log) - 1 - log[::-1].index("step")
    between = log[first + 1 : last]
    assert between.count("step") > 5
    # between two steps none is woken, but for the end of the shorter sequence
    assert sum(a == "done" and b == "told" for a, b in pairwise(between)) <= 1
    assert not waits or between.count("told") >= between.count("step") - 1


def test_no_event_is_lost_that_comes_while_others_are_taken() -> None:
    """Events are appended by the driver, which holds no lock of the reader's."""
    on, n = session(2), 200_000
    generation, taken = Generation([1], {}), list[Any]()

    def write() -> None:
        for i in range(n):
            generation.events.append(i)
            if i % 100 == 0:
                on.scheduler._notify()
        generation.ended = True
        on.scheduler._notify()

    writer = threading.Thread(target=write)
    on.scheduler._thread = writer  # the reader waits, and does not drive
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        writer.start()
        taken = list(on.scheduler.events(generation))
    finally:
        sys.setswitchinterval(before)
    writer.join(GUARD_S)
    assert taken == [*range(n)]


# ---- loans


@pytest.mark.parametrize("has_thread", [False, True])
def test_embeddings_beside_sequences(has_thread: bool) -> None:
    on, vectors = opened(2, has_thread), list[Any]()
    (generation,) = submitted(on, request(0, max_tokens=60))
    in_threads(lambda: vectors.append(embed(on, [72, 73, 74]).tolist()))
    assert vectors == [embedded([72, 73, 74])]
    assert Answer.of(on.scheduler.events(generation)).text == alone(request(0, max_tokens=60)).text
    on.close()


@pytest.mark.parametrize("has_thread", [False, True])
def test_running_sequences_have_a_step_between_two_loans(has_thread: bool) -> None:
    """Two clients that run tasks all the time."""
    on = session(3)
    engine: Any = on.engine
    found = submitted(on, *(request(i, **ENDLESS) for i in range(2)))
    while not all(one.is_decoding for one in found):
        on.scheduler.iterate()
    steps: list[int] = []

    def client() -> None:
        for _ in range(8):
            on.scheduler.run_on_slot(lambda slot: steps.append(len(engine.log)))

    if has_thread:
        on.scheduler.start()
    in_threads(client, client)
    beside = [n for n in steps if n < len(engine.log)]
    assert len(steps) == 16 and len(set(beside)) == len(beside) > 1
    on.close()


def test_a_loan_waits_until_sequences_have_had_their_time() -> None:
    on = session(2)
    (generation,) = submitted(on, request(0, max_tokens=200, ignore_eos=True))
    while not generation.is_decoding:
        on.scheduler.iterate()
    on.scheduler.budget.debit(1e9)
    embed(on, [72, 73, 74])  # once none decodes any more
    assert generation.ended
    on.close()


def test_idle_slots_give_their_rows_to_an_embedding() -> None:
    on = session(2, n_ctx=600)
    batched(on, [request(i, prompt="word " * 50, max_tokens=3) for i in range(2)])
    assert sum(slot.rows for slot in on.engine.slots) > 400  # type: ignore[attr-defined]
    assert embed(on, [72] * 500).tolist() == embedded([72] * 500)
    on.close()


@pytest.mark.parametrize("has_thread", [False, True])
def test_an_embedding_waits_for_rows(has_thread: bool) -> None:
    """Two sequences have nearly all rows: a long text is embedded once one of them has ended."""
    on, vectors = session(3, n_ctx=600), list[Any]()
    requests = [request(i, prompt="word " * 20, max_tokens=150, ignore_eos=True) for i in range(2)]
    found = submitted(on, *requests)
    while not all(one.is_decoding for one in found):
        on.scheduler.iterate()
    if has_thread:
        on.scheduler.start()
    in_threads(lambda: vectors.append(embed(on, [72] * 300).tolist()))
    assert vectors == [embedded([72] * 300)]
    assert [Answer.of(on.scheduler.events(one)).text for one in found] == [
        alone(one).text for one in requests
    ]
    with pytest.raises(ContextOverflowError):
        embed(on, [72] * 700)
    on.close()


def test_work_on_a_loan_may_meet_the_scheduler() -> None:
    """The garbage collector closes unread answers wherever it runs."""
    on, done = session(2), list[str]()
    run = run_completion(on, request(0, **ENDLESS))
    next(run)

    def work(slot: Any) -> None:
        run.close()
        with pytest.raises(ConfigError, match="inside"):
            on.scheduler.run_on_slot(lambda other: None)
        done.append("done")

    in_threads(lambda: on.scheduler.run_on_slot(work), guard=5)
    assert done == ["done"]
    on.scheduler.iterate()
    assert not on.scheduler.running
    on.close()
