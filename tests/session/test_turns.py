"""Turns on one engine: who waits, who is cut off, who is refused."""

from __future__ import annotations

import threading
from collections.abc import Generator

import pytest

from dflash_ggml.errors import ConfigError, DflashError
from dflash_ggml.session.turns import Turns

GUARD_S = 60


def numbers(log: list[str] | None = None) -> Generator[int, None, None]:
    try:
        yield from range(5)
    finally:
        if log is not None:
            log.append("closed")


def test_a_turn_is_given_back_at_the_end_and_on_an_error() -> None:
    turns = Turns()
    assert list(turns.run(numbers())) == [0, 1, 2, 3, 4]
    with pytest.raises(KeyError), turns.taken():
        raise KeyError
    with turns.taken():
        pass
    assert list(turns.run(numbers())) == [0, 1, 2, 3, 4]


def test_the_same_thread_cuts_its_stream_off() -> None:
    turns, log = Turns(), list[str]()
    stream = turns.run(numbers(log))
    assert next(stream) == 0
    with turns.taken():
        assert log == ["closed"]
    with pytest.raises(DflashError, match="cut off"):
        next(stream)


def test_a_stream_that_is_closed_closes_what_it_runs() -> None:
    turns, log = Turns(), list[str]()
    inner = numbers(log)  # held here, so that only closing it can end it
    stream = turns.run(inner)
    assert next(stream) == 0
    stream.close()
    assert log == ["closed"]
    assert list(turns.run(numbers())) == [0, 1, 2, 3, 4]


def test_nobody_takes_a_turn_from_inside_one() -> None:
    turns = Turns()

    def meddle() -> Generator[None, None, None]:
        yield
        with turns.taken():
            pass

    stream = turns.run(meddle())
    next(stream)
    with pytest.raises(ConfigError, match="inside a step"):
        next(stream)
    with turns.taken(), pytest.raises(ConfigError, match="inside a step"), turns.taken():
        pass
    assert list(turns.run(numbers())) == [0, 1, 2, 3, 4]


def test_an_owner_that_ended_is_not_waited_for() -> None:
    """Neither by who comes later nor by who is waiting already."""
    turns, log, order = Turns(), list[str](), list[str]()
    stream = turns.run(numbers(log))
    holding, end = threading.Event(), threading.Event()

    def hold() -> None:
        next(stream)
        holding.set()
        end.wait(GUARD_S)
        order.append("holder ends")

    def wait() -> None:
        with turns.taken():
            order.append("waiter runs")

    holder, waiter = (threading.Thread(target=f, daemon=True) for f in (hold, wait))
    holder.start()
    assert holding.wait(GUARD_S)
    waiter.start()
    waiter.join(0.1)  # so that it waits before the holder ends
    end.set()
    waiter.join(GUARD_S)
    assert order == ["holder ends", "waiter runs"] and log == ["closed"]
    assert list(turns.run(numbers())) == [0, 1, 2, 3, 4]
