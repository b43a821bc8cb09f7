"""In-memory store for previous_response_id, and the routes under /v1/responses that read and delete."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .dialect import new_id
from .errors import ApiError, bad_request

_PREFIXES = {"message": "msg_", "function_call": "fc_", "function_call_output": "fco_", "reasoning": "rs_"}


@dataclass(frozen=True, slots=True)
class _Turn:
    """Messages of one response, input and output, linked to the response that it continues."""

    before: _Turn | None
    messages: tuple[dict[str, Any], ...]
    items: tuple[dict[str, Any], ...]
    size: int  # characters of the whole conversation
    body: dict[str, Any]
    given: tuple[dict[str, Any], ...]


class ResponseStore:
    """Stored conversations by response id, in memory; above the limits the oldest are dropped.

    Args:
        limit: Most responses.
        budget: Most characters of all conversations; shared prefixes count repeatedly.
    """

    def __init__(self, limit: int = 256, budget: int = 64 << 20) -> None:
        self._limit = limit
        self._budget = budget
        self._size = 0
        self._turns: OrderedDict[str, _Turn] = OrderedDict()
        self._items: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()  # large requests are prepared in other threads

    def __len__(self) -> int:
        return len(self._turns)

    def history(self, response_id: str) -> list[dict[str, Any]]:
        """All messages up to and including a response's output.

        Raises:
            ApiError: 400 when the response is not known.
        """
        turn: _Turn | None = self._turn(response_id, 400)
        turns: list[_Turn] = []
        while turn is not None:
            turns.append(turn)
            turn = turn.before
        return [message for t in reversed(turns) for message in t.messages]

    def get(self, item_id: str) -> dict[str, Any] | None:
        """An output item of a stored response."""
        with self._lock:
            return self._items.get(item_id)

    def body(self, response_id: str) -> dict[str, Any]:
        """The body of a response.

        Raises:
            ApiError: 404 when it is not known.
        """
        return self._turn(response_id).body

    def items(self, response_id: str) -> list[dict[str, Any]]:
        """The items of a response's own input.

        Raises:
            ApiError: 404 when it is not known.
        """
        return list(self._turn(response_id).given)

    def delete(self, response_id: str) -> None:
        """Delete a response; those that continue it keep its items.

        Raises:
            ApiError: 404 when it is not known.
        """
        self._turn(response_id)
        with self._lock:
            if response_id in self._turns:
                self._forget(self._turns.pop(response_id))

    def put(
        self,
        response_id: str,
        previous: str | None,
        messages: list[dict[str, Any]],
        items: Sequence[dict[str, Any]] = (),
        body: dict[str, Any] | None = None,
        given: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Store a response: messages of its own input and output, the response it continues, and its output items.

        Args:
            body: The body sent.
            given: The items of its input.
        """
        with self._lock:
            before = self._turns.get(previous) if previous is not None else None
            size = sum(len(str(part)) for part in (*messages, *items, body or {}, *given))
            size += before.size if before is not None else 0
            turn = _Turn(before, tuple(messages), tuple(items), size, body or {}, tuple(given))
            self._turns[response_id] = turn
            self._items.update((item["id"], item) for item in items)
            self._size += size
            while len(self._turns) > self._limit or self._size > self._budget:
                self._forget(self._turns.popitem(last=False)[1])

    def _forget(self, turn: _Turn) -> None:
        """Release a removed turn's share of the budget; under the lock."""
        self._size -= turn.size
        for item in turn.items:
            self._items.pop(item["id"], None)

    def _turn(self, response_id: str, status: int = 404) -> _Turn:
        with self._lock:
            turn = self._turns.get(response_id)
            if turn is not None:
                self._turns.move_to_end(response_id)
        if turn is None:
            message = (
                f"there is no stored response {response_id!r}: it was not stored, or it has been forgotten"
            )
            if status == 404:
                raise ApiError(404, message, "response_id", "response_not_found")
            raise ApiError(400, message, "previous_response_id", "previous_response_not_found")
        return turn


def input_items(given: str | Sequence[Any]) -> list[dict[str, Any]]:
    """The input of a request as a list of items with ids."""
    items: list[dict[str, Any]] = []
    listed: Sequence[Any] = [{"role": "user", "content": given}] if isinstance(given, str) else given
    for item in listed:
        kind = item.get("type") or "message"
        whole = {**item, "id": item.get("id") or new_id(_PREFIXES.get(kind, "item_")), "type": kind}
        if kind == "message":
            content = item.get("content")
            part = "output_text" if item.get("role") == "assistant" else "input_text"
            whole["content"] = [{"type": part, "text": content}] if isinstance(content, str) else content
            whole.setdefault("status", "completed")
        items.append(whole)
    return items


def page(items: list[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """A page of items: `order` (desc unless asc), `after` (an id), `limit` (20).

    Raises:
        ApiError: 400 for an invalid limit, or an unknown id.
    """
    ordered = items if query.get("order") == "asc" else items[::-1]
    if (after := query.get("after")) is not None:
        found = next((i for i, item in enumerate(ordered) if item["id"] == after), None)
        if found is None:
            raise bad_request(f"after: there is no item {after!r}", "after", "invalid_value")
        ordered = ordered[found + 1 :]
    limit = query.get("limit", "20")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit) <= 100):
        raise bad_request(f"limit: {limit!r} is not between 1 and 100", "limit", "invalid_value")
    shown = ordered[: int(limit)]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(shown) < len(ordered),
    }
