"""The engine: a target, maybe a draft, and the texts that they decode."""

from __future__ import annotations

import threading
from collections.abc import Sequence as Items
from dataclasses import replace

from ..config import EngineConfig
from ..decode.experience import Experience
from ..decode.sequence import Sequence
from ..errors import ConfigError, DeviceError, NoNumbersError, NoRoomError
from ..state.memory import SCRATCH
from .loading import Loaded, Progress, load
from .place import Place
from .side_by_side import SideBySide
from .step import Run, Step

ALONE = 16  # steps of a single text after which it gets the first lane


class Engine(Place):
    """A target and, if given, a draft, and places for the texts that are decoded on them.

    It is a place itself, that of a single text, which has all rows: what most callers want. `open` gives others, whose texts are
    decoded side by side by `step`; the engine's own text is forgotten by then, and can be had again once they are closed.
    """

    def __init__(self, config: EngineConfig, loaded: Loaded) -> None:
        self.config, self.n_ctx, self.memory = config, loaded.n_ctx, loaded.memory
        self.tokenizer, self.metadata = loaded.tokenizer, loaded.metadata
        self.passes, self.drafter, self.over = loaded.passes, loaded.drafter, loaded.over
        self.batches = loaded.batches
        self.device, self.costs, self.costs_file = loaded.device, loaded.costs, loaded.costs_file
        self.n_vocab = self.passes.target.n_vocab
        self.experience = Experience()
        self.stepper = SideBySide(self.passes, self.drafter, self.costs)
        self.passing = threading.RLock()  # held while a pass may run, so that closing waits for it
        self.in_pass = False
        self._closed = self._closing = False
        self._places: dict[int, Place] = {}  # by lane
        self._alone = 0  # steps of a single text in a row that is not in the first
        rows = self.passes.rows.lend(self.passes.n_rows)
        super().__init__(self, Sequence(first_slot=rows.start), rows, loaded.copies)

    @classmethod
    def load(
        cls, config: EngineConfig, progress: Progress | None = None, calibration_seconds: float | None = None
    ) -> Engine:
        """Open the files and bring the weights to the device; `progress(stage, done, total)` in bytes.

        calibration_seconds: how long costs may be measured, if they are; None: 1.5 s on a GPU, 1 s on the CPU.
        Raises ModelFileError, ConfigError, or DeviceError when something does not fit.
        """
        loaded = load(config, progress, calibration_seconds)
        # one that was only found may have been left out
        return cls(replace(config, draft=loaded.draft), loaded)

    # ---- texts side by side

    @property
    def parallel(self) -> int:
        """Texts that can be decoded side by side."""
        return self.passes.state.lanes

    @property
    def places(self) -> list[Place]:
        """Those that are open."""
        return [self._places[lane] for lane in sorted(self._places)]

    def open(self, room: int | None = None) -> Place:
        """A place for a text, with rows for `room` tokens to begin with; None: an equal share of all, or what is left in one
        piece. Raises NoRoomError where no place or not as many rows are free."""
        with self._claim.by("open"), self.passing:
            self.alive()
            if self._lent is not None:
                self._leave()
                self.sequence.clear()
            lane = next((lane for lane in range(self.parallel) if lane not in self._places), None)
            if lane is None:
                raise NoRoomError(f"all {self.parallel} places are taken (--parallel)")
            pool = self.passes.rows
            if room is None:
                room = max(min(self.n_ctx // self.parallel, pool.longest - self.over), 1)
            rows = self._lend(min(room, self.n_ctx) + self.over)
            copies = None if self.copies is None else self.copies.beside()
            place = Place(self, Sequence(first_slot=rows.start, end_slot=rows.stop, lane=lane), rows, copies)
            self._places[lane] = place
            place.reset()
            return place

    def _lend(self, n: int) -> range:
        """n rows, for which texts may move. Raises NoRoomError."""
        try:
            return self.passes.rows.lend(n)
        except NoRoomError:
            if not self.gather(n):
                raise
            return self.passes.rows.lend(n)

    def gather(self, n: int, rows: range | None = None) -> bool:
        """See Shared."""
        moves = self.passes.rows.gathered(n, rows)
        for now, to in moves or ():
            next(place for place in self._places.values() if place._lent == now).move(to)
        return moves is not None

    def left(self, lane: int) -> None:
        """The place with this lane was closed."""
        del self._places[lane]

    def step(self, runs: Items[Run]) -> list[Step | Exception]:
        """One step of each run, of different places. A run that fails alone has its error in the place of its step: that of its
        sampler, or NoRoomError, after which nothing is lost. Raises what breaks the pass itself."""
        with self.passing:
            self.alive()
            self.in_pass = True
            try:
                found = [self._ready(run) for run in runs]
                able = [run for run, error in zip(runs, found) if error is None]
                for run in able:  # once all have their rows: for those of the last the first may have moved
                    self._places[run.sequence.lane]._overwrite()
                self._seat_first(able)
                together = [run for run in able if not run.apart]
                passes = [together] if together else []
                came: dict[int, Step | Exception] = {}
                for part in (*passes, *([run] for run in able if run.apart)):
                    came |= zip(map(id, part), self._step_part(part))
                return [came[id(run)] if error is None else error for run, error in zip(runs, found)]
            finally:
                self.in_pass = False

    def _step_part(self, runs: list[Run]) -> list[Step | Exception]:
        """One step of runs side by side. Those that come to no numbers there, and do alone, without one among them that does not
        and is to blame, are stepped apart from then on: a text is read again for it, too dear for every step."""
        places = [self._places[run.sequence.lane] for run in runs]
        try:
            came = self.stepper.step_each(runs, self.others(runs))
        finally:
            for place in places:
                place.clear_spoilt()
        spoilt = [run for run, step in zip(runs, came) if isinstance(step, NoNumbersError)]
        if not spoilt:
            return came
        beside = len(runs) > 1 and self.passes.takes_several
        came = [place.stepped(run, step, beside) for place, run, step in zip(places, runs, came)]
        if beside and not any(isinstance(step, NoNumbersError) for step in came):
            for run in spoilt:
                run.apart = True
        return came

    def _seat_first(self, runs: Items[Run]) -> None:
        """Let a text that has been stepped alone for a while have the first lane; whoever is there, and waits, gets its lane.

        All that belongs to the lanes is swapped, 151 MB each of the 27B's: as much as a GPU reads in a tenth of a millisecond.
        The other design, graphs of one text that are told a lane, would cost the first lane a look-up in every layer, or a set
        of graphs per lane the time to build them. Cache rows stay where they are.
        """
        lane = runs[0].sequence.lane if len(runs) == 1 else 0
        self._alone = self._alone + 1 if lane else 0
        if self._alone < ALONE:
            return
        self._alone, mine, other = 0, self._places[lane], self._places.get(0)
        try:
            graph = self.passes.exchanging(lane, self.drafter.per_lane if self.drafter else ())
        except (DeviceError, MemoryError):
            return  # it goes on where it is
        both = [place.sequence for place in (mine, other) if place is not None]
        before = [sequence.torn for sequence in both]
        for sequence in both:
            sequence.torn = True
        graph.run()
        if self.drafter:
            self.drafter.exchanged(0, lane)
        del self._places[lane]
        for place, at in ((mine, 0), (other, lane)):
            if place is not None:
                place.sequence.lane, self._places[at] = at, place
        for sequence, torn in zip(both, before):
            sequence.torn = torn

    def others(self, runs: Items[Run]) -> list[Sequence]:
        """The sequences of open places but those of the runs."""
        lanes = {run.sequence.lane for run in runs}
        return [place.sequence for lane, place in self._places.items() if lane not in lanes]

    def _ready(self, run: Run) -> Exception | None:
        """What keeps a run from being stepped."""
        place = self._places.get(run.sequence.lane)
        if place is None or place.sequence is not run.sequence:
            return ConfigError("the place of this run is closed; resume it in another one")
        if run.sequence.pending is None:
            return ConfigError("this run has failed or was never begun by `first`; begin another one")
        try:
            place.ready()
        except DeviceError as error:
            return error
        return None

    # ---- life

    @property
    def nbytes(self) -> dict[str, int]:
        """Device bytes by part, named as in the memory plan, and the graphs' scratch."""
        draft = self.drafter.nbytes if self.drafter else {}
        return {**self.passes.nbytes, **draft, SCRATCH: self.passes.workspace.nbytes}

    def graph_counts(self) -> dict[str, int]:
        """Graphs built so far, and graphs that are kept; from any thread, also while a pass runs."""
        graphs = self.passes.graphs
        return {"graphs": graphs.builds, "kept": len(graphs)}

    def run_counts(self) -> dict[str, int]:
        """The same, and graph runs so far; not beside a pass of another thread, which may build or drop graphs."""
        return {**self.graph_counts(), "runs": self.passes.graphs.runs}

    def alive(self) -> None:
        if self._closed or self._closing:
            raise DeviceError("the engine is closed")

    def _there(self) -> None:
        """Its own text has all rows, or none."""
        self.alive()
        if self._lent is None and self._places:
            raise ConfigError("texts are open side by side on this engine; close their places first")
        if self._lent is None:
            self._lent = self.passes.rows.lend(self.passes.n_rows)
            self._stale = range(self.passes.rows.take_stale(self._lent))
            self.passes.state.reset()

    def close(self) -> None:
        """Free the device memory; the engine is of no use afterwards. Waits for a pass under way in another thread."""
        self._closing = (
            True  # a lock goes to who comes first: a call of many passes would take it again and again
        )
        try:
            with self.passing:
                if self.in_pass:
                    raise ConfigError(
                        "close: called from inside a step of this engine; end the generation first"
                    )
                if self._closed:
                    return
                for place in self.places:
                    place._lent = None
                self._closed, self._places = True, {}
                if self.drafter:
                    self.drafter.close()
                self.passes.close()
                self.device.close()
        finally:
            self._closing = self._closed

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
