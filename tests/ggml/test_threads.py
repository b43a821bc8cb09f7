"""Tests of the thread count: it follows the load of the machine, and results do not depend on it. 1 second."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from threading import Event, Thread, get_native_id

import numpy as np
import pytest

from dflash_ggml.ggml import device as device_module
from dflash_ggml.ggml.device import F32, Device
from dflash_ggml.ggml.graph import Graph
from dflash_ggml.ggml.store import Workspace
from dflash_ggml.ggml.threads import RETRY_AFTER_S, SHARED_FROM, WINDOW, Pool, ThreadCount, tasks, waited

QUIET, SHARED = SHARED_FROM / 2, 2 * SHARED_FROM  # seconds of waiting per second


def run(count: ThreadCount, seconds: float, share: float) -> list[int]:
    """Windows for so long in which threads wait for that share; the counts on the way, repeats left out."""
    seen = [count.now]
    for _ in range(round(seconds / WINDOW)):
        now = count.judge(WINDOW, share * WINDOW)
        if now != seen[-1]:
            seen.append(now)
    return seen


def test_a_quiet_machine_keeps_all_threads() -> None:
    assert run(ThreadCount(8), 100, QUIET) == [8]


def test_a_crowded_machine_goes_down_to_one() -> None:
    assert run(ThreadCount(8), 10, SHARED) == [8, 7, 6, 5, 4, 3, 2, 1]
    assert run(ThreadCount(32), 0.6, SHARED) == [32, 31, 29, 25, 19, 15, 12]


def test_who_takes_one_of_many_cores_takes_one_thread() -> None:
    """Crowded once a second, calm in between: the step does not grow."""
    count, seen = ThreadCount(16), []
    for _ in range(5):
        run(count, WINDOW, SHARED)
        seen.append(count.now)
        run(count, RETRY_AFTER_S[0] - WINDOW, QUIET)
    assert seen == [15, 14, 13, 12, 11]


def test_a_long_pass_is_judged_by_its_share() -> None:
    count = ThreadCount(2)
    assert count.judge(2.0, 2.0 * QUIET) == 2 and count.judge(2.0, 2.0 * SHARED) == 1


def test_threads_come_back_when_the_others_are_gone() -> None:
    count = ThreadCount(4)
    run(count, 1, SHARED)
    assert run(count, 3.5 * RETRY_AFTER_S[0], 0) == [1, 2, 3, 4]


def test_failed_tries_become_rare() -> None:
    """Cores for two of four: a third is tried, at first each second, at last every thirty."""
    count, tries, seconds = ThreadCount(4), [], 0.0
    while seconds < 300:
        before = count.now
        seconds += WINDOW
        if count.judge(WINDOW, WINDOW * (SHARED if before > 2 else 0)) == 3 and before == 2:
            tries.append(seconds)
    gaps = np.diff(tries)
    assert count.now in (2, 3) and gaps[0] < 3 and gaps[-1] == pytest.approx(RETRY_AFTER_S[1], rel=0.1)
    assert all(later >= sooner - WINDOW for sooner, later in pairwise(gaps))
    assert len(tries) < 16


def test_waiting_only_grows() -> None:
    first = waited(tasks())
    assert 0 <= first <= waited(tasks())


def test_without_files_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("os.listdir", refused)
    monkeypatch.setattr("os.scandir", refused)
    assert not tasks()


def test_a_thread_that_has_ended_waits_for_nothing() -> None:
    assert waited(["999999999"]) == 0


def test_only_threads_that_compute_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What loads files or answers clients beside them waits while they poll."""
    over, callers = Event(), set[str]()
    other = Thread(target=over.wait)
    other.start()
    device = Device.cpu(3, yielding=True)
    pool = device._pool
    assert pool is not None
    monkeypatch.setattr("dflash_ggml.ggml.threads.waited", lambda threads: callers.update(threads) or 0.0)
    pool.waited()
    assert len(callers) == 3 and callers <= tasks()
    assert str(get_native_id()) in callers and str(other.native_id) not in callers
    over.set()
    other.join()
    device.close()


def test_the_pool_follows_and_the_result_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Crowded: 3, 2, 1 threads, then back; each computes the same bits."""
    clock, share = 0.0, 0.0
    monkeypatch.setattr(device_module, "WINDOW", 0.0)
    monkeypatch.setattr("dflash_ggml.ggml.threads.RETRY_AFTER_S", (0.0, 0.0))

    def waiting() -> float:
        nonlocal clock
        clock += share
        return clock

    monkeypatch.setattr(Pool, "waited", lambda _: waiting())
    device = Device.cpu(3, yielding=True)
    workspace = Workspace(device)
    g = Graph(device, 8)
    x = g.input("x", F32, 64, 40)
    y = g.mul_mat(x, x)
    g.output(y)
    g.place(workspace)
    g.inputs["x"].array[:] = np.random.default_rng(0).standard_normal((40, 64))
    seen, results = [], []
    for i in range(8):
        share = 1e6 if i < 4 else 0.0
        seen.append(device.threads_now)
        g.run()
        results.append(device.read(y).copy())
    assert seen[:4] == [3, 2, 1, 1] and seen[-1] == 3
    assert all(np.array_equal(result, results[0]) for result in results)
    g.close()
    workspace.close()
    device.close()


@contextmanager
def one_matmul() -> Iterator[tuple[Device, Graph]]:
    """Two threads that yield, and a graph of one matmul."""
    device = Device.cpu(2, yielding=True)
    workspace = Workspace(device)
    g = Graph(device, 8)
    x = g.input("x", F32, 8, 4)
    g.output(g.mul_mat(x, x))
    g.place(workspace)
    yield device, g
    g.close()
    workspace.close()
    device.close()


def test_waiting_while_nothing_is_computed_is_no_crowding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads of the process wait for cores between two generations."""
    waits = iter([0.0])
    monkeypatch.setattr(device_module, "WINDOW", 0.0)
    monkeypatch.setattr(device_module, "IDLE", 0.0)
    monkeypatch.setattr(Pool, "waited", lambda _: next(waits))
    with one_matmul() as (device, g):
        for between in (1e6, 2e6, 3e6):
            waits = iter([between, between])  # before the graph, after it
            g.run()
            assert device.threads_now == 2


def test_another_thread_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has waited for so far is not what was waited for since the last judgement."""
    waits = iter([0.0])
    monkeypatch.setattr(device_module, "WINDOW", 0.0)
    monkeypatch.setattr(Pool, "waited", lambda _: next(waits))
    with one_matmul() as (device, g):
        waits = iter([0.0, 0.0])
        g.run()
        waits = iter([1e6, 1e6])  # another thread: before the graph, after it
        other = Thread(target=g.run)
        other.start()
        other.join()
        assert device.threads_now == 2


def test_a_fixed_count_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device.cpu(2)
    monkeypatch.setattr(device_module, "WINDOW", 0.0)
    monkeypatch.setattr(ThreadCount, "judge", lambda *_: pytest.fail("nobody asks"))
    workspace = Workspace(device)
    g = Graph(device, 8)
    x = g.input("x", F32, 8, 4)
    g.output(g.mul_mat(x, x))
    g.place(workspace)
    g.run()
    assert device.threads_now == 2
    g.close()
    workspace.close()
    device.close()


def test_what_is_waited_for_counts_by_the_time_that_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU computes between two parts of the host, whose threads poll meanwhile: 0.03 s in 0.18 s."""
    clock, before = iter(i * 0.06 for i in range(1000)), iter([0.0])
    judged: list[tuple[float, float]] = []

    def judge(count: ThreadCount, seconds: float, waited: float) -> int:
        judged.append((seconds, waited))
        return count.now

    monkeypatch.setattr(device_module.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(device_module, "IDLE", 0.5)
    monkeypatch.setattr(ThreadCount, "judge", judge)
    with one_matmul() as (_, g):
        for _ in range(10):
            next(clock)  # nothing was computed for longer than IDLE
        before = iter([1.0, 1.03])
        monkeypatch.setattr(Pool, "waited", lambda _: next(before))
        g.run()
        g.run()
        assert judged == [(pytest.approx(0.18), pytest.approx(0.03))]
