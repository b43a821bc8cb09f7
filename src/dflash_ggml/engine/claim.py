"""Mutual exclusion of calls that change a slot."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import ConfigError
from .loading import no_host_memory


class Claim:
    """Held by one call, or by one generation until it has ended or been closed; others are refused, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: str | None = None

    @contextmanager
    def by(self, what: str) -> Iterator[None]:
        """Exclusive access for the call named `what`, until the context ends; a MemoryError in it becomes a DeviceError.

        Raises:
            ConfigError: Another call holds the slot; it names that one.
            DeviceError: Host memory ran out.
        """
        with self._lock:
            owner = self._owner
            if owner is None:
                self._owner = what
        if owner is not None:
            advice = "close it first" if owner == "a generation" else "wait for its end"
            raise ConfigError(f"{what}: {owner} is running on this engine; {advice}")
        try:
            yield
        except MemoryError as error:
            raise no_host_memory(what) from error
        finally:
            # the caller is the owner here; no lock, which the garbage collector could find taken by its own thread
            self._owner = None
