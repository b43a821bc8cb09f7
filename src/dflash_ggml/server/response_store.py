"""The memory behind previous_response_id."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .errors import ApiError


@dataclass(frozen=True, slots=True)
class _Turn:
    """Messages of one response, input and output, behind those of the response that it continues."""

    before: _Turn | None
    messages: tuple[dict[str, Any], ...]
    items: tuple[dict[str, Any], ...]
    size: int  # characters of the whole conversation up to here


class ResponseStore:
    """Conversations of stored responses by response id, in memory; beyond a bound the oldest are forgotten.

    limit: responses; budget: characters of all their conversations, where shared beginnings count every time.
    """

    def __init__(self, limit: int = 256, budget: int = 64 << 20) -> None:
        self._limit = limit
        self._budget = budget
        self._size = 0
        self._turns: OrderedDict[str, _Turn] = OrderedDict()
        self._items: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()  # large requests are prepared beside the event loop

    def __len__(self) -> int:
        return len(self._turns)

    def history(self, response_id: str) -> list[dict[str, Any]]:
        """All messages up to and including a response's output; raises ApiError 400 when it is not known."""
        turn: _Turn | None = self._turn(response_id)
        turns: list[_Turn] = []
        while turn is not None:
            turns.append(turn)
            turn = turn.before
        return [message for t in reversed(turns) for message in t.messages]

    def get(self, item_id: str) -> dict[str, Any] | None:
        """An output item of a stored response."""
        with self._lock:
            return self._items.get(item_id)

    def put(
        self,
        response_id: str,
        previous: str | None,
        messages: list[dict[str, Any]],
        items: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Remember a response: messages of its own input and output, what it continued, and its output items."""
        with self._lock:
            before = self._turns.get(previous) if previous is not None else None
            size = sum(len(str(m)) for m in (*messages, *items)) + (before.size if before is not None else 0)
            self._turns[response_id] = _Turn(before, tuple(messages), tuple(items), size)
            self._items.update((item["id"], item) for item in items)
            self._size += size
            while len(self._turns) > self._limit or self._size > self._budget:
                _, forgotten = self._turns.popitem(last=False)
                self._size -= forgotten.size
                for item in forgotten.items:
                    self._items.pop(item["id"], None)

    def _turn(self, response_id: str) -> _Turn:
        with self._lock:
            turn = self._turns.get(response_id)
            if turn is not None:
                self._turns.move_to_end(response_id)
        if turn is None:
            message = (
                f"there is no stored response {response_id!r}: it was not stored, or it has been forgotten"
            )
            raise ApiError(400, message, "previous_response_id", "previous_response_not_found")
        return turn
