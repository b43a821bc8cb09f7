"""Tests of the fair queue: order between clients, bounds, removal, closing."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_ggml.server.fairqueue import ClientFull, FairQueue, QueueClosed, QueueFull


def test_clients_alternate() -> None:
    queue: FairQueue[str] = FairQueue(10)
    for item in ("a1", "a2", "a3", "b1", "c1", "b2"):
        queue.put(item[0], item)
    assert [queue.get() for _ in range(6)] == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_a_client_that_arrives_goes_before_the_one_being_served() -> None:
    queue: FairQueue[str] = FairQueue(10)
    queue.put("a", "a1")
    queue.put("a", "a2")
    assert queue.get() == "a1"
    queue.put("b", "b1")
    queue.put("a", "a3")
    queue.put("b", "b2")
    assert [queue.get() for _ in range(2)] == ["b1", "a2"]
    queue.put("c", "c1")
    assert [queue.get() for _ in range(3)] == ["b2", "c1", "a3"]


def test_limits_count_what_they_name() -> None:
    """One client may fill the queue where no limit of its own is set, and exactly that limit where one is."""
    queue: FairQueue[int] = FairQueue(4)
    for number in range(4):
        queue.put("a", number)
    with pytest.raises(QueueFull) as full:
        queue.put("b", 4)
    assert type(full.value) is QueueFull
    queue = FairQueue(4, 3)
    for number in range(3):
        queue.put("a", number)
    with pytest.raises(ClientFull):
        queue.put("a", 3)
    queue.put("b", 4)
    with pytest.raises(QueueFull) as full:
        queue.put("c", 5)
    assert type(full.value) is QueueFull and len(queue) == 4
    with pytest.raises(ValueError, match="at least 1"):
        FairQueue(4, 0)


@pytest.mark.parametrize("full", [1, 3])
@pytest.mark.parametrize("pauses", [0, 1], ids=["at once", "after another was served"])
def test_a_sequential_client_waits_for_one_request_of_each_full_client(full: int, pauses: int) -> None:
    """However many those have waiting, and though they fill up again at once."""
    queue: FairQueue[str] = FairQueue(256, 256 // (full + 1))
    others, waited = [str(i) for i in range(full)], []

    def fill() -> None:
        for client in others:
            with pytest.raises(ClientFull):
                while True:
                    queue.put(client, client)

    fill()
    for _ in range(20):
        for _ in range(pauses):
            queue.get()
        queue.put("small", "small")
        waited.append(0)
        while queue.get() != "small":
            waited[-1] += 1
            fill()
    assert max(waited) == full - pauses


def test_remove_and_close() -> None:
    queue: FairQueue[int] = FairQueue(4)
    queue.put("a", 1)
    queue.put("b", 2)
    assert queue.remove("a", 1) and not queue.remove("a", 1) and not queue.remove("z", 9)
    assert queue.close() == [2]
    assert queue.get() is None
    with pytest.raises(QueueClosed):
        queue.put("a", 3)


def test_close_wakes_a_waiting_reader() -> None:
    queue: FairQueue[int] = FairQueue(1)
    got: list[int | None] = []
    thread = threading.Thread(target=lambda: got.append(queue.get()))
    thread.start()
    queue.close()
    thread.join(10)
    assert got == [None]


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60))
def test_nothing_is_lost_and_clients_keep_order(actions: list[tuple[int, bool]]) -> None:
    queue: FairQueue[tuple[int, int]] = FairQueue(8, 4)
    accepted: list[tuple[int, int]] = []
    taken: list[tuple[int, int]] = []
    for number, (client, take) in enumerate(actions):
        if take and len(queue):
            item = queue.get()
            assert item is not None
            taken.append(item)
        elif not take:
            try:
                queue.put(client, (client, number))
                accepted.append((client, number))
            except QueueFull:
                assert len(queue) == 8 or sum(i[0] == client for i in accepted if i not in taken) == 4
    taken += queue.close()
    assert sorted(taken) == sorted(accepted)
    for client in range(4):
        own = [n for c, n in taken if c == client]
        assert own == sorted(own)
