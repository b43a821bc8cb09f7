"""The toy engine with places: several texts, rows from one pool, and a step for all of them at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from dflash_ggml.engine.claim import Claim
from dflash_ggml.errors import ConfigError, NoRoomError
from reference.fake_engine import FakeEngine, Snapshot


@dataclass(eq=False)
class FakeRun:
    """A generation that was begun."""

    steps: Any
    place: FakePlace
    finish: str | None = None


class Unclaimed(Claim):
    """Refuses nobody."""

    @contextmanager
    def by(self, what: str) -> Iterator[None]:
        yield


class FakePlace(FakeEngine):
    """A text of an engine with several. Rows are counted in tokens; they need not follow each other."""

    def __init__(self, engine: FakePlaces, rows: int) -> None:
        super().__init__(engine.config, engine.tokenizer, engine.has_draft, engine.replies)
        self.engine, self.rows, self.n_ctx = engine, rows, engine.n_ctx
        self._claim = Unclaimed()
        self.lane = min(set(range(engine.parallel)) - {place.lane for place in engine.places})

    def grow(self, n: int) -> bool:
        if n > self.rows and n - self.rows > self.engine.free:
            return False
        self.rows = max(n, self.rows)
        return True

    def prefill(self, ids: Sequence[int], progress=None, should_stop=None, take_row=None) -> None:
        if not self.grow(len(self._tokens) + len(ids)):
            raise NoRoomError("no rows")
        self.engine.log.append(("read", self, len(ids)))
        super().prefill(ids, progress, should_stop, take_row)

    def hidden_states(self, ids: Sequence[int], take, should_stop=None) -> None:
        if len(ids) <= self.n_ctx and not self.grow(len(ids)):
            raise NoRoomError("no rows")
        super().hidden_states(ids, take, should_stop)

    def begin(self, sampler, **how: Any) -> FakeRun:
        return FakeRun(self.generate(sampler, **how), self)

    def first(self, run: FakeRun) -> Any:
        step = next(run.steps)
        run.finish = step.finish
        return step

    def completed(self, snapshot: Snapshot) -> Snapshot:
        assert self.can_restore(snapshot)
        return replace(snapshot, rows=snapshot.tokens)

    def resume(self, run: FakeRun) -> None:
        if run.place._tokens != self._tokens:
            raise ConfigError("resume: the place holds another text than the run")
        rows, place = self.rows, run.place
        self.__dict__ = place.__dict__  # its generator goes on where it was
        self.rows, self.closed = rows, False
        self.engine.places[self.engine.places.index(self)] = self

    def close(self) -> None:
        self.closed = True
        self.engine.places.remove(self)


@dataclass
class FakePlaces(FakeEngine):
    """An engine with `parallel` places and `n_ctx` rows in all. log: what was done, in order. broken: what the next step raises,
    or what single runs do, by their place."""

    parallel: int = 4
    places: list[FakePlace] = field(default_factory=list)
    log: list[Any] = field(default_factory=list)
    broken: Any = None

    def graph_counts(self) -> dict[str, int]:
        return {"graphs": 1, "kept": 1}

    def run_counts(self) -> dict[str, int]:
        return {**self.graph_counts(), "runs": len(self.log)}

    @property
    def free(self) -> int:
        return self.n_ctx - sum(place.rows for place in self.places)

    def open(self, room: int | None = None) -> FakePlace:
        room = room or self.n_ctx // self.parallel
        if len(self.places) == self.parallel or room > self.free:
            raise NoRoomError("no place")
        place = FakePlace(self, room)
        self.places.append(place)
        return place

    def step(self, runs: Sequence[FakeRun]) -> list[Any]:
        if isinstance(self.broken, Exception):
            error, self.broken = self.broken, None
            raise error
        self.log.append(("step", [run.place for run in runs]))
        return [self._step(run) for run in runs]

    def _step(self, run: FakeRun) -> Any:
        place = run.place
        if self.broken and place in self.broken:
            return self.broken.pop(place)
        if not place.grow(min(self.n_ctx, place.n_tokens + 1)):
            return NoRoomError("no rows")
        try:
            step = next(run.steps)
        except Exception as error:  # noqa: BLE001 - as the real one
            return error
        run.finish = step.finish
        return step
