"""Tests of one call at a time: what would change the state under a suspended generation is refused by name, from any thread."""

from __future__ import annotations

import gc
import threading
from contextlib import closing

import pytest

from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.errors import ConfigError, DeviceError
from reference.engine_kit import steps

CALLS = {
    "reset": lambda e, snapshot: e.reset(),
    "prefill": lambda e, snapshot: e.prefill([1]),
    "restore": lambda e, snapshot: e.restore(snapshot),
    "snapshot": lambda e, snapshot: e.snapshot(),
    "a generation": lambda e, snapshot: next(steps(e)),
}


@pytest.fixture(params=["fake", "real"])
def engine_kind(request):
    return request.param


@pytest.fixture()
def engine(make_engine):
    return make_engine(n_ctx=1024)


def in_thread(work) -> BaseException | None:
    """What `work` raises in a thread of its own."""
    caught: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the caller judges it
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it hangs"
    return caught[0] if caught else None


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_refused_while_a_generation_is_suspended(engine, call, elsewhere):
    engine.prefill([1, 2, 3])
    snapshot = engine.snapshot()
    text = [t for s in steps(engine, max_tokens=40) for t in s.tokens]
    engine.restore(snapshot)
    engine.prefill([])
    engine.reset()
    engine.prefill([1, 2, 3])
    running = steps(engine, max_tokens=40)
    written = list(next(running).tokens)
    written += next(running).tokens
    if elsewhere:
        error = in_thread(lambda: CALLS[call](engine, snapshot))
    else:
        with pytest.raises(ConfigError) as caught:
            CALLS[call](engine, snapshot)
        error = caught.value
    assert isinstance(error, ConfigError)
    assert "a generation is running on this engine; close it first" in str(error) and str(error).startswith(
        call
    )
    written += [t for s in running for t in s.tokens]
    assert written == text, "the refused call has left a mark"
    engine.reset()


def test_an_abandoned_generation_gives_way_wherever_the_collector_finds_it(engine):
    """In a reference cycle it ends when the garbage collector comes by, which may be in the midst of the next call."""

    def abandoned() -> None:
        class Box:
            pass

        box = Box()
        box.itself, box.running = box, steps(engine)
        next(box.running)

    outcomes, before = set(), gc.get_threshold()
    try:
        for threshold in range(1, 80):
            gc.disable()
            engine.reset()
            engine.prefill([1, 2, 3])
            abandoned()
            gc.set_threshold(threshold)
            gc.enable()
            error = in_thread(engine.reset)
            gc.disable()
            assert error is None or isinstance(error, ConfigError)
            outcomes.add(error is None)
            gc.collect()
    finally:
        gc.set_threshold(*before)
        gc.enable()
    engine.reset()


def test_a_generation_that_was_not_begun_claims_nothing(engine):
    engine.prefill([1, 2, 3])
    waiting = steps(engine)
    engine.reset()
    with pytest.raises(ConfigError, match="prefill"):
        next(waiting)


def close_during(engine, work, inside: threading.Event, go_on: threading.Event) -> BaseException | None:
    """Close the engine while `work`, in a thread of its own, is inside a pass; what `work` raises."""
    raised: list[BaseException | None] = []
    working = threading.Thread(target=lambda: raised.append(in_thread(work)))
    working.start()
    assert inside.wait(60)
    shutting = threading.Thread(target=engine.close)
    shutting.start()
    shutting.join(0.2)  # a slow machine only weakens this
    assert shutting.is_alive(), "the engine was closed under a pass"
    go_on.set()
    shutting.join(60)
    working.join(60)
    return raised[0]


def test_a_step_in_another_thread_is_waited_for_by_close(engine):
    engine.prefill([1, 2, 3])
    inside, go_on = threading.Event(), threading.Event()

    class Slow(Sampler):
        def sample(self, row, history=()):
            inside.set()
            assert go_on.wait(60)
            return super().sample(row, history)

    sampler = Slow(SamplingParams(temperature=1, seed=1), engine.n_vocab)
    running = engine.generate(sampler, stop=lambda t: False)
    error = close_during(engine, lambda: list(running), inside, go_on)
    assert isinstance(error, DeviceError) and "closed" in str(error)


@pytest.mark.parametrize("engine_kind", ["real"], indirect=True)  # the fake engine has no passes
def test_close_waits_for_a_draft_that_takes_in(engine, monkeypatch):
    """A prefill lets the draft see what was accepted first; that is a pass like any other."""
    engine.prefill([1, 2, 3])
    with closing(steps(engine)) as running:
        next(running)
        next(running)
    assert engine.sequence.unseen
    inside, go_on, take_in = threading.Event(), threading.Event(), engine.drafter.take_in

    def slow(sequence) -> None:
        inside.set()
        assert go_on.wait(60)
        take_in(sequence)

    monkeypatch.setattr(engine.drafter, "take_in", slow)
    error = close_during(engine, lambda: engine.prefill([4]), inside, go_on)
    assert isinstance(error, DeviceError) and "closed" in str(error)


@pytest.mark.parametrize("engine_kind", ["real"], indirect=True)
def test_forgetting_waits_for_a_step_in_another_thread(engine):
    with engine.passing:
        waiting = threading.Thread(target=engine.forget)
        waiting.start()
        waiting.join(0.2)  # a slow machine only weakens this
        assert waiting.is_alive(), "texts were forgotten that a step looks in"
    waiting.join(60)
    assert not waiting.is_alive()


def test_closing_from_inside_a_step_is_refused(engine):
    engine.prefill([1, 2, 3])

    def stop(token: int) -> bool:
        with pytest.raises(ConfigError, match="close"):
            engine.close()
        return True

    sampler = Sampler(SamplingParams(temperature=0), engine.n_vocab)
    assert [s.finish for s in engine.generate(sampler, stop=stop)] == ["stop"]
    engine.prefill([engine.pending])
