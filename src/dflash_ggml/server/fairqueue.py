"""A bounded queue with round robin between clients, so that one busy client cannot starve the others."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class QueueFull(Exception):
    """The queue is full."""


class ClientFull(QueueFull):
    """This client's share of the queue is full."""


class QueueClosed(Exception):
    """The queue is closed."""


class FairQueue(Generic[T]):
    """First in, first out within a client; round robin between clients. Thread-safe.

    Args:
        limit: Most waiting entries.
        client_limit: Most waiting entries of one client (None: `limit`).
    """

    def __init__(self, limit: int, client_limit: int | None = None) -> None:
        if limit < 1 or (client_limit is not None and client_limit < 1):
            raise ValueError(f"limits must be at least 1, not {limit} and {client_limit}")
        self.limit = limit
        self.client_limit = limit if client_limit is None else client_limit
        self._queues: OrderedDict[Hashable, deque[T]] = OrderedDict()
        self._served: Hashable = None  # the client of the last entry
        self._size = 0
        self._closed = False
        self._changed = threading.Condition()

    def __len__(self) -> int:
        with self._changed:
            return self._size

    def put(self, client: Hashable, item: T) -> None:
        """Append `item` to its client's queue.

        Raises:
            ClientFull: The client's limit is reached.
            QueueFull: The limit is reached.
            QueueClosed: The queue is closed.
        """
        with self._changed:
            if self._closed:
                raise QueueClosed
            queue = self._queues.get(client)
            if self._size >= self.limit:
                raise QueueFull(f"the queue is full ({self.limit} requests are waiting, the limit for all)")
            if queue is not None and len(queue) >= self.client_limit:
                raise ClientFull(f"{self.client_limit} requests of this client are waiting, its limit")
            if queue is None:
                queue = self._queues[client] = deque()
            queue.append(item)
            self._size += 1
            self._changed.notify()

    def get(self) -> T | None:
        """Take the next entry, waiting for one; None once the queue is closed and empty."""
        with self._changed:
            while not self._size:
                if self._closed:
                    return None
                self._changed.wait()
            # only now, so that clients that arrived meanwhile come before the last entry's client
            if self._served in self._queues:
                self._queues.move_to_end(self._served)
            client, queue = next(iter(self._queues.items()))
            item = queue.popleft()
            if not queue:
                del self._queues[client]
            self._served = client
            self._size -= 1
            return item

    def remove(self, client: Hashable, item: T) -> bool:
        """Remove a waiting `item`; False if it is no longer waiting."""
        with self._changed:
            queue = self._queues.get(client)
            if queue is None or item not in queue:
                return False
            queue.remove(item)
            self._size -= 1
            if not queue:
                del self._queues[client]
            return True

    def close(self) -> list[T]:
        """Refuse new entries and return those still waiting."""
        with self._changed:
            self._closed = True
            waiting = [item for queue in self._queues.values() for item in queue]
            self._queues.clear()
            self._size = 0
            self._changed.notify_all()
            return waiting
