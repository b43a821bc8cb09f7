"""One generation beside others: its request, where it stands, and its events until somebody takes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from .events import Event
from .pace import Account
from .prompts import Prepared
from .seat import Seat

if TYPE_CHECKING:
    from ..engine.step import Run
    from ..state.snapshot import Snapshot

Make = Callable[[Seat], Generator[Any, Any, None]]


class Task:
    """One generation, from waiting to its end."""

    def __init__(self, prepared: Prepared, make: Make, should_stop: Callable[[], bool] | None) -> None:
        self.prepared, self.make, self.should_stop = prepared, make, should_stop
        self.events: deque[Event] = deque()
        self.error: BaseException | None = None
        self.ended = self.abandoned = False
        self.seat: Seat | None = None
        self.generator: Generator[Any, Any, None] | None = None
        self.run: Run | None = None  # what it wants a step of
        self.parked: Snapshot | None = None
        self.left: Seat | None = None  # where it was before it was parked
        self.n_left = self.n_read = (
            0  # tokens of its prompt: still to be read; read, beside those that were known
        )
        self.n_tokens = 0  # that were emitted
        self.account: Account | None = None  # of its prompt, while others write
        self.is_short = False  # of rows that others have

    @property
    def ids(self) -> tuple[int, ...]:
        return self.prepared.ids

    @property
    def is_reading(self) -> bool:
        """Whether its prompt is being taken in."""
        return self.seat is not None and self.run is None

    @property
    def is_written(self) -> bool:
        """Whether it is on the device and wants steps."""
        return self.run is not None and self.parked is None
